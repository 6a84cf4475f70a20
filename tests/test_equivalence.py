"""The proof of restart equivalence: what it must find, what it must not claim, and how it fails."""

import functools
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fault_tolerant_transformer_lab import equivalence
from fault_tolerant_transformer_lab.checkpoint_file import collector_at_rest
from fault_tolerant_transformer_lab.config import ExperimentConfig
from fault_tolerant_transformer_lab.contract import Contract, Progress, RandomGenerators
from fault_tolerant_transformer_lab.equivalence import (
    FAULTS,
    Attempt,
    Bench,
    ContractDriver,
    Ended,
    ExampleRun,
    Interruption,
    ProofError,
    Prover,
    Route,
    TrainingDriver,
    Verdict,
    Wishes,
    Witness,
    example_run,
    final_divergence,
    first_divergence,
    follow,
    prove,
    prove_restart,
    prove_training,
)
from fault_tolerant_transformer_lab.suspects import OUTSIDE
from fault_tolerant_transformer_lab.training import TrainingRun

SMALL = ExperimentConfig(vocab_size=64, block_size=8, d_model=8, n_heads=2, n_layers=1, dropout=0.1, seed=5, steps=4,
                         batch_size=2, learning_rate=1e-2, checkpoint_every=2)
quietly = functools.partial(prove_restart, progress_bar=False)
in_process = functools.partial(quietly, how="clean", in_process=True)


def faulty(name: str) -> functools.partial:
    return functools.partial(example_run, fault=name)


def first_row(proof: equivalence.Proof) -> equivalence.Row:
    return next(row for row in proof.rows if row.divergence)


# --- What must be found equal


def test_every_boundary_and_every_kind_of_disk_operation_is_survived_by_a_real_kill() -> None:
    proof = quietly(example_run, steps=3, interrupt_at=[2], how="sigkill", knock_out=False, resumes=1)
    proof.raise_if_different()
    places = [row.boundary for row in proof.rows[1:]]
    assert {f"step 2, {name}" for name in equivalence.BOUNDARIES if name != "during_write"} <= set(places)
    during = {place.split(": ")[1] for place in places if "during_write" in place}
    for operation in ("create", "write", "fsync", "replace", "sync_directory"):
        assert {f"before {operation}", f"after {operation}"} <= during
    assert {row.stopped for row in proof.rows[1:]} == {"SIGKILL", "SIGKILL ×3"}
    assert proof.rows[-1].boundary == "step 2, after_publication; step 2, during_restore; step 2, after_restore"
    assert proof.rows[-1].segments[:2] == ((0, 1), (1, 2)) and proof.rows[-1].segments[-1] == (2, 3)


def test_every_split_of_a_run_by_clean_stops_is_equal() -> None:
    proof = in_process(example_run, steps=8, interrupt_at="every", knock_out=False)
    proof.raise_if_different()
    assert [row.boundary for row in proof.rows[1:8]] == [f"step {step}, step boundary" for step in range(1, 8)]
    assert [(row.boundary, row.stopped) for row in proof.rows[8:]] == [
        ("steps 4, 5, 6, step boundary", "clean stop ×3")]


def test_a_chain_of_kills_in_one_run() -> None:
    proof = quietly(example_run, steps=6, interrupt_at=[2], how="sigkill", resumes=4, boundaries=["after_update"],
                    knock_out=False)
    proof.raise_if_different()
    chain = proof.rows[-1]
    assert chain.stopped == "SIGKILL ×4" and chain.replayed == 4 and chain.boundary == "steps 2, 3, 4, 5, after_update"


def test_saving_less_often_replays_more() -> None:
    proof = quietly(example_run, steps=5, save_every=3, interrupt_at=[5], how="sigkill", boundaries=["after_update"],
                    knock_out=False)
    proof.raise_if_different()
    assert [row.replayed for row in proof.rows] == [0, 2]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_process_computes_with_the_threads_asked_for(threads: int) -> None:
    proof = quietly(example_run, steps=2, interrupt_at=[1], threads=threads, boundaries=["after_backward"],
                    knock_out=False)
    proof.raise_if_different()
    assert proof.facts["threads"] == proof.facts["environment"]["threads"] == threads


def make_training_run(directory: Path) -> TrainingRun:
    return TrainingRun(SMALL)


def test_the_labs_own_run_is_a_restartable_run_like_any_other() -> None:
    proof = quietly(make_training_run, steps=3, interrupt_at=[2], boundaries=["after_backward"])
    assert proof.verdict is Verdict.EQUIVALENT and proof.not_exercised == ()


def test_train_survives_stops_signals_and_kills() -> None:
    proof = prove_training(SMALL, interrupt_at=[3], progress_bar=False)
    proof.raise_if_different()
    assert {row.stopped for row in proof.rows[1:]} == {"clean stop", "SIGTERM", "SIGKILL", "SIGKILL ×2", "SIGKILL ×3"}
    assert {one.participant: one.outcome for one in proof.knockouts} == dict.fromkeys(
        ("model", "optimizer", "progress", "rng"), "caught")


def text_config(folder: Path, **changes: Any) -> ExperimentConfig:
    "An experiment with an epoch's end, a warm-up, accumulation and evaluation within ten steps."
    (folder / "text.txt").write_text("a run is more than its weights, and less than its machine. " * 22)
    return ExperimentConfig(**{
        "vocab_size": 257, "block_size": 16, "d_model": 8, "n_heads": 2, "n_layers": 1, "dropout": 0.1, "seed": 5,
        "steps": 9, "batch_size": 8, "grad_accumulation": 2, "learning_rate": 1e-2, "checkpoint_every": 3,
        "eval_every": 4, "data": f"text:{folder / 'text.txt'}", "tokenizer": "byte",
        "schedule": {"kind": "cosine", "warmup_steps": 3, "horizon": 12, "floor": 0.1}, **changes})


