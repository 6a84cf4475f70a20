"""A save killed at every operation: before it, in its middle, after it."""

import errno
import gc
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab import crashes, publication, training
from fault_tolerant_transformer_lab.crashes import (
    AT_ONCE,
    ERRNOS,
    HEARINGS,
    LARGE,
    SHORT,
    SOAK,
    Expectation,
    FailingDisk,
    FailingStore,
    Found,
    KillingDisk,
    Way,
    another_failed,
    continue_example,
    fail_everywhere,
    fail_in_a_run,
    fail_in_training,
    fail_once,
    gone_on,
    in_child,
    in_parallel,
    kill_everywhere,
    operations_of_a_save,
    read_back,
    rehearse,
    start_child,
    temporaries_in,
    undisturbed,
    untold,
    violations,
)
from fault_tolerant_transformer_lab.publication import (
    CheckpointStore,
    Disk,
    Generations,
    Operation,
    PublicationError,
    RecordingDisk,
    generation_name,
)
from fault_tolerant_transformer_lab.training import train


@pytest.mark.parametrize(("before", "way"), [
    (0, Way()), (3, Way()), (3, Way("overlapped")), (2, Way(n_bytes=LARGE)),
    (2, Way("overlapped", LARGE)), pytest.param(3, Way("async"), marks=pytest.mark.long)],
    ids=["first save", "save with retention", "overlapped", "large", "large, overlapped", "in the background"])
def test_killed_at_every_operation_the_run_goes_on_as_the_same_run(memory_dir, before, way):
    tried = kill_everywhere(memory_dir, before, way)
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 40 and tried.detail["operations"] >= 19


def test_the_judge_sees_each_broken_promise():
    expected = Expectation(acknowledged=3, begun=4, n_whole=2)
    assert violations(Found(3, (2, 3), ()), expected) == violations(Found(4, (3, 4), ()), expected) == []
    for found, told in [(Found(2, (1, 2), ()), "acknowledged step 3 is lost"),
                        (Found(0, (), ()), "a reader gets nothing"),
                        (Found(5, (4, 5), ()), "never saved"),
                        (Found(3, (2, 3), ("step-4",)), "not whole: step-4"),
                        (Found(3, (3,), ()), "1 whole checkpoints, expected 2"),
                        (Found(3, (2, 3), (), "disk"), "the next save fails: disk"),
                        (Found(3, (2, 3), (), stopped="IndexError"), "the reader stops: IndexError")]:
        assert told in "; ".join(violations(found, expected))


def test_a_kill_that_does_not_happen_is_noticed(memory_dir):
    ended = in_child(lambda: continue_example(memory_dir / "checkpoints", 1, KillingDisk(1000, "before")))
    assert ended.signal == 0 and ended.status == 0


def test_children_tell_their_result_their_error_and_their_signal():
    assert in_child(lambda: {"a": [1]}).value() == {"a": [1]}
    failed = in_child(lambda: 1 / 0)
    assert failed.status == 1 and "ZeroDivisionError" in failed.said
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failed.value()
    assert in_child(lambda: signal.raise_signal(signal.SIGKILL)).signal == signal.SIGKILL
    assert in_parallel(lambda i, n: [i, n], 3) == [[0, 3], [1, 3], [2, 3]]


def test_the_operation_of_a_rehearsal_is_the_one_that_fails(memory_dir):
    "Where a store is left, its lock is closed: asked for the result of a save, the next save would begin in its place."
    rehearsal = rehearse(memory_dir, 1, Way("async"))
    last = len(rehearsal.records) - 1
    assert rehearsal.records[last].path.name == ".lock"
    for hearing, told in ((HEARINGS[2], []), (HEARINGS[0], ["failed in the place of close .lock"])):
        shutil.copytree(rehearsal.template, memory_dir / "failed")
        disk = FailingDisk(last, "EIO")
        fail_once(memory_dir / "failed" / "checkpoints", 1, disk, Way("async"), hearing)
        wrong = another_failed(disk, rehearsal.records[last])
        assert len(wrong) == len(told) and all(text.endswith(end) for text, end in zip(wrong, told, strict=True)), wrong
        shutil.rmtree(memory_dir / "failed")


