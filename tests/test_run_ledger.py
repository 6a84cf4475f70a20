"""The ledger of a run: it adds up, it counts lost steps again, and no bit or operation of the run knows of it."""

import json
import os
import signal

import pytest

from fault_tolerant_transformer_lab.checkpoint_file import read_manifest
from fault_tolerant_transformer_lab.config import ExperimentConfig
from fault_tolerant_transformer_lab.distributed import run_ranks
from fault_tolerant_transformer_lab.launch import train_rank
from fault_tolerant_transformer_lab.ledger import LedgerError, read_ledger
from fault_tolerant_transformer_lab.publication import RecordingDisk
from fault_tolerant_transformer_lab.training import Interrupted, NonFiniteLossError, TrainingError, deterministic, train

TINY = ExperimentConfig(vocab_size=32, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.1, seed=2712, steps=6,
                        batch_size=2, learning_rate=3e-3, checkpoint_every=2, grad_accumulation=2)


def run(config, folder, **options):
    "Train with one thread and without a bar."
    with deterministic(threads=1):
        return train(config, folder, progress_bar=False, **options)


def account_of(folder):
    "What a run's ledger says; all of its seconds are accounted for within 1 % of the wall time."
    account = read_ledger(folder / "ledger.jsonl")
    assert abs(sum(account.seconds.values()) - (account.attempts[-1].at - account.attempts[0].began)) <= (
        0.01 * account.wall_seconds)
    assert account.adds_up() and account.dropped == 0
    return account


def killed_at(place, config, folder):
    "Train in a child that SIGKILLs itself at a boundary."
    def _strike(name, step):
        if (name, step) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        run(config, folder, on_boundary=_strike)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("mode", ["sync", "async", "overlapped"])
def test_a_run_accounts_for_its_time_and_counts_its_saves(tmp_path, mode):
    run(TINY.replace(checkpoint_mode=mode, eval_every=3), tmp_path)
    (attempt,) = account_of(tmp_path).attempts
    assert (attempt.end, attempt.step, attempt.steps) == ("finished", 6, {"useful": 6, "replayed": 0})
    assert (attempt.entries["stalled"], attempt.entries["restoring"]) == (3, 0)
    assert all(attempt.seconds[phase] > 0 for phase in ("useful", "stalled", "waiting"))


def test_a_run_that_is_stopped_and_goes_on_has_two_attempts_and_no_failure(tmp_path):
    run(TINY, tmp_path, stop_after_step=3)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    run(TINY, tmp_path, stop_after_step=3)  # nothing to do
    with pytest.raises(TrainingError):
        run(TINY, tmp_path, resume="never")
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    run(TINY, tmp_path)
    account = account_of(tmp_path)
    assert [a.end for a in account.attempts] == ["stopped", "finished"] and account.failures == 0
    assert [a.steps["useful"] for a in account.attempts] == [3, 3]
    assert account.attempts[1].entries["restoring"] == 1 and account.attempts[1].seconds["restoring"] > 0


def test_steps_that_a_kill_lost_are_replayed_and_counted_as_such(tmp_path):
    killed_at(("after_backward", 6), TINY.replace(steps=8, checkpoint_every=4), tmp_path)
    assert read_ledger(tmp_path / "ledger.jsonl").attempts[-1].end == "running"
    run(TINY.replace(steps=8, checkpoint_every=4), tmp_path)
    account = account_of(tmp_path)
    assert account.attempts[1].steps == {"useful": 3, "replayed": 1}  # step 5 again; 6, 7 and 8 for the first time
    assert account.failures == 1 and account.attempts[1].seconds["replayed"] > 0


def test_a_run_that_goes_back_replays(tmp_path):
    run(TINY, tmp_path)
    run(TINY, tmp_path, resume_from=4)
    assert account_of(tmp_path).attempts[1].steps == {"useful": 0, "replayed": 2}


def test_a_failure_and_a_signal_are_told_apart(tmp_path):
    with pytest.raises(NonFiniteLossError):
        run(TINY.replace(learning_rate=1e30), tmp_path / "failed")
    with pytest.raises(Interrupted):
        run(TINY, tmp_path / "stopped", on_boundary=lambda name, step: (name, step) == ("after_update", 2)
            and os.kill(os.getpid(), signal.SIGTERM))
    assert [read_ledger(tmp_path / name / "ledger.jsonl").attempts[-1].end for name in ("failed", "stopped")] == [
        "failed", "stopped"]


def test_neither_bits_nor_operations_of_a_run_know_of_its_ledger(tmp_path, monkeypatch):
    def _operations(folder):
        disk = RecordingDisk()
        digest = run(TINY, folder, disk=disk).state_digest
        assert not [record for record in disk.records if "ledger" in str(record.path)]
        return digest, [record.name for record in disk.records]

    with_ledger = _operations(tmp_path / "with")
    monkeypatch.setattr("fault_tolerant_transformer_lab.ledger.Ledger.open", lambda *_: None)
    assert _operations(tmp_path / "without") == with_ledger
    assert not (tmp_path / "without" / "ledger.jsonl").exists()


def test_what_cannot_be_a_ledger_is_refused_and_a_full_disk_is_not_the_end_of_the_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="expected a run's ledger, an ordinary file, found a symbolic link"):
        run(TINY, tmp_path / "run")
    monkeypatch.setattr("fault_tolerant_transformer_lab.ledger.write_fully", full)
    assert run(TINY, tmp_path / "full").finished and "its time is no longer written down" in caplog.text


def full(disk, fd, data, offset):
    "Fail as a full disk does."
    def _refuse(operation):
        raise OSError(28, "No space left on device")
    return disk.perform("write", disk.path_of(fd), _refuse, data=data)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rank_0_keeps_the_ledger_of_several_ranks(tmp_path, parallel):
    def _strike(name, step):
        if (name, step) == ("after_backward", 4):
            os.kill(os.getpid(), signal.SIGKILL)

    def _run(ranks, **options):
        return train_rank(TINY, tmp_path, ranks, parallel=parallel, **options).state_digest

    outcomes = run_ranks(lambda ranks: _run(ranks, on_boundary=_strike if ranks.is_first else None), 2, check=False)
    assert [outcome.exit_code for outcome in outcomes if outcome.rank == 0] == [-signal.SIGKILL]
    (digest, _) = run_ranks(_run, 2)
    account = account_of(tmp_path)
    assert [attempt.steps for attempt in account.attempts] == [
        {"useful": 3, "replayed": 0}, {"useful": 3, "replayed": 1}]
    assert account.attempts[1].entries["restoring"] == 1 and account.failures == 1
    assert json.loads((tmp_path / "result.json").read_text())["state_digest"] == digest
    last = account.attempts[-1]
    assert (last.end, last.step) == ("finished", 6) and last.entries["stalled"] == 2
    if parallel == "ddp":
        assert read_manifest(max((tmp_path / "checkpoints").glob("step-*"))).state_digest == digest