def test_the_default_of_train_covers_every_place_where_a_loop_has_most_to_lose(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    batches = TrainingRun(config).batches
    [end] = [step for step in range(1, 9) if batches.epoch_of(step) > batches.epoch_of(step - 1)]
    assert 3 < end < 8
    proof = prove_training(config, progress_bar=False, knock_out=False)
    proof.raise_if_different()
    rows = [(row.stopped, row.boundary) for row in proof.rows]
    splits = {1, 2, end - 1, end, end + 1}
    assert {("clean stop", f"step {step}, step boundary") for step in splits} <= set(rows)
    assert {("SIGKILL", place) for place in (
        "step 1, after_update", "step 2, after_update", f"step {end}, after_update", "step 9, after_backward",
        "step 9, after_update", "step 4, in_evaluation", "step 6, in_accumulation")} <= set(rows)
    assert any("during_restore" in boundary and "after_restore" in boundary for _, boundary in rows)
    assert any(stopped == "SIGKILL ×3" for stopped, _ in rows) and len(set(rows)) == len(rows)


def test_only_the_steps_asked_for_are_interrupted() -> None:
    proof = prove_training(SMALL, interrupt_at=[3], how="clean", resumes=1, knock_out=False, progress_bar=False)
    assert [row.point for row in proof.rows] == ["", "clean@3"]


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, {"the first step": [1], "warm-up": [2], "an epoch's end": [5, 4, 6], "evaluation": [4], "the last step": [9]}),
    ({"eval_every": 0, "steps": 1, "schedule": {"kind": "constant"}},
     {"the first step": [1], "warm-up": [], "an epoch's end": [], "evaluation": [], "the last step": [1]})])
def test_the_steps_with_most_to_lose(changes: dict, expected: dict, tmp_path: Path) -> None:
    assert equivalence.telling_steps(text_config(tmp_path, **changes), epoch_end=5) == expected


# --- What must be found different