def test_only_the_parent_of_a_store_may_refuse_to_be_opened_and_nobody_hears_of_it():
    assert untold(None, ("sync_directory", Path("run")), "EACCES") == []
    assert untold(None, ("sync_directory", Path("run/checkpoints")), "EACCES") == ["no error was raised"]


@pytest.mark.parametrize("before", [0, 3], ids=["first save", "save with retention"])
def test_every_errno_at_every_operation_is_told_costs_nothing_and_is_not_repeated(memory_dir, before):
    tried = fail_everywhere(memory_dir, before)
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 150


@pytest.mark.parametrize(("before", "way", "codes"), [
    (3, Way("async"), (*ERRNOS, SHORT)), (3, Way("overlapped"), (*ERRNOS, SHORT)),
    (2, Way(n_bytes=LARGE), ("EIO", "ENOSPC", SHORT)), (2, Way("overlapped", LARGE), ("ENOSPC", SHORT))],
    ids=["in the background", "overlapped", "large", "large in the background"])
def test_every_errno_of_a_save_in_the_background_or_of_a_large_file_is_told_where_the_run_asks(
        memory_dir, before, way, codes):
    tried = fail_everywhere(memory_dir, before, codes, way)
    assert tried.lost == 0, tried.examples
    assert tried.tried > (len(codes) - 1) * tried.detail["operations"] >= (len(codes) - 1) * 15  # and short writes
    assert tried.detail["direct"] or not way.n_bytes
    assert set(tried.detail["told by"]) == {AT_ONCE, *(HEARINGS if way.mode != "sync" else ())}


@pytest.mark.parametrize("hearing", HEARINGS)
def test_a_background_save_whose_failure_is_swallowed_or_told_twice_is_noticed(memory_dir, monkeypatch, hearing):
    counted = RecordingDisk()
    continue_example(memory_dir / "counted", 1, counted)
    [k] = [k for k, record in enumerate(counted.records) if record.name == "fsync"]
    assert fail_once(memory_dir / "sound", 0, FailingDisk(k, "EIO"), Way("async"), hearing) == []
    with monkeypatch.context() as patch:
        patch.setattr(publication.Pending, "failure", lambda pending: pending._join())
        if hearing == "the result":
            patch.setattr(publication.Pending, "result", lambda pending: pending._join())
        swallowed = fail_once(memory_dir / "swallowed", 0, FailingDisk(k, "EIO"), Way("async"), hearing)
    assert "no error was raised" in swallowed
    monkeypatch.setattr(publication.Pending, "failure", lambda pending: pending._join() or pending._error)
    twice = fail_once(memory_dir / "twice", 0, FailingDisk(k, "EIO"), Way("async"), hearing)
    assert any("the next save fails as well" in told for told in twice) == (hearing == "the result")


def test_a_training_run_stops_or_goes_on_as_was_chosen_whatever_operation_of_a_save_fails(memory_dir):
    tried = fail_in_training(memory_dir)
    assert tried.lost == 0, tried.examples
    assert len(tried.detail["answers"]) == 6 and tried.tried == 6 * tried.detail["operations"] >= 60


def test_a_training_run_that_falls_over_is_lost_and_ends_no_campaign(memory_dir, monkeypatch):
    def falls_over(*anything):
        raise IndexError("a mistake of ours")

    monkeypatch.setattr(crashes, "untold", falls_over)
    monkeypatch.setattr(crashes, "MODES", ("sync",))
    monkeypatch.setattr(crashes, "operations_of_a_save", lambda folder: operations_of_a_save(folder)[3:5])
    tried = fail_in_training(memory_dir)
    assert (tried.tried, tried.lost) == (4, 2), tried.examples  # of those that stop
    assert "the run falls over: IndexError: a mistake of ours" in tried.examples[0]


