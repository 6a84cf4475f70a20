"""Whole runs of several ranks: wishes, the first cause, requests to stop, saves in the background, torchrun."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fault_tolerant_transformer_lab import launch as launch_module
from fault_tolerant_transformer_lab.config import ConfigError, load_config, shipped_config
from fault_tolerant_transformer_lab.contract import CheckpointError, Progress, RandomGenerators
from fault_tolerant_transformer_lab.distributed import LocalShards, RankContract, RankFailure, Ranks, run_ranks
from fault_tolerant_transformer_lab.elastic import ElasticRun
from fault_tolerant_transformer_lab.equivalence import ProofError
from fault_tolerant_transformer_lab.launch import (
    LOST_A_PEER,
    Place,
    RanksFailed,
    _first_of,
    build_run,
    digest_of_checkpoint,
    launch,
    lost_a_peer,
    operations_of,
    outlive_launcher,
    places_of,
    prove_distributed,
    prove_launcher,
    prove_ranks,
    struck_step,
    train_rank,
)
from fault_tolerant_transformer_lab.publication import Disk
from fault_tolerant_transformer_lab.sharded import TOLD_BY, read_generation
from fault_tolerant_transformer_lab.training import TrainingError, TrainingRun, deterministic

TINY = load_config(shipped_config("smoke")).replace(
    grad_accumulation=2, batch_size=1, n_layers=1, d_model=8, n_heads=1, steps=4, checkpoint_every=2)


def result_of(folder, **options):
    "A function for `run_ranks`: train, give what the result says."
    def _run(ranks):
        result = train_rank(options.pop("config", TINY), folder, ranks, **options)
        return [result.steps, result.resumed_from, result.state_digest, list(result.notes)]
    return _run


def test_wishes_about_resuming_are_held_against_what_is_there(tmp_path):
    with pytest.raises(RankFailure, match="NoCheckpointError.*resume='auto' to begin at step 0"):
        run_ranks(result_of(tmp_path / "a", resume="must"), 1)
    run_ranks(result_of(tmp_path / "a", parallel="fsdp"), 2)
    with pytest.raises(RankFailure, match="expected no checkpoints with resume='never', found 2"):
        run_ranks(result_of(tmp_path / "a", parallel="fsdp", resume="never"), 2)
    back = run_ranks(result_of(tmp_path / "a", parallel="fsdp", resume_from=2), 2)
    assert [rank[:2] for rank in back] == [[4, 2]] * 2
    checkpoints = tmp_path / "a" / "checkpoints"
    assert "step-00000004.rewound" in os.listdir(checkpoints)
    for name in ("step-00000002", "step-00000004"):
        (checkpoints / name).rename(checkpoints / f"{name}.corrupt")
    with pytest.raises(RankFailure, match="none can be used .* nothing is started over silently"):
        run_ranks(result_of(tmp_path / "a", parallel="fsdp"), 2)


def test_another_world_is_refused_by_name_and_goes_on_where_it_is_accepted(tmp_path):
    config = TINY.replace(dropout=0.1)
    run_ranks(result_of(tmp_path / "a", config=config, parallel="fsdp", stop_after_step=2), 2)
    with pytest.raises(RankFailure, match="EnvironmentMismatchError.*world_size: checkpoint 2, here 1"):
        run_ranks(result_of(tmp_path / "a", config=config, parallel="fsdp"), 1)
    accepted = {"allow_environment_change": True}
    again = result_of(tmp_path / "a", config=config, parallel="ddp", **accepted)
    ((steps, resumed, digest, notes),) = run_ranks(again, 1)
    assert (steps, resumed) == (4, 2) and any("rng of each rank began anew" in note for note in notes)
    lines = (tmp_path / "a" / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert len(lines) == 4 and digest == digest_of_checkpoint(
        tmp_path / "a" / "checkpoints" / "step-00000004.safetensors")


def test_what_ranks_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="expected ddp, fsdp or elastic, got 'tp'"):
        build_run(TINY, Ranks(0, 1), "tp")
    with pytest.raises(ConfigError, match="ema_decay"):
        build_run(TINY.replace(ema_decay=0.9), Ranks(0, 1), "ddp")
    shards = TINY.replace(elastic={"logical_shards": TINY.grad_accumulation})
    with pytest.raises(ConfigError, match="parallel: expected elastic, since the configuration has .* got 'fsdp'"):
        build_run(shards, Ranks(0, 1), "fsdp")
    with deterministic(threads=1):
        assert isinstance(build_run(shards, Ranks(0, 1), "elastic"), ElasticRun)
        with pytest.raises(ConfigError, match="elastic.logical_shards: expected null for a run without ranks"):
            TrainingRun(shards)
    with pytest.raises(ConfigError, match="nproc: expected 1 or more ranks, got 0"):
        launch([], 0)


def test_a_launch_that_takes_too_long_is_told_and_a_cell_of_the_table(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match="a launch of 2 ranks did not end within 0.1 s"):
        outlive_launcher(TINY, tmp_path / "run", "ddp", 2, timeout_s=0.1)
    monkeypatch.setattr(launch_module, "outlive_launcher", partial(outlive_launcher, timeout_s=0.1))
    cell = prove_launcher(TINY, "ddp", 2, scratch=tmp_path)
    assert not cell.equal and "did not end within 0.1 s" in cell.problem


def test_a_launcher_that_nobody_came_to_kill_is_told(tmp_path):
    with pytest.raises(TrainingError, match="rank 1 never came to during_write .* only rank 0 writes"):
        outlive_launcher(TINY, tmp_path / "run", "ddp", 2, boundary="during_write", rank=1)


def test_only_a_rank_with_a_cause_of_its_own_speaks():
    told = CheckpointError("a full disk elsewhere")
    told.add_note(f"{TOLD_BY} 0")
    assert lost_a_peer(told) and lost_a_peer(CheckpointError("a rank was lost: ..."))
    assert lost_a_peer(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert not lost_a_peer(CheckpointError("a full disk here")) and not lost_a_peer(RuntimeError("shapes differ"))
    assert LOST_A_PEER not in (0, 1)


def failure(exit_code, cause=None):
    "How the launcher's agent describes a process that failed."
    return SimpleNamespace(exitcode=exit_code, error_file_data={"message": "-"} | ({"cause": cause} if cause else {}))


@pytest.mark.parametrize(("failures", "words"), [
    ({0: failure(LOST_A_PEER), 1: failure(-signal.SIGKILL)}, "rank 1 of 2 was the first to fail: killed by SIGKILL"),
    ({0: failure(LOST_A_PEER), 1: failure(2, "a full disk")}, "rank 1 of 2 was the first to fail: a full disk"),
    ({0: failure(-signal.SIGTERM), 1: failure(1, "no such file")}, "rank 1 of 2 was the first to fail: no such file"),
    ({0: failure(1, "its peer is gone"), 1: failure(-signal.SIGSEGV)}, "rank 1 of 2 .* killed by SIGSEGV"),
    ({0: failure(LOST_A_PEER), 1: failure(LOST_A_PEER)}, "rank 0 of 2 .* it waited in vain for another rank"),
    ({0: failure(128 + signal.SIGTERM), 1: failure(128 + signal.SIGTERM)}, "SIGTERM: the ranks were asked to stop"),
])
def test_the_first_cause_is_told_from_its_consequences(failures, words):
    for order in (list(failures), list(failures)[::-1]):
        error = _first_of({rank: failures[rank] for rank in order}, 2)
        assert re.match(words, str(error))
        assert getattr(error, "said", False) == ("cause" in failures[getattr(error, "rank", 0)].error_file_data)


def test_a_launch_leaves_signals_threads_and_loggers_as_they_were():
    logger = logging.getLogger("torch.distributed.elastic.agent.server.api")
    before = signal.getsignal(signal.SIGTERM), os.environ.get("OMP_NUM_THREADS"), logger.level
    with pytest.raises(RanksFailed, match="rank 0 of 1 was the first to fail: exit status 7") as found:
        launch(["-c", "raise SystemExit(7)"], 1)
    assert (found.value.said, found.value.status) == (False, 1)
    assert (signal.getsignal(signal.SIGTERM), os.environ.get("OMP_NUM_THREADS"), logger.level) == before


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_save_in_the_background_that_is_killed_anywhere_is_no_other_run(parallel):
    config = TINY.replace(checkpoint_mode="async", dropout=0.1, steps=6, checkpoint_every=2)
    chains = [[Place((0,), "during_write", 4, 9)], [Place((1,), "during_write", 4, 4)] if parallel == "fsdp" else
              [Place((1,), "after_backward", 3)]]
    cells = prove_distributed(config, parallel, 2, chains)
    assert all(cell.equal and cell.struck and cell.resumed_from in (2, 4) for cell in cells), cells


def test_the_places_are_all_boundaries_and_each_operation_of_each_rank():
    operations = operations_of(TINY, "fsdp", 2, 2)
    assert operations[0] > operations[1] >= 6
    chains = places_of(2, step=2, operations=operations)
    writes = [chain[0] for chain in chains if chain[0].boundary == "during_write"]
    assert len(writes) == sum(operations) and len(chains) == len(writes) + 8 + 1 and len(chains[-1]) == 3


PROGRAM = """
import json, sys, time
from fault_tolerant_transformer_lab.config import ExperimentConfig
from fault_tolerant_transformer_lab.launch import train_distributed