EXPECTED = {  # fault: step, restoring, first leaf, suspect
    "optimizer not restored": (3, True, "optimizer.state[0].step", "optimizer"),
    "optimizer left out": (4, False, "model.0.weight", "optimizer"),
    "model left out": (4, False, "optimizer.state[0].exp_avg", "the model is in no participant"),
    "counter left out": (4, False, "model.0.weight", "state outside the contract"),
    "generator lost": (4, False, "model.0.weight", "generator torch_cpu"),
    "batch repeated": (4, False, "model.0.weight", "data position"),
    "position left out": (4, False, "model.0.weight", "data position"),
    "learning rate off by one": (4, False, "model.0.weight", "learning rate"),
    "step off by one": (4, False, "model.0.weight", "step off by one"),
    "second batch skipped": (5, False, "model.0.weight", "data position"),
    "momentum changed": (4, False, "model.0.weight", "optimizer"),
    "noise left out": (4, False, "model.0.weight", "generator run.noise"),
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_planted_fault_is_found_where_it_begins(fault: str) -> None:
    proof = in_process(faulty(fault), steps=6, interrupt_at=[3], knock_out=False)
    found = first_row(proof).divergence
    assert proof.verdict is Verdict.DIVERGENT and found is not None
    assert (found.step, found.restoring, found.where, found.suspect) == EXPECTED[fault]
    if not found.restoring:
        assert found.max_abs and found.max_ulp and found.share
    with pytest.raises(ProofError, match=f"(?s)DIVERGENT.*suspect {found.suspect}"):
        proof.raise_if_different()


def test_every_fault_has_its_expectation() -> None:
    elsewhere = {"not deterministic", "nothing learned", "pass left out", "threads changed", "average left out"}
    assert set(FAULTS) == {*EXPECTED, *elsewhere}


def test_a_pass_that_is_not_counted_on_is_told_from_a_lost_position() -> None:
    proof = in_process(faulty("pass left out"), steps=8, interrupt_at=[3, 7], knock_out=False, resumes=1)
    assert [row.outcome for row in proof.rows] == ["equal", "equal", "different"]  # the first pass has nothing to lose
    found = first_row(proof).divergence
    assert found is not None and (found.step, found.suspect) == (8, "sampler epoch")
    assert "that of step 2, 6 steps back" in found.reason


def test_a_drift_in_the_last_bits_is_laid_on_the_threads() -> None:
    proof = in_process(faulty("threads changed"), steps=9, interrupt_at=[2], knock_out=False, resumes=1)
    found = first_row(proof).divergence
    assert proof.verdict is Verdict.DIVERGENT and found is not None
    assert found.suspect == "environment" and "threads 1 and 2" in found.reason and found.max_ulp in range(1, 9)


def test_the_suspects_name_what_nobody_declared() -> None:
    found = first_row(in_process(faulty("counter left out"), steps=4, interrupt_at=[2], knock_out=False)).divergence
    assert found is not None and [suspect.name for suspect in found.suspects] == [OUTSIDE, "run.counter"]
    assert "(2 and 0)" in found.suspects[1].reason


def test_an_average_outside_the_checkpoint_is_no_equivalence() -> None:
    proof = in_process(faulty("average left out"), steps=4, interrupt_at=[2], knock_out=False)
    assert proof.verdict is Verdict.NOT_EXERCISED and "did not survive: run.average" in proof.reason
    in_process(faulty("average left out"), steps=4, interrupt_at=[2], knock_out=False,
               expendable=["run.average"]).raise_if_different()


def test_a_run_is_let_go_of_as_soon_as_its_attempt_is_over() -> None:
    "What waits for the collector, such as a loader whose workers only end with it, would be there for long."
    runs = []

    def make(directory: Path) -> ExampleRun:
        runs.append(weakref.ref(run := ExampleRun()))
        return run

    in_process(make, steps=3, interrupt_at=[1])  # the first optimizer imports a lot, which keeps its frames
    runs.clear()
    with collector_at_rest():
        in_process(make, steps=3, interrupt_at=[1])
        assert len(runs) > 3 and [run() for run in runs if run() is not None] == []


def test_a_learning_rate_that_the_resume_sets_is_no_equivalence() -> None:
    class SetsItsRate(ExampleRun):
        "Multiplies each rate once it was resumed, as a script does that is started again with another flag."

        def advance(self) -> float:
            if self.resumed_at < 0 and self.progress.step:
                self.optimizer.register_step_pre_hook(lambda optimizer, *_: [
                    group.update(lr=group["lr"] * 1.5) for group in optimizer.param_groups] and None)
            return super().advance()

    found = first_row(in_process(lambda directory: SetsItsRate(), steps=4, interrupt_at=[2], resumes=1)).divergence
    assert found is not None and (found.step, found.suspect) == (3, "learning rate")


def test_a_bug_of_one_split_is_found_by_the_default_splits() -> None:
    class AtThePassesEnd(ExampleRun):
        "Goes wrong only where it is resumed exactly at the end of a pass over its data, after six steps."

        def advance(self) -> float:
            if self.resumed_at < 0 and self.progress.step == 6:
                self.passes.behind = 4
            return super().advance()

    proof = in_process(lambda directory: AtThePassesEnd(), steps=9, knock_out=False, resumes=1)
    assert proof.verdict is Verdict.DIVERGENT
    assert [row.point for row in proof.rows if row.outcome == "different"] == ["clean@6"]


def test_a_generator_that_advances_and_belongs_to_nobody_makes_the_verdict_abstain() -> None:
    class Samples(ExampleRun):
        "Draws what it shows to its user from a generator of its own, which no loss depends on."

        def __init__(self) -> None:
            super().__init__()
            self.shown = torch.Generator().manual_seed(3)

        def advance(self) -> float:
            torch.rand(3, generator=self.shown)
            return super().advance()

    proof = in_process(lambda directory: Samples(), steps=4, interrupt_at=[2], knock_out=False)
    assert proof.verdict is Verdict.NOT_EXERCISED and "did not survive: run.shown" in proof.reason


def test_scratch_that_every_step_writes_anew_is_not_called_lost() -> None:
    class Scratch(ExampleRun):
        def advance(self) -> float:
            loss = super().advance()
            self.last = self.inputs * loss
            return loss

    in_process(lambda directory: Scratch(), steps=4, interrupt_at=[2], knock_out=False).raise_if_different()


def test_the_evidence_of_a_difference_is_kept() -> None:
    found = first_row(in_process(faulty("learning rate off by one"), steps=4, interrupt_at=[2])).divergence
    assert found is not None
    assert found.evidence["rates"] == [[0.05 / 3], [0.05 / 4]] and found.evidence["gradients"] == []
    assert found.evidence["batch"][0] == found.evidence["batch"][1] and "loss" not in found.evidence["differing"]
    assert found.evidence["n_differing"] == len(found.evidence["differing"]) > 4

def test_a_fault_is_found_after_a_kill_too() -> None:
    proof = quietly(faulty("generator lost"), steps=4, interrupt_at=[3], boundaries=["after_update"], knock_out=False,
                    resumes=1)
    assert {row.stopped: row.outcome for row in proof.rows[1:]} == {"clean stop": "different", "SIGKILL": "different"}


class Averaging(ExampleRun):
    "Keeps an average of its weights, which takes part and is not restored."

    def __init__(self) -> None:
        super().__init__()
        self.average = Average(self.model)
        self.contract = Contract(**self.contract.participants, average=self.average)

    def advance(self) -> float:
        loss = super().advance()
        self.average.update(self.model)
        return loss


class Average(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("mean", nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        self.forgetful = False

    def update(self, model: nn.Module) -> None:
        if self.forgetful:
            self.mean.zero_()
            self.forgetful = False
        self.mean.lerp_(nn.utils.parameters_to_vector(model.parameters()).detach(), 0.1)


def test_a_participant_that_no_loss_depends_on_is_suspected_by_name() -> None:
    def make_run(directory: Path) -> Averaging:
        run = Averaging()
        run.average.register_load_state_dict_post_hook(lambda module, _: setattr(module, "forgetful", True))
        return run

    proof = in_process(make_run, steps=4, interrupt_at=[2], knock_out=False)
    found = first_row(proof).divergence
    assert found is not None and (found.step, found.where, found.suspect) == (3, "average.mean", "average")
    in_process(lambda directory: Averaging(), steps=4, interrupt_at=[2]).raise_if_different()


def test_a_repeated_batch_is_suspected_even_where_no_batch_digest_is_kept() -> None:
    def make_run(directory: Path) -> ExampleRun:
        run = ExampleRun("batch repeated")
        record = run.progress.record
        run.progress.record = lambda loss, n_tokens, batch_digest=b"": record(loss, n_tokens)
        return run

    found = first_row(in_process(make_run, steps=4, interrupt_at=[2], knock_out=False)).divergence
    assert found is not None and (found.step, found.suspect) == (3, "data position")
    assert "that of step 2" in found.reason  # known by what the model was called with


def without_batch_digests(run: ExampleRun) -> ExampleRun:
    record = run.progress.record
    run.progress.record = lambda loss, n_tokens, batch_digest=b"": record(loss, n_tokens)  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize(("fault", "suspect"), [
    ("counter left out", "state outside the contract"),
    ("model left out", "the model is in no participant"), ("generator lost", "generator torch_cpu")])
def test_what_is_undeclared_is_suspected_too_where_no_batch_digest_is_kept(fault: str, suspect: str) -> None:
    proof = in_process(lambda directory: without_batch_digests(ExampleRun(fault)), steps=4, interrupt_at=[2],
                       knock_out=False)
    found = first_row(proof).divergence
    assert found is not None and (found.step, found.suspect) == (3, suspect)


class Scaling(ExampleRun):
    "Scales its gradients by a counter that nobody declared: the loss of the step is still right."

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0
        self.optimizer.register_step_pre_hook(self.scale)

    def scale(self, *_: object) -> None:
        self.count += 1
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(self.count)


def test_an_undeclared_counter_that_only_the_gradients_see_is_not_laid_on_the_optimizer() -> None:
    found = first_row(in_process(lambda directory: Scaling(), steps=4, interrupt_at=[2], knock_out=False)).divergence
    assert found is not None and (found.step, found.suspect) == (3, "state outside the contract")
    assert "a counter" in found.reason


def test_the_report_claims_only_what_was_compared(tmp_path: Path) -> None:
    proof = in_process(example_run, steps=3, interrupt_at=[2], knock_out=False)
    assert "after every step: loss, batch, and the tensors" in proof.table() and "metrics.jsonl" not in proof.table()
    proof = in_process(lambda directory: without_batch_digests(ExampleRun()), steps=3, interrupt_at=[2],
                       knock_out=False)
    proof.raise_if_different()
    assert "batch" not in proof.compared() and "after every step: loss, and the tensors" in proof.table()
    assert proof.compared().endswith("at the end: the digest of the last checkpoint")
    proof = in_process(faulty("not deterministic"), steps=3, interrupt_at=[2])
    assert "after every step" in proof.compared() and "at the end" not in proof.compared()
    kept = proved(TrainingDriver(SMALL), tmp_path, CLEAN_AT_3).compared()
    assert "loss, batch, and" in kept and kept.endswith("the digest of the last checkpoint and metrics.jsonl")


def test_nothing_is_claimed_of_a_run_that_failed() -> None:
    class Fails(ExampleRun):
        def advance(self) -> float:
            raise RuntimeError("no step")

    proof = in_process(lambda directory: Fails(), steps=2)
    assert proof.verdict is Verdict.ERROR and proof.compared() == "" and "compared" not in proof.table()


@pytest.mark.parametrize("times", [0, 2])
def test_a_step_that_progress_does_not_count_once_is_told_with_the_remedy(times: int) -> None:
    def make_run(directory: Path) -> ExampleRun:
        run = ExampleRun()
        record = run.progress.record

        def miscounted(*arguments: Any) -> None:
            for _ in range(times):
                record(*arguments)

        run.progress.record = miscounted  # type: ignore[method-assign]
        return run

    proof = in_process(make_run, steps=2)
    assert proof.verdict is Verdict.ERROR and "leave the argument out" not in str(proof)
    assert f"advance() did one step, from 0 to 1, but progress counts {times}" in str(proof)
    assert "call progress.record(...) in advance()" in str(proof)


@dataclass(frozen=True)
class TamperingDriver(TrainingDriver):
    "`train`, after which one line of the metrics log is written twice when the run was resumed."

    def run(self, attempt: Attempt, witness: Witness) -> None:
        super().run(attempt, witness)
        log = attempt.directory / "metrics.jsonl"
        if attempt.trace.name != "attempt-0.jsonl":
            lines = log.read_bytes().splitlines(keepends=True)
            log.write_bytes(b"".join([*lines[:2], *lines[1:]]))


def proved(driver: equivalence.Driver, workspace: Path, wishes: Wishes, steps: int = 4) -> equivalence.Proof:
    prover = Prover(Bench(driver, jobs=2, hang_timeout=60), workspace, steps, threads=1)
    return prove(prover, wishes, show_progress=False)


CLEAN_AT_3 = Wishes([3], ["clean"], 1, "kinds", False)


def test_the_metrics_log_is_compared_byte_for_byte(tmp_path: Path) -> None:
    found = first_row(proved(TamperingDriver(SMALL), tmp_path, CLEAN_AT_3)).divergence
    assert found is not None and (found.where, found.step, found.suspect) == ("metrics.jsonl", 3, "metrics log")


@dataclass(frozen=True)
class StartsOverDriver(ContractDriver):
    "Throws the checkpoints away before each attempt: the run ends right, and all work was lost."

    def run(self, attempt: Attempt, witness: Witness) -> None:
        for path in (attempt.directory / "checkpoints").glob("step-*"):
            path.unlink()
        super().run(attempt, witness)


def test_published_work_that_is_done_again_is_no_equivalence(tmp_path: Path) -> None:
    proof = proved(StartsOverDriver(example_run, 4), tmp_path, CLEAN_AT_3)
    found = first_row(proof).divergence
    assert proof.verdict is Verdict.LOST_WORK and found is not None and "3 published steps were" in found.reason
    assert "did 3 published steps over again" in proof.reason and proof.rows[1].lost == 3
    with pytest.raises(ProofError, match="LOST_WORK"):
        proof.raise_if_different()


def test_a_loss_that_never_changes_tells_of_no_fault() -> None:
    class Flat(ExampleRun):
        def advance(self) -> float:
            super().advance()
            self.progress.losses.fill_(1.0)
            return 1.0

    proof = in_process(lambda directory: Flat(), steps=4, interrupt_at=[2])
    assert proof.verdict is Verdict.NOT_EXERCISED and "the loss is the same at every step" in proof.reason


# --- What changed between the start and the resume


class Changing(ExampleRun):
    "Another trainer when it is made the second time: the store must refuse it, and say what is other."

    def __init__(self, made: list[int], change: str) -> None:
        super().__init__()
        changed = len(made) > 1 and made[-1] > 2  # the two uninterrupted runs are made before
        settings = {"learning_rate": 0.05, "batch_size": 4, "dropout": 0.2, "length": 24, "content": "a"}
        others = {"learning_rate": 0.1, "batch_size": 6, "dropout": 0.3, "length": 30, "content": "b"}
        if changed and change in settings:
            settings[change] = others[change]
        if changed and change == "architecture":
            self.model[0] = nn.Linear(6, 9)
        if changed and change == "threads":
            torch.set_num_threads(torch.get_num_threads() + 1)
        data = {name: settings.pop(name) for name in ("length", "content")}
        self.contract = Contract(identity={"config": settings, "data": data}, **self.contract.participants)


@pytest.mark.parametrize(("change", "told"), [
    ("learning_rate", "learning_rate: checkpoint 0.05, requested 0.1"),
    ("batch_size", "batch_size: checkpoint 4, requested 6"), ("dropout", "dropout: checkpoint 0.2, requested 0.3"),
    ("length", "length: checkpoint 24, requested 30"), ("content", "content: checkpoint a, requested b"),
    ("architecture", "model.0.weight"), ("threads", "threads: checkpoint 1, here 2")])
def test_what_changed_at_the_resume_is_refused_by_name(change: str, told: str) -> None:
    made: list[int] = []

    def make_run(directory: Path) -> Changing:
        made.append(len(made) + 1)
        return Changing(made, change)

    proof = in_process(make_run, steps=3, interrupt_at=[2], knock_out=False, resumes=1, threads=1)
    assert proof.verdict is Verdict.ERROR and told in proof.rows[1].detail, proof.rows[1].detail
    assert [row.outcome for row in proof.rows] == ["equal", "refused"] and proof.rows[1].divergence is None
    assert "1 of 1 runs were refused their checkpoint" in proof.reason


class MakesAnIterator(ExampleRun):
    "Makes a data loader's iterator when it is built, which draws a number from torch's global generator."

    def __init__(self) -> None:
        super().__init__()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.inputs), batch_size=4, shuffle=True)
        before = torch.get_rng_state()
        self.waiting = iter(loader)
        assert not torch.equal(before, torch.get_rng_state())


def test_generators_are_restored_after_whatever_a_run_draws_while_it_is_built() -> None:
    in_process(lambda directory: MakesAnIterator(), steps=4, interrupt_at=[2], resumes=1).raise_if_different()


class RestoresTooEarly(MakesAnIterator):
    "The same mistake as a trainer makes that restores its generators, and makes its iterator afterwards."

    def advance(self) -> float:
        if self.resumed_at < 0 and self.progress.step:
            iter(torch.utils.data.DataLoader([1, 2], shuffle=True))
        return super().advance()


def test_an_iterator_made_after_the_restore_is_found_by_its_generator() -> None:
    found = first_row(in_process(lambda directory: RestoresTooEarly(), steps=4, interrupt_at=[2], resumes=1)).divergence
    assert found is not None and (found.step, found.suspect) == (3, "generator torch_cpu")


# --- Modes, cost, places


def test_the_cheap_mode_resumes_at_every_step_and_does_not_see_what_shows_later() -> None:
    blind = faulty("second batch skipped")
    proof = in_process(blind, steps=6, mode="inductive")
    proof.raise_if_different()
    assert proof.mode == "inductive" and [row.segments[-1] for row in proof.rows[1:]] == [
        (step, step + 1) for step in range(1, 6)]
    seen = in_process(blind, steps=6, mode="inductive", horizon=4)
    assert seen.verdict is Verdict.DIVERGENT and 4 < seen.facts["cost"]["proof"] <= seen.facts["cost"]["bound"] == 7
    assert in_process(blind, steps=6).verdict is Verdict.DIVERGENT
    for fault in ("generator lost", "batch repeated", "momentum changed"):
        assert in_process(faulty(fault), steps=4, mode="inductive", knock_out=False).verdict is Verdict.DIVERGENT


def test_a_proof_costs_no_more_than_it_says() -> None:
    for n in (4, 8):
        full = in_process(example_run, steps=n).facts["cost"]
        cheap = in_process(example_run, steps=n, mode="inductive").facts["cost"]
        assert full["proof"] <= full["bound"] == n / 2 + 3 and cheap["proof"] <= cheap["all"] <= cheap["bound"] == 4
    assert full["uninterrupted"] == 2 and full["recovered"] == (7 * 8 / 2 + 4) / 8  # singles, and a chain of three
    assert cheap == {"uninterrupted": 2.0, "recovered": 0.875, "left out": 0.625, "proof": 2.875, "all": 3.5,
                     "bound": 4.0}


@pytest.mark.parametrize(("place", "spent"), [  # steps: twice 4, then 1 to 4 of each killed run, and what died
    ("before_forward", 8 + 4 + 3 + 2 + 1), ("after_backward", 8 + 4 + 3 + 2 + 1),
    ("after_update", 8 + 4 + 3 + 2 + 1 + 4), ("after_publication", 8 + 3 + 2 + 1 + 0 + 4)])
def test_each_step_killed_once_costs_half_a_run_for_each_step(place: str, spent: int) -> None:
    proof = quietly(example_run, steps=4, how="sigkill", boundaries=[place], resumes=1, knock_out=False)
    proof.raise_if_different()
    cost = proof.facts["cost"]
    assert cost["proof"] == spent / 4 <= cost["bound"] <= 4 / 2 + 3.5 and len(proof.rows) == 1 + 4
    assert [row.segments[0] for row in proof.rows[2:]] == [(0, 1), (0, 2), (0, 3)]  # taken over, as stopped there
    assert [row.segments[1][0] for row in proof.rows[2:]] == [1, 2, 3]  # restored by the process that was killed


def test_a_kill_between_saves_begins_at_the_save_before_it() -> None:
    proof = quietly(example_run, steps=7, save_every=3, interrupt_at=[2, 6, 7], how="sigkill", resumes=1,
                    boundaries=["after_update"], knock_out=False)
    proof.raise_if_different()
    assert [row.segments for row in proof.rows[1:]] == [
        ((0, 2), (0, 7)), ((0, 3), (3, 6), (3, 7)), ((0, 6), (6, 7), (6, 7))]
    assert proof.facts["cost"]["proof"] <= proof.facts["cost"]["bound"]


def test_any_row_can_be_had_again_by_its_point() -> None:
    proof = in_process(faulty("generator lost"), steps=4, knock_out=False)
    point = next(row.point for row in proof.rows if row.divergence)
    again = in_process(faulty("generator lost"), steps=4, knock_out=False, points=[point])
    assert [row.point for row in again.rows[1:]] == [point] == ["clean@1"] and again.verdict is Verdict.DIVERGENT
    assert first_row(again).divergence == first_row(proof).divergence


class Accumulating(ExampleRun):
    "Two forward passes in a step, and an evaluation after it."

    def advance(self) -> float:
        rows = self.passes.take(4)
        self.optimizer.param_groups[0]["lr"] = 0.05
        self.optimizer.zero_grad()
        losses = [nn.functional.mse_loss(self.model(self.inputs[part]), self.targets[part]) for part in rows.split(2)]
        for loss in losses:
            (loss / 2).backward()
        self.optimizer.step()
        self.model.eval()
        self.model(self.inputs)
        self.model.train()
        self.progress.record(losses[0].item(), 4)
        return losses[0].item()


def accumulating_run(directory: Path) -> Accumulating:
    return Accumulating()


def test_a_run_is_killed_inside_accumulation_during_evaluation_and_during_its_recovery() -> None:
    proof = quietly(accumulating_run, steps=3, interrupt_at=[2], how="sigkill", knock_out=False, resumes=1,
                    boundaries=["in_accumulation", "in_evaluation", "during_restore", "after_restore"])
    proof.raise_if_different()
    assert [row.boundary for row in proof.rows[1:]] == [
        "step 2, in_accumulation", "step 2, in_evaluation",
        "step 2, after_publication; step 2, during_restore; step 2, after_restore"]


def test_a_run_that_reading_its_state_changes_is_not_called_nondeterministic() -> None:
    class DrawsWhenRead(RandomGenerators):
        def state_dict(self) -> dict:
            random.random()
            return super().state_dict()

    def make_run(directory: Path) -> ExampleRun:
        run = ExampleRun()
        run.contract = Contract(**{**run.contract.participants, "rng": DrawsWhenRead()})
        return run

    proof = in_process(make_run, steps=3, interrupt_at=[2], knock_out=False)
    assert proof.verdict is Verdict.DIVERGENT and "changes what it reads" in str(proof)


# --- What must not be claimed


def test_a_run_that_does_not_repeat_itself_is_not_judged() -> None:
    proof = quietly(faulty("not deterministic"), steps=4, interrupt_at=[2])
    found = proof.rows[0].divergence
    assert proof.verdict is Verdict.NONDETERMINISTIC and len(proof.rows) == 1 and found is not None
    assert (found.step, found.suspect) == (3, "generator torch_cpu")
    with pytest.raises(ProofError, match="NONDETERMINISTIC"):
        proof.raise_if_different()


class UnseededRun(ExampleRun):
    "Draws noise from NumPy's global generator, which nobody seeded."

    def __init__(self) -> None:
        super().__init__()
        sys.modules["numpy"].random.seed()


def unseeded_run(directory: Path) -> UnseededRun:
    return UnseededRun()


class NoisyRun(ExampleRun):
    def __init__(self) -> None:
        state = sys.modules["numpy"].random.get_state()
        super().__init__()
        sys.modules["numpy"].random.set_state(state)  # as a run that seeds torch alone
        self.contract = Contract(model=self.model, optimizer=self.optimizer, passes=self.passes, progress=self.progress)

    def advance(self) -> float:
        self.inputs += float(sys.modules["numpy"].random.rand())
        return super().advance()


def noisy_run(directory: Path) -> NoisyRun:
    return NoisyRun()


def test_a_forked_child_does_not_inherit_a_generator_that_nobody_seeded() -> None:
    assert quietly(noisy_run, steps=3, interrupt_at=[2], knock_out=False).verdict is Verdict.NONDETERMINISTIC


def test_a_run_in_process_does_not_inherit_one_either() -> None:
    assert in_process(noisy_run, steps=3, interrupt_at=[2], knock_out=False).verdict is Verdict.NONDETERMINISTIC


class TorchUnseeded(ExampleRun):
    "Begins with the weights that a new process gives: torch seeds its generator from the operating system."

    def __init__(self) -> None:
        state = torch.get_rng_state()
        super().__init__()
        torch.set_rng_state(state)
        self.head.reset_parameters()


def torch_unseeded(directory: Path) -> TorchUnseeded:
    return TorchUnseeded()


@pytest.mark.parametrize("prove_it", [quietly, in_process])
def test_a_run_that_does_not_seed_torch_begins_otherwise_in_each_process(prove_it) -> None:
    proof = prove_it(torch_unseeded, steps=2, interrupt_at=[1], knock_out=False)
    assert proof.verdict is Verdict.NONDETERMINISTIC and "seed it in make_run" in str(proof)
    seen = {subprocess.run([sys.executable, "-c", "import torch; print(torch.initial_seed())"], capture_output=True,
                           text=True, check=True).stdout for _ in range(2)}
    assert len(seen) == 2  # as a real new process has it


def test_a_generator_that_is_not_seeded_is_named_with_the_remedy() -> None:
    proof = quietly(unseeded_run, steps=2, interrupt_at=[1])
    assert proof.verdict is Verdict.NONDETERMINISTIC
    assert "at the start: rng.numpy" in str(proof) and "RandomGenerators().seed" in str(proof)


def test_a_run_that_learns_nothing_proves_nothing() -> None:
    proof = in_process(faulty("nothing learned"), steps=4, interrupt_at=[2])
    assert proof.verdict is Verdict.NOT_EXERCISED and "no step changes" in proof.reason
    with pytest.raises(ProofError, match="NOT_EXERCISED"):
        proof.raise_if_different()


class Spare:
    "A participant with a state that no step changes, or that comes back to where it began."

    def __init__(self, period: int = 1) -> None:
        self.period, self.position = period, 0

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


class RunWithSpare(ExampleRun):
    "The example, with a spare participant that moves on in each step."

    def __init__(self, period: int) -> None:
        super().__init__()
        self.spare = Spare(period)
        self.contract = Contract(**self.contract.participants, spare=self.spare)

    def advance(self) -> float:
        self.spare.position = (self.spare.position + 1) % self.spare.period
        return super().advance()


@pytest.mark.parametrize("mode", ["full", "inductive"])
def test_a_participant_whose_loss_changes_nothing_leaves_the_proof_open_unless_it_is_named(mode: str) -> None:
    wished = functools.partial(in_process, lambda directory: RunWithSpare(1), steps=4, mode=mode)
    proof = wished()
    assert proof.verdict is Verdict.NOT_EXERCISED and proof.not_exercised == ("spare",)
    assert "cannot fail for spare" in proof.reason and "expendable" in proof.reason
    assert wished(expendable=["model"]).verdict is Verdict.NOT_EXERCISED
    named = wished(expendable=["spare"])
    assert named.verdict is Verdict.EQUIVALENT and "not exercised: spare" in named.reason
    assert wished(knock_out=False).verdict is Verdict.EQUIVALENT  # nothing was left out, and nothing is claimed


def test_a_participant_is_left_out_where_it_is_not_as_a_fresh_run_has_it() -> None:
    proof = in_process(lambda directory: RunWithSpare(2), steps=4, interrupt_at=[2])  # at 2 it is where it began
    assert proof.verdict is Verdict.EQUIVALENT and proof.not_exercised == ()


def test_the_labs_run_without_dropout_is_equivalent_and_says_that_no_generator_was_needed() -> None:
    proof = prove_training(SMALL.model_copy(update={"dropout": 0.0}), interrupt_at=[2], how="clean", resumes=1,
                           progress_bar=False)
    assert proof.verdict is Verdict.EQUIVALENT and proof.not_exercised == ("rng",), proof
    assert "not exercised: rng" in proof.reason


class HandMadeRun:
    "Plain gradient descent without a torch optimizer: no place is known where its backward pass ends."

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model, self.progress = nn.Linear(2, 1), Progress()
        self.contract = Contract(model=self.model, progress=self.progress)

    def advance(self) -> float:
        loss = self.model(torch.ones(3, 2)).square().mean()
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        self.progress.record(loss.item(), 3)
        return loss.item()


def hand_made_run(directory: Path) -> HandMadeRun:
    return HandMadeRun()


def test_a_kill_that_never_came_is_not_counted_as_survived() -> None:
    proof = quietly(hand_made_run, steps=3, interrupt_at=[2], how="sigkill", knock_out=False, resumes=1,
                    boundaries=["before_forward", "after_backward"])
    assert proof.verdict is Verdict.NOT_EXERCISED and "step 2, after_backward was never reached" in proof.reason
    assert [row.outcome for row in proof.rows if "after_backward" in row.boundary] == ["not exercised"]
    others = ["before_forward", "after_update", "after_publication"]
    quietly(hand_made_run, steps=3, interrupt_at=[2], boundaries=others, knock_out=False).raise_if_different()


@pytest.mark.parametrize(("exitcode", "events", "expected"), [
    (-signal.SIGKILL, ["struck"], (True, "")),
    (-signal.SIGKILL, [], (True, "the process died with exit status -9")),  # somebody else's kill, such as memory
    (-signal.SIGTERM, ["struck"], (True, "the process died with exit status -15")),
    (0, ["struck"], (False, "step 2, after_update was never reached")),
    (0, [], (False, "step 2, after_update was never reached")),
    (None, ["struck"], (True, "the process did not end, and was ended")),
])
def test_a_kill_counts_only_with_both_trace_and_exit_status(exitcode: int, events: list, expected: tuple) -> None:
    ended = Ended(exitcode, [{"event": name} for name in events])
    assert equivalence._judge(ended, Interruption(2, "after_update")) == expected


def test_the_environment_is_suspected_first() -> None:
    start = {"event": "started", "step": 0, "environment": {"threads": 1}, "participants": {"model": "Module"},
             "state": {"model.w": "a"}, "generators": {}, "batch": None}
    step = {"event": "step", "step": 1, "loss": "0x1p0", "state": {"model.w": "b"}, "generators": {}, "batch": None}
    direct = equivalence.Trail(Route("direct"), Path(), [Ended(0, [start, step])])
    moved = [start | {"environment": {"threads": 2}}, step | {"state": {"model.w": "c"}}]
    found = first_divergence(direct, equivalence.Trail(Route("other"), Path(), [Ended(0, moved)]))
    assert found is not None and found[0].suspect == "environment" and "threads" in found[0].reason


# --- How it fails, and what it leaves behind


def failing_run(directory: Path) -> ExampleRun:
    raise RuntimeError("no such data")


def test_a_run_that_fails_is_reported_with_its_error() -> None:
    proof = quietly(failing_run, steps=2)
    assert proof.verdict is Verdict.ERROR and "RuntimeError: no such data" in proof.reason


class FailsOnResume(ExampleRun):
    def advance(self) -> float:
        if self.resumed_at > 0 or (self.resumed_at < 0 and self.progress.step):
            raise RuntimeError("cannot go on")
        return super().advance()


def test_a_resume_that_fails_is_an_error_and_no_equivalence() -> None:
    proof = in_process(lambda directory: FailsOnResume(), steps=3, interrupt_at=[1], knock_out=False)
    assert proof.verdict is Verdict.ERROR and "cannot go on" in proof.reason


class Hanging(ExampleRun):
    def advance(self) -> float:
        time.sleep(3600)
        return 0.0


def hanging_run(directory: Path) -> Hanging:
    return Hanging()


def test_a_run_that_hangs_is_ended() -> None:
    proof = quietly(hanging_run, steps=2, hang_timeout=3.0)
    assert proof.verdict is Verdict.ERROR and "did not end" in proof.reason
    assert not multiprocessing.active_children()


def test_a_run_that_a_child_cannot_import_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="make_run: expected something that can be sent to a child process.*in_process"):
        quietly(lambda directory: ExampleRun(), steps=2, directory=tmp_path / "proof")
    assert not (tmp_path / "proof").exists()