def test_a_sync_that_is_tried_again_in_a_training_run_is_noticed(memory_dir, monkeypatch):
    def stubborn(disk, fd):
        try:
            Disk.fsync(disk, fd)
        except PublicationError:
            Disk.fsync(disk, fd)

    few = SOAK.replace(steps=8, on_save_error="continue")
    reference = undisturbed(few, memory_dir / "reference")
    counted = FailingStore(-1, "EIO")
    train(few, memory_dir / "counted", disk=counted, progress_bar=False)
    k = next(k for k, (name, path) in enumerate(counted.seen) if name == "fsync" and "00000006" in path.name)

    def _tried(name):
        return in_child(lambda: fail_in_a_run(memory_dir / name, FailingStore(k, "EIO"), few, reference)).value()

    assert _tried("sound") == []
    monkeypatch.setattr(training.RunDisk, "fsync", stubborn)
    assert "fsync was tried again" in _tried("stubborn")


def test_a_training_run_that_does_the_other_thing_or_says_nothing_is_noticed(memory_dir, monkeypatch):
    few = SOAK.replace(steps=8)
    reference = undisturbed(few, memory_dir / "reference")
    k = operations_of_a_save(memory_dir / "counted")[3]

    def _tried(answer, name):
        config = few.replace(on_save_error=answer)
        return in_child(lambda: fail_in_a_run(memory_dir / name, FailingStore(k, "EIO"), config, reference)).value()

    assert _tried("stop", "stops") == _tried("continue", "goes on") == []
    with monkeypatch.context() as patch:
        patch.setattr(training, "may_go_on", lambda session, error: session.run.config.on_save_error == "stop")
        assert _tried("stop", "other") == ["the run goes on, and was to stop"]
        assert _tried("continue", "another") == ["the run stops, and was to go on"]
    monkeypatch.setattr(training.Session, "note", lambda *anything: None)
    assert any("the notes do not tell errno" in told for told in _tried("continue", "silent"))


class DyingDisk(FailingDisk):
    "From one operation on nothing is written any more, as where the kernel remounts a disk read-only in mid-save."

    asks_only = ("open_directory", "list_names", "free_bytes", "lock")

    def operation(self, name, path, call):
        self.seen.append((name, path))
        if len(self.seen) <= self.k or name in self.asks_only:
            return call()
        if name == "close":
            call()
        number = getattr(errno, self.code)
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("code", ["EROFS", "EIO"])
def test_a_disk_that_dies_in_a_save_and_stays_dead_is_told_by_its_first_failure_and_costs_nothing(memory_dir, code):
    "Not even the temporary file can be removed then: the error says so, and the next writer does it."
    rehearsal = rehearse(memory_dir / "rehearsed", 3, Way())
    n_tried = n_left = 0
    for k, record in enumerate(rehearsal.records):
        if record.name in DyingDisk.asks_only:
            continue
        shutil.copytree(rehearsal.template, memory_dir / "dies")
        store, disk, told = memory_dir / "dies" / "checkpoints", DyingDisk(k, code), None
        try:
            continue_example(store, 4, disk)
        except PublicationError as error:
            told = error
        published = told.published if told else None
        wrong = untold(told, disk.seen[k], code)
        wrong += violations(read_back(store), Expectation(published.step if published else 3, 4, 2))
        if left := temporaries_in(store):
            wrong += [] if f"{left[0]} could not be removed" in str(told) else [f"{left} is left, and nobody told"]
            n_left += 1
        wrong += gone_on(store, 5, rehearsal.final)
        assert wrong == [], f"{code} from {record} on"
        shutil.rmtree(memory_dir / "dies")
        n_tried += 1
    assert n_tried >= 12 and n_left >= 4, "a write, a sync and a close fail, and a rename"


def test_a_recovery_that_is_killed_while_it_sets_a_damaged_checkpoint_aside_loses_nothing(memory_dir):
    template, name = memory_dir / "template", generation_name(3)
    continue_example(template / "checkpoints", 3)
    shutil.copytree(template, memory_dir / "direct")
    final = continue_example(memory_dir / "direct" / "checkpoints", 5)
    damaged = bytearray((template / "checkpoints" / name).read_bytes())
    damaged[-1] ^= 1
    (template / "checkpoints" / name).write_bytes(damaged)
    shutil.copytree(template, memory_dir / "counted")
    recorder = RecordingDisk()
    continue_example(memory_dir / "counted" / "checkpoints", 3, recorder)
    begin = next(k for k, record in enumerate(recorder.records) if record.name == "replace")
    assert [record.name for record in recorder.records[begin:begin + 2]] == ["replace", "sync_directory"]
    assert recorder.records[begin].target.name == f"{name}.corrupt"
    for k, moment in itertools.product((begin, begin + 1), ("before", "after")):
        shutil.copytree(template, memory_dir / "killed")
        store = memory_dir / "killed" / "checkpoints"
        ended = in_child(lambda store=store, k=k, moment=moment: continue_example(store, 3, KillingDisk(k, moment)))
        assert ended.signal == signal.SIGKILL
        assert Generations(store).latest().step == 2
        assert gone_on(store, 5, final) == []
        assert [path.read_bytes() for path in store.glob(f"{name}.corrupt*")] == [damaged], f"{moment} operation {k}"
        shutil.rmtree(memory_dir / "killed")