train_distributed(ExperimentConfig(**json.loads(sys.argv[1])), sys.argv[2], parallel="fsdp",
                  on_boundary=lambda name, step: time.sleep(0.02))
"""


def test_torchrun_itself_starts_a_run_and_a_request_to_stop_saves_what_is_completed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    config = TINY.replace(steps=5000, checkpoint_every=5000)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program),
               json.dumps(config.describe()), str(tmp_path / "run")]
    log = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as torchrun:
        try:
            deadline = time.monotonic() + 100
            while not (log.exists() and len(log.read_bytes().splitlines()) >= 2):
                assert time.monotonic() < deadline and torchrun.poll() is None
                time.sleep(0.05)
            torchrun.send_signal(signal.SIGTERM)
            torchrun.communicate(timeout=60)
        finally:
            torchrun.kill()
    saved = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    logged = [json.loads(line)["step"] for line in log.read_bytes().splitlines()]
    assert read_generation(saved).step == logged[-1] and logged == list(range(1, len(logged) + 1))


class FullDisk(Disk):
    "Has no room for anything that is written about some steps; `log` for the log instead."

    def __init__(self, *words):
        super().__init__()
        self.words = words

    def operation(self, name, path, call):
        if name in ("write", "append") and any(word in f"{path}" for word in self.words):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call()


def with_full_disk(folder, config, parallel, rank, *words):
    "A function for `run_ranks`: train with a full disk on one rank."
    def _run(ranks):
        disk = FullDisk(*words) if ranks.rank == rank else None
        result = train_rank(config, folder, ranks, parallel=parallel, disk=disk)
        return [result.state_digest, result.failed_saves, list(result.notes)]
    return _run


@pytest.mark.parametrize(("parallel", "rank", "mode"), [("fsdp", 1, "sync"), ("ddp", 0, "async"), ("fsdp", 0, "async")])
def test_a_full_disk_of_one_rank_is_passed_over_by_all_of_them_where_that_was_chosen(tmp_path, parallel, rank, mode):
    config = TINY.replace(checkpoint_every=1, on_save_error="continue", checkpoint_mode=mode, keep_last=4)
    straight = run_ranks(result_of(tmp_path / "straight", config=config, parallel=parallel), 2)
    found = run_ranks(with_full_disk(tmp_path / "a", config, parallel, rank, "step-00000002", "step-00000003"), 2)
    assert [[digest, failed] for digest, failed, _ in found] == [[straight[0][2], 2]] * 2
    notes = [note for note in found[0][2] if "no checkpoint was saved" in note]
    assert len(notes) == 2 and all("ENOSPC" in note and "on_save_error=continue" in note for note in notes)
    names = [path.name[:13] for path in sorted((tmp_path / "a" / "checkpoints").glob("step-*"))]
    assert names == ["step-00000001", "step-00000004"] and not list((tmp_path / "a" / "checkpoints").glob(".*.tmp"))


@pytest.mark.parametrize(("choice", "words"), [("stop", ["step-00000002"]), ("continue", ["step-00000001"]),
                                               ("continue", ["step-00000004"])])
def test_a_full_disk_stops_all_ranks_without_an_earlier_checkpoint_at_the_end_and_where_nothing_was_chosen(
        tmp_path, choice, words):
    config = TINY.replace(checkpoint_every=1, on_save_error=choice)
    with pytest.raises(RankFailure, match=r"rank 1( of 2 was the first to fail)?: PublicationError.*ENOSPC"):
        run_ranks(with_full_disk(tmp_path / "a", config, "fsdp", 1, *words), 2)


def test_a_log_that_the_disk_does_not_take_waits_for_room(tmp_path):
    config = TINY.replace(checkpoint_every=1, on_save_error="continue")

    class FullForAWhile(FullDisk):
        def operation(self, name, path, call):
            self.n = getattr(self, "n", 0) + (name == "append")
            if name == "append" and not 2 <= self.n <= 3:
                return call()
            return super().operation(name, path, call)

    def train(ranks):
        disk = FullForAWhile("metrics.jsonl") if ranks.is_first else None
        return list(train_rank(config, tmp_path / "a", ranks, parallel="fsdp", disk=disk).notes)

    notes = run_ranks(train, 2)[0]
    assert any("its lines wait in memory" in note for note in notes)
    lines = (tmp_path / "a" / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


class OwnRun:
    "A trainer under FSDP2 with noise of each rank's own, and without this project's model."

    def __init__(self, ranks, forgets=False, idle=False):
        torch.manual_seed(7)
        self.model = torch.nn.Linear(4, 3)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks.size,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.progress, more = Progress(), {"idle": torch.nn.Linear(1, 1)} if idle else {}
        RandomGenerators().seed(100 + ranks.rank)
        more |= {} if forgets else {"rng": RandomGenerators()}
        self.contract = RankContract(ranks, {"parallel": "own"}, model=LocalShards(self.model),
                                     optimizer=LocalShards(self.optimizer), progress=self.progress, **more)

    def advance(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(3, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.progress.record(0.0, 3)
        return loss.item()


def test_a_trainer_of_ones_own_is_proven_across_ranks_and_one_that_forgets_is_found():
    kills = [[Place((1,), "after_backward", 2)], [Place((1,), "during_write", 1, 3), Place((0, 1), "after_update", 2)]]
    proof = prove_ranks(partial(OwnRun, idle=True), 2, steps=3, chains=kills)
    proof.raise_if_different()
    assert proof.is_equivalent and [cell.resumed_from for cell in proof.cells] == [1, 1]
    assert proof.not_exercised == ("idle",)
    broken = prove_ranks(partial(OwnRun, forgets=True), 2, steps=3, chains=kills[:1], knock_out=False)
    with pytest.raises(ProofError, match="2 ranks, killed at rank 1 after_backward of step 2: other bits"):
        broken.raise_if_different()


def test_the_places_of_a_proof_come_after_a_first_checkpoint():
    proof = prove_ranks(OwnRun, 2, steps=3, operations=1, knock_out=False)
    proof.raise_if_different()
    assert len(proof.cells) == 2 * 4 + 2 + 1 and all(cell.resumed_from in (1, 2) for cell in proof.cells), proof.cells


@pytest.mark.parametrize(("place", "resumed_from"), [(Place((0,), "after_backward", 1), None),
                                                     (Place((0,), "after_publication", 2), 2)])
def test_a_proof_in_which_no_run_did_a_step_after_its_resume_is_none(place, resumed_from):
    proof = prove_ranks(OwnRun, 1, steps=2, chains=[[place]], knock_out=False)
    assert proof.cells[0].equal and proof.cells[0].struck and proof.cells[0].resumed_from == resumed_from
    assert not proof.is_equivalent
    with pytest.raises(ProofError, match="no resume was tried; save before the last step, and kill behind that save"):
        proof.raise_if_different()


def test_the_step_to_kill_in_has_a_checkpoint_before_it_where_there_is_one():
    assert [struck_step(steps, every) for steps, every in ((2, 1), (3, 1), (4, 2), (3, 2), (1, 2))] == [2, 2, 4, 2, 1]


def test_a_proof_whose_kill_strikes_nobody_is_none_and_neither_is_one_of_a_run_that_varies():
    nowhere = prove_ranks(OwnRun, 1, steps=2, chains=[[Place((0,), "after_update", 9)]], knock_out=False)
    with pytest.raises(ProofError, match="nobody died"):
        nowhere.raise_if_different()

    def varies(ranks):
        run = OwnRun(ranks)
        torch.manual_seed(time.time_ns() % 2**60)
        return run

    with pytest.raises(ProofError, match="two undisturbed runs of 1 ranks end with other bits"):
        prove_ranks(varies, 1, steps=2)
    with pytest.raises(ConfigError, match="a save before the last step"):
        prove_ranks(OwnRun, 1, steps=1)


STOPPED = """
import os, signal, sys, time
from fault_tolerant_transformer_lab.config import load_config, shipped_config
from fault_tolerant_transformer_lab.launch import train_distributed

