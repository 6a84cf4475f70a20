"""How often the proof sees a planted fault, and how often one that is not there."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from fault_tolerant_transformer_lab import script_proof
from fault_tolerant_transformer_lab.contract import Contract, Progress, RandomGenerators
from fault_tolerant_transformer_lab.equivalence import example_run, like_a_fresh_process
from fault_tolerant_transformer_lab.mutations import (
    MUTATIONS,
    RandomRun,
    campaign,
    detection_rate,
    family_of,
    faults_of,
    mutants_of,
    random_run,
    same_tensors,
)

# `FTTL_STATISTICS=200 pytest tests/test_mutations.py` runs the whole campaign; the default is CI's part of it.
ROOT = Path(__file__).resolve().parent.parent
N = int(os.environ.get("FTTL_STATISTICS", "6"))


class Adapted:
    "A trainer with every kind of participant: a scheduler, an average, data of its own, generators."

    def __init__(self, optimizer: type[torch.optim.Optimizer], seed: int) -> None:
        RandomGenerators().seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)  # type: ignore[call-arg]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
        self.data = RandomRun(seed).parts["data"]
        self.inputs = torch.randn(self.data.n_rows, 4)
        self.progress = Progress()
        self.contract = Contract(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.data,
                                 average=self.average, progress=self.progress, rng=RandomGenerators())

    def advance(self) -> float:
        inputs = self.inputs[self.data.take(2)]
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.progress.record(loss.item(), 2)
        return loss.item()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_every_mutation_of_a_complete_trainer_is_caught(optimizer: type[torch.optim.Optimizer]) -> None:
    mutants = mutants_of(lambda directory: Adapted(optimizer, 3), steps=5)
    assert {mutant.mutation: mutant.outcome for mutant in mutants} == dict.fromkeys(
        [mutation.name for mutation in MUTATIONS], "caught")
    assert detection_rate(mutants) == 1.0


def test_what_has_no_effect_is_told_from_what_was_missed() -> None:
    outcomes = {mutant.mutation: mutant.outcome for mutant in mutants_of(example_run, steps=4)}
    assert outcomes["rate halved"] == "no effect" and outcomes["reset average"] == "nothing to plant"
    assert "missed" not in outcomes.values() and outcomes["one flipped bit"] == "caught"
    assert detection_rate([]) is None


@pytest.mark.parametrize(("steps", "at"), [(4, (4,)), (4, (0,)), (4, (2, 9)), (2, ())])
def test_a_place_that_the_run_does_not_have_is_refused(steps: int, at: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"at: expected completed steps from 1 to {steps - 1}, .*of {steps}"):
        mutants_of(example_run, steps=steps, at=at)


def test_the_judge_of_the_ends_reads_bits_and_not_numbers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.tensor([0.0, float("nan")])}, tmp_path / "a")
    save_file({"x": torch.tensor([-0.0, float("nan")])}, tmp_path / "b")
    assert same_tensors(tmp_path / "a", tmp_path / "a") and not same_tensors(tmp_path / "a", tmp_path / "b")


def test_participants_are_known_by_their_kind() -> None:
    kinds = {name: family_of(part) for name, part in Adapted(torch.optim.SGD, 1).contract.participants.items()}
    assert kinds == {"model": "module", "optimizer": "optimizer", "scheduler": "scheduler", "data": "other",
                     "average": "module", "progress": "progress", "rng": "generator"}


def test_a_drawn_trainer_is_the_same_each_time_and_another_for_another_seed() -> None:
    losses = []
    for seed in (5, 5, 6):
        with like_a_fresh_process():
            run = RandomRun(seed)
            losses.append([run.advance() for _ in range(4)])
    assert losses[0] == losses[1] != losses[2]


def test_the_trainers_drawn_cover_what_they_should() -> None:
    with like_a_fresh_process():
        runs = [random_run(Path(), seed) for seed in range(40)]
        faults = {fault for seed in range(40) for fault in faults_of(seed)}
    assert {run.optimizer_name for run in runs} == {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"}
    assert {"scheduler" in run.parts for run in runs} == {"average" in run.parts for run in runs} == {True, False}
    assert {run.n_micro for run in runs} == {1, 2} and len({tuple(run.inputs.shape) for run in runs}) > 10
    assert len(faults) == 12


def test_no_sound_trainer_is_called_divergent_and_no_fault_equivalent() -> None:
    told = campaign(N, first_seed=10_000)
    assert told.wrong == [] and told.sound == {"EQUIVALENT": N}
    assert sum(told.planted.values()) == N and "EQUIVALENT" not in told.planted and "ERROR" not in told.planted


def statistics() -> dict:
    "The benchmark that kills scripts drawn at random, loaded by its path."
    return runpy.run_path(str(ROOT / "benchmarks" / "proof_statistics.py"))


@pytest.mark.skipif(bool(script_proof._no_strace()), reason=script_proof._no_strace() or "none")
def test_no_sound_script_is_called_divergent_and_no_fault_equivalent() -> None:
    told = statistics()["script_campaign"](max(3, N // 2), first_seed=10_000)
    assert told.wrong == [] and told.sound == {"EQUIVALENT": max(3, N // 2)}
    assert "EQUIVALENT" not in told.planted and sum(told.planted.values()) == max(3, N // 2)


def test_the_scripts_drawn_cover_what_they_should() -> None:
    loop = runpy.run_path(str(ROOT / "tests" / "trainers" / "drawn_loop.py"))
    drawn = [loop["drawn"](seed) for seed in range(200)]
    for name, n in {"optimizer": 4, "schedule": 4, "noise": 3, "form": 5, "width": 5, "ema": 2, "every": 2}.items():
        assert len({about[name] for about in drawn}) == n, name
    assert len({fault for seed in range(200) for fault in loop["faults_of"](seed)}) == 14


def test_the_published_statistics_of_scripts_are_of_two_hundred_each_without_a_wrong_verdict() -> None:
    told = json.loads((ROOT / "benchmarks" / "results" / "script_statistics.json").read_text())
    assert told["n"] == sum(told["sound"].values()) == sum(told["planted"].values()) == 200
    assert told["wrong"] == [] and told["sound"] == {"EQUIVALENT": 200} and "EQUIVALENT" not in told["planted"]
    assert len(told["by_fault"]) == 14 and {"checkpoint", "chain", "event", "random"} <= set(told["killed"])


def test_the_published_statistics_are_of_two_hundred_each_without_a_wrong_verdict() -> None:
    told = json.loads((ROOT / "benchmarks" / "results" / "proof_statistics.json").read_text())
    assert told["n"] == sum(told["sound"].values()) == sum(told["planted"].values()) == 200
    assert told["wrong"] == [] and told["sound"] == {"EQUIVALENT": 200}