def test_an_error_that_is_none_of_ours_is_noticed_and_ends_no_campaign(memory_dir, monkeypatch):
    class Bare(FailingDisk):
        def perform(self, name, path, call, **facts):
            return self.operation(name, path, Operation(name, path, call, **facts))

    counted = RecordingDisk()
    continue_example(memory_dir / "counted", 1, counted)
    k = next(k for k, record in enumerate(counted.records) if record.name == "fsync")
    wrong = fail_once(memory_dir / "bare", 0, Bare(k, "EIO"))
    assert wrong == ["expected a PublicationError, got OSError(5, 'Input/output error')"]

    def falls_over(*anything):
        raise IndexError("a mistake of ours")

    final = continue_example(memory_dir / "sound", 2)
    assert gone_on(memory_dir / "sound", 2, final) == []
    monkeypatch.setattr(CheckpointStore, "restore", falls_over)
    assert gone_on(memory_dir / "sound", 3, final) == ["the run cannot go on: IndexError: a mistake of ours"]


def test_a_sync_that_is_tried_again_is_noticed(memory_dir):
    class Stubborn(FailingDisk):
        def fsync(self, fd):
            try:
                super().fsync(fd)
            except PublicationError:
                super().fsync(fd)

    store = memory_dir / "checkpoints"
    counted = RecordingDisk()
    continue_example(memory_dir / "counted", 1, counted)
    [k] = [k for k, record in enumerate(counted.records) if record.name == "fsync"]
    wrong = fail_once(store, 0, Stubborn(k, "EIO"))
    assert "fsync was tried again" in wrong and "no error was raised" in wrong

    class Busy(Stubborn):
        def fsync(self, fd):
            try:
                FailingDisk.fsync(self, fd)
            except PublicationError:
                self.truncate(fd, os.fstat(fd).st_size)
                FailingDisk.fsync(self, fd)

    assert "fsync was tried again" in fail_once(memory_dir / "busy", 0, Busy(k, "EIO")), "with something in between"


def test_a_temporary_that_stays_after_an_error_is_noticed(memory_dir, monkeypatch):
    counted = RecordingDisk()
    continue_example(memory_dir / "counted", 1, counted)
    k = next(k for k, record in enumerate(counted.records) if record.name == "fsync")
    assert fail_once(memory_dir / "sound", 0, FailingDisk(k, "EIO")) == []
    monkeypatch.setattr(publication, "_discard", lambda *anything: None)
    [wrong] = fail_once(memory_dir / "broken", 0, FailingDisk(k, "EIO"))
    assert wrong == ".step-00000001.safetensors.tmp is left after the error"


@pytest.mark.parametrize("code", ERRNOS)
def test_an_error_without_its_remedy_is_noticed(code, monkeypatch):
    told = PublicationError("fsync", Path("x/file"), OSError(getattr(errno, code), "reason"))
    assert untold(told, ("fsync", Path("x/file")), code) == []
    told.remedy = ""
    assert "does not tell remedy" in untold(told, ("fsync", Path("x/file")), code)[0]