def stop(name, step):
    if os.environ["RANK"] == "1" and (name, step) == ("during_write", 2):
        os.kill(os.getpid(), signal.SIGSTOP)

config = load_config(shipped_config("smoke")).replace(
    grad_accumulation=2, batch_size=1, n_layers=1, d_model=8, n_heads=1, steps=4, checkpoint_every=2)
train_distributed(config, sys.argv[1], parallel="fsdp", on_boundary=stop, timeout_s=8)
"""


def test_a_rank_that_hangs_in_a_save_ends_the_attempt_within_the_time_of_the_group(tmp_path):
    begun = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 of 2 was the first to fail: killed by SIGKILL"):  # by the launcher
        launch(["-c", STOPPED, str(tmp_path / "run")], 2)
    assert time.monotonic() - begun < 900  # the group's own patience was half an hour
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("n", "chosen", "expected"), [
    (2, {}, {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}),
    (1, {}, {"OMP_NUM_THREADS": None, "TORCH_CPP_LOG_LEVEL": "ERROR"}),
    (2, {"OMP_NUM_THREADS": "3", "TORCH_CPP_LOG_LEVEL": "INFO"},
     {"OMP_NUM_THREADS": "3", "TORCH_CPP_LOG_LEVEL": "INFO"}),
])
def test_ranks_get_a_thread_each_and_no_pages_of_frames_unless_chosen_otherwise(
        monkeypatch, tmp_path, n, chosen, expected):
    for name in expected:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"
    launch(["-c", program, f"{tmp_path}/"], n)
    for rank in range(n):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert {name: found.get(name) for name in expected} == expected
    assert {name: os.environ[name] for name in expected if name in os.environ} == chosen