def test_what_is_no_run_is_refused_by_name() -> None:
    proof = in_process(lambda directory: nn.Linear(2, 2), steps=2)
    assert proof.verdict is Verdict.ERROR and "expected an object with a `contract`" in proof.reason


@pytest.mark.parametrize(("wishes", "message"), [
    ({"interrupt_at": "often"}, "interrupt_at: expected 'every' or step numbers, got 'often'"),
    ({"interrupt_at": [0]}, r"interrupt_at: expected steps from 1 to 3, got \[0\]"),
    ({"interrupt_at": [4]}, r"interrupt_at: expected steps from 1 to 3, got \[4\]"),
    ({"interrupt_at": []}, "interrupt_at: expected steps from 1 to 3, got none"),
    ({"how": "gently"}, "how: expected clean, sigkill or both, got gently"),
    ({"how": "sigterm"}, "how: expected clean, sigkill or both, got sigterm"),
    ({"how": "sigkill", "in_process": True}, "how: expected clean or both, got sigkill"),
    ({"boundaries": ["lunch"]}, "boundaries: expected some of before_forward, .* got 'lunch'"),
    ({"resumes": 0}, "resumes.*: expected at least 1"),
    ({"save_every": 0}, "save_every.*: expected at least 1"),
    ({"mode": "quick"}, "mode: expected 'full', or 'inductive' with clean stops"),
    ({"mode": "inductive", "save_every": 2}, "mode: expected .* got 'inductive' with clean and save_every=2"),
    ({"points": ["clean"]}, "point: expected places such as clean@3"),
    ({"points": ["sigkill@2:during_write"]}, "point: expected places"),
    ({"points": ["sigterm@2:during_write:fsync:1:before"]}, "point: expected places"),
    ({"points": ["sigkill@2:after_update:fsync:1:before"]}, "point: expected places"),
    ({"points": ["sigkill@2:during_write:fsync:1:lunch"]}, "point: expected places"),
    ({"points": ["sigkill@2:during_write:fsync:0:before"]}, "point: expected places"),
    ({"points": ["sigterm@2:before_forward"]}, "points: expected stops by clean, sigkill in a run of 3 steps"),
    ({"points": ["sigkill@2:after_update"], "in_process": True}, "points: expected stops by clean in a run"),
    ({"points": ["sigkill@2:after_update"], "how": "clean"}, "points: expected stops by clean in a run"),
    ({"points": ["clean@3"]}, "points: .* before its end or by sigkill in its last, got 'clean@3'"),
    ({"points": ["clean@1+sigkill@4:after_update"]}, "points: expected .* got 'clean@1.sigkill@4:after_update'"),
    ({"jobs": -1}, "jobs: expected at least 1, an int, got -1"),
    ({"threads": 0}, "threads: expected at least 1"),
    ({"steps": "6"}, "steps: expected at least 1, an int, got '6'"),
    ({"resumes": 1.5}, "resumes: expected at least 1, an int, got 1.5"),
])
def test_impossible_wishes_are_refused(wishes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quietly(example_run, **{"steps": 3, **wishes})


@pytest.mark.parametrize(("wishes", "message"), [
    ({"points": ["sigkill@99:after_update"]}, "points: expected stops by clean, sigterm, sigkill in a run of"),
    ({"points": ["sigterm@1:before_forward"], "how": "clean"}, "points: expected stops by clean in a run of"),
    ({"jobs": 0}, "jobs: expected at least 1"), ({"resumes": 0}, "resumes: expected at least 1"),
])
def test_impossible_wishes_for_this_labs_loop_are_refused(wishes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prove_training(SMALL, progress_bar=False, **wishes)


def test_a_folder_with_something_in_it_is_refused_and_a_new_one_keeps_every_run(tmp_path: Path) -> None:
    folder = tmp_path / "proof"
    in_process(example_run, steps=3, interrupt_at=[1], directory=folder).raise_if_different()
    assert {"direct-1", "direct-2", "recovered-001", "without-model"} <= {path.name for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="expected an empty or a new folder"):
        in_process(example_run, steps=3, directory=folder)


def test_a_proof_in_process_leaves_generators_threads_and_training_as_they_were() -> None:
    torch.manual_seed(11)
    random.seed(11)
    before = RandomGenerators().state_dict(), torch.get_num_threads(), TrainingRun.advance, Contract.restore
    in_process(example_run, steps=3, interrupt_at=[1], threads=1)
    after = RandomGenerators().state_dict(), torch.get_num_threads(), TrainingRun.advance, Contract.restore
    assert after[1:] == before[1:]
    assert torch.equal(after[0]["torch_cpu"], before[0]["torch_cpu"]) and random.random() == random.Random(11).random()


def test_the_report_is_json_and_a_table(tmp_path: Path) -> None:
    proof = in_process(faulty("generator lost"), steps=4, interrupt_at=[2])
    plain = json.loads(proof.to_json())
    assert plain["verdict"] == "DIVERGENT" and plain["rows"][1]["divergence"]["suspect"] == "generator torch_cpu"
    assert plain["steps_run"] > 0 and plain["attempts"] == proof.facts["attempts"]
    table = proof.table().splitlines()
    assert table[0].split() == ["path", "boundary", "stopped", "replayed", "result"]
    assert "step 2, step boundary" in table[2] and "clean stop" in table[2] and "suspect generator" in table[2]


class Talkative(ExampleRun):
    def advance(self) -> float:
        print("one more step")
        return super().advance()


def talkative_run(directory: Path) -> Talkative:
    return Talkative()


def test_nothing_is_printed_where_there_is_no_terminal_and_what_a_run_prints_is_kept(
    capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    prove_restart(talkative_run, steps=2, interrupt_at=[1], boundaries=["after_update"], knock_out=False,
                  directory=tmp_path / "proof")
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "proof" / "direct-1" / "attempt-0.log").read_text() == "one more step\n" * 2


def test_a_child_does_not_outlive_whoever_started_it(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "from fault_tolerant_transformer_lab.equivalence import ExampleRun, prove_restart\n"
        "class Waits(ExampleRun):\n"
        "    def advance(self):\n"
        "        import os\n"
        f"        Path({str(tmp_path)!r}, f'pid-{{os.getpid()}}').touch()\n"
        "        time.sleep(600)\n"
        "def make_run(directory):\n    return Waits()\n"
        "if __name__ == '__main__':\n    prove_restart(make_run, steps=2, jobs=1)\n")
    parent = subprocess.Popen([sys.executable, str(script)])
    pids: list[int] = []
    with within(60):
        while not pids:
            pids = [int(path.name.split("-")[1]) for path in tmp_path.glob("pid-*")]
            time.sleep(0.05)
    parent.kill()
    parent.wait()
    with within(20):
        while alive(pids[0]):
            time.sleep(0.05)
    assert not alive(pids[0])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_the_disk_was_asked_for_is_on_record(tmp_path: Path) -> None:
    bench = Bench(ContractDriver(example_run, steps=3), in_process=True)
    (trail,) = bench.run([follow(Route("watched"), tmp_path, threads=1)])
    third = [line["name"] for line in trail.attempts[0].events("operation") if line["step"] == 3]
    for earlier, later in (("create", "write"), ("write", "fsync"), ("fsync", "replace"), ("replace", "sync_directory"),
                           ("sync_directory", "unlink")):
        assert third.index(earlier) < third.index(later)
    occurrences = {line["occurrence"] for line in trail.attempts[0].events("operation") if line["name"] == "create"}
    assert occurrences == {1}  # counted anew in each step
    every = Wishes([3], ["sigkill"], 1, "every", False, boundaries=["during_write"])
    assert len(equivalence.plan(trail, 3, every)) == 2 * len(third)


def test_leaves_come_in_order_of_computation_and_not_of_declaration_or_name() -> None:
    parts = ExampleRun().contract.participants
    declared = Contract(rng=parts["rng"], adamw=parts["optimizer"], passes=parts["passes"], zero=parts["model"])
    owners = [path.split(".")[0] for path in equivalence.state_lines(declared)]
    assert list(dict.fromkeys(owners)) == ["zero", "adamw", "rng", "passes"]


def test_one_flipped_bit_in_a_final_checkpoint_is_a_difference(tmp_path: Path) -> None:
    bench = Bench(ContractDriver(example_run, steps=2), in_process=True)
    direct, other = bench.run([follow(Route(name), tmp_path, threads=1) for name in ("direct", "other")])
    assert final_divergence(direct, other) is None
    run = Bench(ContractDriver(flipped_run, steps=2), in_process=True)
    (flipped,) = run.run([follow(Route("flipped"), tmp_path, threads=1)])
    found = final_divergence(direct, flipped)
    assert found is not None and (found.where, found.max_ulp) == ("model.0.bias", 1)
    assert first_divergence(direct, replace(flipped)) is not None


class Flipped(ExampleRun):
    def advance(self) -> float:
        loss = super().advance()
        if self.progress.step == 2:
            with torch.no_grad():
                self.model[0].bias.view(torch.int32)[3] ^= 1
        return loss


def flipped_run(directory: Path) -> Flipped:
    return Flipped()


@pytest.mark.parametrize("asked", [
    {"steps": 1},
    {"steps": 2, "interrupt_at": [2], "how": "clean"},
    {"steps": 3, "interrupt_at": [3], "how": "clean"},
], ids=str)
def test_a_proof_without_a_restart_is_no_proof(asked):
    make_run = functools.partial(example_run, fault="optimizer left out")
    proof = prove_restart(make_run, **{"how": "clean", **asked}, in_process=True)
    assert proof.verdict is Verdict.NOT_EXERCISED and "no restart was tried" in proof.reason
    with pytest.raises(ProofError, match="NOT_EXERCISED"):
        proof.raise_if_different()


def test_a_kill_before_the_first_save_restores_nothing():
    proof = prove_restart(example_run, steps=3, how="sigkill", boundaries=["before_forward"], interrupt_at=[1],
                          save_every=9, knock_out=False)
    assert proof.verdict is Verdict.NOT_EXERCISED