def test_a_child_ends_with_its_parent_and_workers_end_with_the_first_that_fails(memory_dir):
    def parent():
        start_child(lambda: os.write(telling, str(os.getpid()).encode()) and time.sleep(600))
        select.select([told], [], [])
        signal.raise_signal(signal.SIGKILL)

    def worker(number, n):
        if number == 0:
            os.read(told, 1)
            raise ValueError("the first one")
        os.write(telling, b"x" + str(os.getpid()).encode())
        time.sleep(600)

    told, telling = os.pipe()
    assert in_child(parent).signal == signal.SIGKILL
    pids = [int(os.read(told, 16))]
    with pytest.raises(RuntimeError, match="the first one"):
        in_parallel(worker, 2)
    pids.append(int(os.read(told, 16)))
    for _ in range(500):
        if not any(lives(pid) for pid in pids):
            break
        time.sleep(0.01)
    assert [lives(pid) for pid in pids] == [False, False]


@pytest.mark.parametrize("at", ["before", "after_in_parent"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another thread"])
def test_a_signal_in_the_midst_of_a_fork_is_neither_lost_nor_leaves_a_worker(tmp_path, at, number, beside):
    "What a handler raises in a hook of `os.register_at_fork` is printed and forgotten; any thread may let a signal in."
    program = f"""
import os, signal, threading, time
from fault_tolerant_transformer_lab.crashes import ended_by_sigterm, in_parallel

def worker(number, n):
    open(("first", "second")[number], "w").write(str(os.getpid()))
    time.sleep(600)

def before():
    forks.append(1)
    while len(forks) == 2 and not os.path.exists("first"):
        time.sleep(0.01)

def strike():
    if len(forks) == 2:
        os.kill(os.getpid(), {int(number)})
        time.sleep(0.05)  # another thread is woken for it

if {beside}:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
forks = []
os.register_at_fork({at}=strike)
os.register_at_fork(before=before)  # the last one comes first
with ended_by_sigterm():
    in_parallel(worker, 2)
print("gone on")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, text=True, capture_output=True, check=False,
                          timeout=60)
    assert done.returncode in (128 + number, -number) and "gone on" not in done.stdout, done.stderr
    pids = [int(path.read_text()) for path in tmp_path.iterdir() if path.read_text()]
    assert pids and not any(map(lives, pids))


def test_a_signal_at_any_moment_leaves_the_handlers_as_they_were():
    "A timer strikes all over the place in which signals are held, its edges included."
    def strike(number, frame):
        if frame.f_code.co_name in ("_signals_held", "__enter__", "__exit__"):
            raise KeyboardInterrupt

    def struck():
        n_struck, parent = 0, os.getpid()
        signal.signal(signal.SIGTERM, strike)
        standing = threading.Thread(target=lambda: [time.sleep(0.0003) or os.kill(parent, signal.SIGTERM)
                                                    for _ in range(400)])
        standing.start()
        while standing.is_alive():
            try:
                with crashes._signals_held():
                    pass
            except KeyboardInterrupt:
                n_struck += 1
        left = signal.getsignal(signal.SIGTERM)
        return [n_struck, left is strike, left.__closure__ and [cell.cell_contents for cell in left.__closure__
                                                                if isinstance(cell.cell_contents, bool)]]

    n_struck, as_it_was, held = in_child(struck).value()
    assert n_struck > 20 and (as_it_was or held == [False])  # one that was left behind calls the one before it


def test_where_no_second_worker_can_be_started_the_first_one_ends(tmp_path, monkeypatch):
    def worker(number, n):
        begun.write_text(str(os.getpid()))
        time.sleep(600)

    def fork(forks=[], fork=crashes._fork):  # noqa: B006
        while forks and not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        if forks:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        forks.append(1)
        return fork()

    begun, n_open = tmp_path / "begun", len(os.listdir("/dev/fd"))
    monkeypatch.setattr(crashes, "_fork", fork)
    with pytest.raises(BlockingIOError, match="no more processes"):
        in_parallel(worker, 2)
    assert not lives(int(begun.read_text()))
    assert len(os.listdir("/dev/fd")) == n_open


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_child_destroys_no_garbage_of_its_parent():
    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            os.write(writing, b"destroyed")

    reading, writing = os.pipe()
    gc.disable()
    try:
        Cycle()
        assert in_child(lambda: gc.collect() >= 0).value()
        os.write(writing, b"kept")
        assert os.read(reading, 100) == b"kept"
    finally:
        gc.enable()
        gc.collect()
        os.close(reading)
        os.close(writing)
