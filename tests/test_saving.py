"""Saving while training: a save that fails, a save in the background, and both; the run's bits never depend on it."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest

from fault_tolerant_transformer_lab.checkpoint_file import diff, read_manifest, verify
from fault_tolerant_transformer_lab.config import ExperimentConfig, canonical_json
from fault_tolerant_transformer_lab.contract import CheckpointError, ContractError
from fault_tolerant_transformer_lab.publication import Disk, PublicationError, RecordingDisk
from fault_tolerant_transformer_lab.training import (
    Interrupted,
    NonFiniteLossError,
    RunResult,
    TrainingError,
    TrainingRun,
    deterministic,
    train,
)

TINY = ExperimentConfig(
    vocab_size=32, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.1, seed=2712, steps=8, batch_size=2,
    learning_rate=3e-3, checkpoint_every=2, weight_decay=0.1, grad_clip=1.0, grad_accumulation=2, ema_decay=0.9,
)
PATIENT = TINY.replace(on_save_error="continue")
MODES = ("sync", "async", "overlapped")


def run(config: ExperimentConfig, folder: Path, **options) -> RunResult:
    "Train with one thread and without a bar; runs of one test process then share their environment."
    with deterministic(threads=1):
        return train(config, folder, progress_bar=False, **options)


@pytest.fixture(scope="module")
def direct(tmp_path_factory) -> RunResult:
    "The run that nothing disturbs."
    return run(TINY, tmp_path_factory.mktemp("direct"))


def same(result: RunResult, direct: RunResult) -> bool:
    "Whether two runs ended with the same bits and the same log."
    logs = [(r.directory / "metrics.jsonl").read_bytes() for r in (result, direct)]
    return result.state_digest == direct.state_digest and logs[0] == logs[1]


def steps_in(folder: Path) -> list[int]:
    "The steps of the checkpoints in a run's folder, all of which verify."
    return sorted(verify(path).step for path in (folder / "checkpoints").glob("step-*.safetensors"))


class Failing(Disk):
    "Fails an operation with ENOSPC where a condition on its name and file says so."

    def __init__(self, fails):
        super().__init__()
        self.fails, self.n_failures = fails, 0

    def operation(self, name, path, call):
        if self.fails(name, path):
            self.n_failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().operation(name, path, call)


def at(operation: str, *steps: int):
    "Fails this operation on the files of these steps."
    names = [f"step-{step:08d}" for step in steps]
    return Failing(lambda name, path: name == operation and any(step in path.name for step in names))


class Slow(Disk):
    "Waits before it writes the checkpoint of one step, or all of them, so that training goes on meanwhile."

    def __init__(self, seconds: float, step: int | None = None):
        super().__init__()
        self.seconds, self.part = seconds, "step-" if step is None else f"step-{step:08d}"

    def operation(self, name, path, call):
        if name == "create" and self.part in path.name:
            time.sleep(self.seconds)
        return super().operation(name, path, call)


# A save that fails


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close", "replace"])
def test_a_failed_save_is_passed_over_loudly_and_the_next_one_tries_again(tmp_path, direct, caplog, mode, operation):
    disk = at(operation, 4)
    with caplog.at_level(logging.WARNING):
        result = run(PATIENT.replace(checkpoint_mode=mode), tmp_path, disk=disk)
    assert disk.n_failures == 1 and result.failed_saves == 1 and result.finished and same(result, direct)
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = warning.getMessage()
    assert text.startswith("step 4: no checkpoint was saved, training goes on (on_save_error=continue): ")
    assert operation in text and "ENOSPC" in text and "free space" in text and text in result.notes
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["failed_saves"] == 1 and text in written["notes"]
    assert steps_in(tmp_path) == [6, 8] and not list((tmp_path / "checkpoints").glob(".step*"))


@pytest.mark.parametrize("mode", MODES)
def test_the_earlier_checkpoint_stays_until_a_later_one_is_published(tmp_path, mode):
    found = {}

    def look(name, step):
        if name == "before_forward":
            found[step] = [int(path.name[5:13]) for path in (tmp_path / "checkpoints").glob("step-*.safetensors")]

    config = PATIENT.replace(steps=10, keep_last=1, checkpoint_mode=mode)
    result = run(config, tmp_path, disk=at("write", 4, 6), on_boundary=look)
    assert result.failed_saves == 2 and steps_in(tmp_path) == [10]
    assert all(found[step] == [2] for step in range(5, 9))  # those of 4 and 6 failed
    assert found[10] == [8] or (mode != "sync" and 2 in found[10])  # where that of 8 is not finished


@pytest.mark.parametrize("mode", MODES)
def test_by_default_a_failed_save_ends_the_run(tmp_path, direct, mode):
    reached = []
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(TINY.replace(checkpoint_mode=mode), tmp_path, disk=at("write", 4),
            on_boundary=lambda name, step: reached.append(step))
    assert max(reached) <= 6 and steps_in(tmp_path) == [2]  # in the background: at the latest at the next save
    assert same(run(TINY, tmp_path), direct)


@pytest.mark.parametrize("mode", MODES)
def test_the_last_save_always_raises(tmp_path, direct, mode):
    config = PATIENT.replace(checkpoint_mode=mode)
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(config, tmp_path, disk=at("write", 8))
    assert steps_in(tmp_path) == [4, 6] and not (tmp_path / "result.json").exists()
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(config, tmp_path, disk=at("write", 7), stop_after_step=7)
    assert steps_in(tmp_path) == [4, 6] and same(run(config, tmp_path), direct)


@pytest.mark.parametrize("mode", MODES)
def test_the_save_that_a_signal_asks_for_always_raises(tmp_path, mode):
    def strike(name, step):
        if (name, step) == ("before_forward", 5):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PublicationError, match="ENOSPC"):  # and not Interrupted, which says that all is saved
        run(PATIENT.replace(checkpoint_mode=mode), tmp_path, disk=at("write", 4, 5), on_boundary=strike)
    assert steps_in(tmp_path) == [2]


def test_a_save_that_failed_while_the_signal_came_is_tried_once_more_as_the_last(tmp_path):
    class Struck(Disk):
        failed = False

        def operation(self, name, path, call):
            if name == "fsync" and "step-00000004" in path.name and not self.failed:
                self.failed = True
                os.kill(os.getpid(), signal.SIGTERM)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().operation(name, path, call)

    with pytest.raises(Interrupted) as stopped:
        run(PATIENT, tmp_path, disk=Struck())
    assert stopped.value.path.name == "step-00000004.safetensors" and steps_in(tmp_path) == [2, 4]


def test_a_run_without_a_sound_checkpoint_stops_whatever_was_chosen(tmp_path):
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(PATIENT, tmp_path / "first", disk=at("write", 2))
    assert steps_in(tmp_path / "first") == []

    def spoil(name, step):
        if (name, step) == ("before_forward", 4):
            path = tmp_path / "spoilt/checkpoints/step-00000002.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    with pytest.raises(PublicationError, match="ENOSPC"):
        run(PATIENT, tmp_path / "spoilt", disk=at("write", 4), on_boundary=spoil)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_failed_publication_always_stops(tmp_path, mode):
    config, trainers = PATIENT.replace(checkpoint_mode=mode), []
    original = TrainingRun.__init__

    def on(place, act):
        return lambda name, step: act() if (name, step) == place else None

    def lose_lock():
        (tmp_path / "lock/checkpoints/.lock").unlink()

    def move_folder():
        (tmp_path / "folder").rename(tmp_path / "elsewhere")

    def spoil_state():
        trainers[-1].progress.state_dict = lambda: {"seen": {1, 2}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "__init__", lambda self, *a, **k: trainers.append(self) or original(self, *a, **k))
        for folder, act, kind in (("lock", lose_lock, CheckpointError), ("folder", move_folder, TrainingError),
                                  ("state", spoil_state, ContractError)):
            with pytest.raises(kind) as stopped:
                run(config, tmp_path / folder, on_boundary=on(("after_update", 4), act))
            assert not isinstance(stopped.value, PublicationError)


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_that_is_safe_counts_although_an_older_one_stays(tmp_path, direct, caplog, mode):
    published, disk = [], Failing(lambda name, path: name == "unlink" and "step-00000002" in path.name
                                  and path.suffix == ".safetensors" and disk.n_failures == 0)
    with caplog.at_level(logging.WARNING):
        result = run(PATIENT.replace(checkpoint_mode=mode), tmp_path, disk=disk,
                     on_boundary=lambda name, step: name == "after_publication" and published.append(step))
    assert result.failed_saves == 0 and published == [2, 4, 6, 8] and result.state_digest == direct.state_digest
    assert "step 6: an older checkpoint was not removed" in caplog.text and steps_in(tmp_path) == [6, 8]


def test_a_log_that_cannot_be_written_waits_and_holds_its_checkpoint_back(tmp_path, direct, caplog):
    step_now = [0]

    class Full(Disk):
        "Takes seven bytes of a line, then no more until step 6."

        def operation(self, name, path, call):
            if name == "append" and 3 <= step_now[0] < 6:
                if step_now[0] == 3 and len(call.data) > 7 and not self.cut:
                    self.cut = True
                    return super().operation(name, path, call.shortened(7))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().operation(name, path, call)

    disk, look = Full(), lambda name, step: step_now.__setitem__(0, step)
    disk.cut = False
    with caplog.at_level(logging.WARNING):
        result = run(PATIENT, tmp_path / "patient", disk=disk, on_boundary=look)
    assert same(result, direct) and result.failed_saves == 1  # that of step 4, which would be ahead of its lines
    told = [record.getMessage()[:26] for record in caplog.records]
    assert told == ["step 3: the log cannot be ", "step 4: no checkpoint was "]
    disk.cut = False
    with pytest.raises(PublicationError, match="append .*metrics.jsonl: ENOSPC"):
        run(TINY, tmp_path / "strict", disk=disk, on_boundary=look)
    assert same(run(TINY, tmp_path / "strict"), direct)


def test_a_failed_sync_of_the_log_always_stops(tmp_path, direct):
    calls = []

    def fails(name, path):
        if name == "fsync" and path.name == "metrics.jsonl":
            calls.append(path)
        return name == "fsync" and path.name == "metrics.jsonl" and len(calls) == 2

    with pytest.raises(PublicationError, match="fsync .*metrics.jsonl"):
        run(PATIENT, tmp_path, disk=Failing(fails))
    assert steps_in(tmp_path) == [2] and len(calls) == 2 and same(run(TINY, tmp_path), direct)


REALLY_FULL = """
import os, sys, time
from pathlib import Path
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.crashes import private_mounts
from fault_tolerant_transformer_lab.training import deterministic, train
import subprocess
config, folder = load_config(sys.argv[1]), Path(sys.argv[2])
try:
    private_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", folder], check=True, capture_output=True)
except (OSError, subprocess.CalledProcessError):
    sys.exit(77)
def others(name, step):
    if (name, step) == ("before_forward", 4):
        while not (folder / "run/checkpoints/step-00000002.safetensors").exists():  # may be written in the background
            time.sleep(0.01)
        with open(folder / "other", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    if (name, step) == ("before_forward", 60):
        (folder / "other").unlink()
with deterministic(threads=1):
    result = train(config, folder / "run", on_boundary=others, progress_bar=False)
print(result.state_digest, result.failed_saves, len((folder / "run/metrics.jsonl").read_bytes().splitlines()))
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_is_really_full_for_a_while_costs_checkpoints_and_no_step(tmp_path, mode):
    config = PATIENT.replace(steps=64, checkpoint_mode=mode)  # long enough for the log to need another page
    (tmp_path / "config.json").write_text(canonical_json(config.describe()))
    (tmp_path / "mount").mkdir()
    command = [sys.executable, "-c", REALLY_FULL, tmp_path / "config.json", tmp_path / "mount"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip("a private tmpfs cannot be mounted here; as root it can")
    assert done.returncode == 0, done.stderr
    digest, failed, lines = done.stdout.split()
    assert digest == run(config.replace(checkpoint_mode="sync"), tmp_path / "direct").state_digest
    # the saves of steps 4 to 58; in the background the last of them may be late enough to find the room that came back
    assert int(failed) in ((28,) if mode == "sync" else (27, 28)) and int(lines) == 64
    assert "ENOSPC" in done.stderr and "lines wait in memory" in done.stderr


# Saves in the background


def test_the_mode_of_a_run_is_a_flag_of_its_command_and_changes_no_bit(tmp_path):
    (tmp_path / "config.json").write_text(canonical_json(TINY.describe()))
    program = "import sys; from fault_tolerant_transformer_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    for mode in MODES:
        command = [sys.executable, "-c", program, "train", "--config", "config.json", "--output", mode,
                   "--checkpoint-mode", mode, "--threads", "1"]
        done = forked.run(command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        newest = tmp_path / mode / "checkpoints" / "step-00000008.safetensors"
        assert json.loads((tmp_path / mode / "manifest.json").read_text())["config"]["checkpoint_mode"] == mode
        assert diff(tmp_path / "sync" / "checkpoints" / newest.name, newest) == []
    assert len({(tmp_path / mode / "metrics.jsonl").read_bytes() for mode in MODES}) == 1


@pytest.mark.parametrize("mode", ["async", "overlapped"])
@pytest.mark.parametrize("every", [1, 3])
def test_every_checkpoint_of_a_run_is_the_same_whoever_waits_for_it(tmp_path, mode, every):
    config = TINY.replace(checkpoint_every=every, keep_last=20, eval_every=2)
    results = [run(config.replace(checkpoint_mode=m), tmp_path / m) for m in ("sync", mode)]
    assert same(*results) and results[1].notes == ()
    assert steps_in(tmp_path / mode) == steps_in(tmp_path / "sync") and len(steps_in(tmp_path / mode)) >= 3
    for path in (tmp_path / "sync/checkpoints").glob("step-*"):
        assert diff(path, tmp_path / mode / "checkpoints" / path.name) == []


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, direct, mode):
    events = []

    class Watching(Slow):
        def operation(self, name, path, call):
            result = super().operation(name, path, call)
            if name == "replace" and "step-" in path.name:
                events.append(("published", int(path.name[6:14])))
            return result

    result = run(TINY.replace(checkpoint_mode=mode), tmp_path, disk=Watching(0.2, step=4),
                 on_boundary=lambda name, step: events.append((name, step)))
    assert same(result, direct)
    begun, ended = events.index(("during_write", 4)), events.index(("published", 4))
    assert ("after_update", 6) in events[begun:ended]  # two steps were made in the meantime, and the next save waited
    reported = [step for name, step in events if name == "after_publication"]
    assert reported == [2, 4, 6, 8]
    for step in reported:  # never before it is true
        assert events.index(("published", step)) < events.index(("after_publication", step))


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_the_operations_of_a_save_are_the_same_and_those_of_the_log_are_not_among_them(tmp_path, mode):
    places, operations = {}, {}
    for m in ("sync", mode):
        recording, seen = RecordingDisk(), []
        run(TINY.replace(checkpoint_mode=m), tmp_path / m, disk=recording,
            on_boundary=lambda name, step, seen=seen: seen.append((name, step)))
        places[m] = sorted(place for place in seen if place[0] == "during_write")
        in_store = [r for r in recording.records if r.path.parent.name == "checkpoints"]
        operations[m] = [(r.name, r.path.name, r.error) for r in in_store]
    assert places["sync"] == places[mode] and len(places[mode]) >= 4 * 8
    assert operations["sync"] == operations[mode]


@pytest.mark.parametrize("mode", MODES)
def test_no_checkpoint_is_published_before_the_lines_of_its_steps_are_durable(tmp_path, mode):
    durable, checked = [0], []

    class Ordered(Slow):
        def operation(self, name, path, call):
            if name == "replace" and "step-" in path.name:
                step = int(path.name[6:14])
                assert durable[0] >= step
                checked.append(step)
            result = super().operation(name, path, call)
            if name == "fsync" and path.name == "metrics.jsonl":
                durable[0] = path.read_bytes().count(b"\n")
            return result

    run(TINY.replace(checkpoint_mode=mode), tmp_path, disk=Ordered(0.02))
    assert checked == [2, 4, 6, 8]


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_the_end_of_a_run_waits_for_its_last_checkpoint(tmp_path, direct, mode):
    def strike(name, step):
        if (name, step) == ("after_backward", 5):
            os.kill(os.getpid(), signal.SIGTERM)

    config, threads = TINY.replace(checkpoint_mode=mode), threading.active_count()
    with pytest.raises(Interrupted) as stopped:
        run(config, tmp_path, disk=Slow(0.2), on_boundary=strike)
    assert (stopped.value.step, stopped.value.path.name) == (5, "step-00000005.safetensors")
    assert steps_in(tmp_path) == [4, 5] and threading.active_count() <= threads
    result = run(config, tmp_path, disk=Slow(0.2))
    assert same(result, direct) and steps_in(tmp_path) == [6, 8]
    assert read_manifest(result.directory / result.checkpoint).state_digest == direct.state_digest


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_a_step_that_is_refused_does_not_lose_the_save_in_the_background(tmp_path, mode):
    def spoil(name, step):
        if (name, step) == ("before_forward", 5):
            trainers[-1].model.head.weight.data[0, 0] = float("inf")

    trainers, original = [], TrainingRun.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "__init__", lambda self, *a, **k: trainers.append(self) or original(self, *a, **k))
        with pytest.raises(NonFiniteLossError) as refused:
            run(TINY.replace(checkpoint_mode=mode), tmp_path, disk=Slow(0.2, step=4), on_boundary=spoil)
    # In place of a good one, a checkpoint of a weight that was changed during its copy may be refused.
    notes = getattr(refused.value, "__notes__", [])
    assert steps_in(tmp_path) == ([2] if notes else [2, 4])


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_a_failure_in_the_background_is_told_soon_and_never_lost(tmp_path, mode):
    reached, config = [], TINY.replace(checkpoint_mode=mode)
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(config.replace(steps=200, checkpoint_every=100), tmp_path / "soon", disk=at("create", 100),
            on_boundary=lambda name, step: reached.append(step))
    assert 100 < max(reached) < 200  # not only at the next save
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(config.replace(checkpoint_every=7), tmp_path / "end", disk=at("fsync", 7))
    assert not (tmp_path / "end/result.json").exists()


KILLED = """
import os, signal, sys, time
import torch._dynamo, torch._inductor.config  # the first optimizer of a process imports them: once is enough
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.publication import Disk
from fault_tolerant_transformer_lab.training import deterministic, train
config, folder = load_config(sys.argv[1]), sys.argv[2]

class Striking(Disk):
    "Kills the process at the n-th operation on a file of step 4, or lets it wait there while training goes on."
    def __init__(self, kill, nth):
        super().__init__()
        self.kill, self.left = kill, nth
    def operation(self, name, path, call):
        if "step-00000004" in path.name or (self.left < 0 and path.name == "checkpoints"):
            self.left -= 1
            if self.left == -1:
                if self.kill == "there":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(30)
        return super().operation(name, path, call)

def strike(name, step):
    if (name, step) == place:
        os.kill(os.getpid(), signal.SIGKILL)

LATER = (("before_forward", 5), ("after_backward", 5), ("after_update", 6))
for number, (kill, nth, place) in enumerate([("there", n, None) for n in range(5)]
                                            + [("elsewhere", n, later) for n in (0, 2) for later in LATER]):
    if not (child := os.fork()):
        with deterministic(threads=1):
            train(config, f"{folder}-{number}", disk=Striking(kill, nth), on_boundary=strike, progress_bar=False)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_a_kill_while_a_checkpoint_is_written_in_the_background_leaves_the_earlier_one(tmp_path, direct, mode):
    config = TINY.replace(checkpoint_mode=mode)
    (tmp_path / "config.json").write_text(canonical_json(config.describe()))
    done = forked.run([sys.executable, "-c", KILLED, tmp_path / "config.json", tmp_path / "run"])
    assert done.stdout.split() == ["-9"] * 11, done.stderr
    for number in range(11):
        assert steps_in(tmp_path / f"run-{number}") == [2]
        resumed = run(config, tmp_path / f"run-{number}")
        assert resumed.resumed_from == 2 and same(resumed, direct), number
