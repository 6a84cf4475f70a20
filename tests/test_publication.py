"""Publication under fault: each operation killed and failed, two writers, hostile names, the kernel's own record."""

import ctypes
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab import publication
from fault_tolerant_transformer_lab.checkpoint_file import (
    CheckpointCorruptError,
    UnknownSchemaError,
    diff,
    encode,
    read_manifest,
    state_digest,
    verify,
)
from fault_tolerant_transformer_lab.contract import CheckpointError, CheckpointMismatchError, Contract, Progress
from fault_tolerant_transformer_lab.publication import (
    CheckpointLockedError,
    CheckpointStore,
    Disk,
    ForwardingDisk,
    Generations,
    NoCheckpointError,
    PublicationError,
    RecordingDisk,
    fill,
    generation_name,
    make_directories,
    place_of,
    step_of,
    to_delete,
    write_atomically,
)

ERRNOS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "EINTR", "EMFILE", "EFBIG")
LOCK_NAME = ".lock"
RECIPE = ["list_names", "free_bytes", "create", "write", "write", "fsync", "close", "replace", "sync_directory"]


def a_run(step, width=6):
    model = torch.nn.Linear(4, width)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape).cos() * (step + 1) + i)
    progress = Progress()
    for i in range(step):
        progress.record(1 / (i + 1), n_tokens=2)
    return Contract(identity={"width": width}, model=model, progress=progress)


def in_child(work):
    "The signal that ended a forked child, or 0 where it came to its end."
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def store_with(directory, *steps, **options):
    with CheckpointStore(directory, **options) as store:
        for step in steps:
            store.save(a_run(step))
    return store


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.name != LOCK_NAME}


def damage(path, at=-50):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return bytes(data)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def private_umask():
    before = os.umask(0o077)
    yield
    os.umask(before)


# The recipe


def test_operations_of_a_save_come_in_the_order_that_the_promise_needs(directory):
    disk = RecordingDisk()
    with CheckpointStore(directory, keep_last=1, disk=disk) as store:
        opening = [r.name for r in disk.records]
        store.save(a_run(1))
        first = [r.name for r in disk.records[len(opening):]]
        store.save(a_run(2))
        second = [r.name for r in disk.records[len(opening) + len(first):]]
    assert opening == ["open_directory", "sync_directory", "open_directory", "make_directory", "sync_directory",
                       "open_directory", "open_lock", "lock", "truncate", "list_names", "write"]
    assert first == RECIPE
    assert second == [*RECIPE, "unlink"]


def test_files_and_directories_are_private_and_not_inherited(directory):
    class Nosy(Disk):
        inherited = []

        def operation(self, name, path, call):
            result = call()
            if name in ("create", "open_lock", "open_directory"):
                self.inherited.append(os.get_inheritable(result))
            return result

    os.umask(0)
    store_with(directory, 1, disk=(disk := Nosy()))
    assert len(disk.inherited) >= 4 and not any(disk.inherited)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_short_writes_and_one_interruption_are_continued(directory):
    class Reluctant(Disk):
        attempts = 0

        def operation(self, name, path, call):
            if name == "write" and path.name != LOCK_NAME:
                self.attempts += 1
                if self.attempts % 3 == 0:
                    raise InterruptedError(errno.EINTR, "interrupted")
                return call.shortened(min(len(call.data), 1 + self.attempts * 7 % 500))()
            return call()

    disk = Reluctant()
    published = store_with(directory, 3, disk=disk).latest()
    assert disk.attempts > 10 and verify(published.path).step == 3
    assert published.path.read_bytes() == store_with(directory.parent / "plain", 3).latest().path.read_bytes()


@pytest.mark.parametrize("operation", ["write", "fsync", "close"])
def test_where_filling_a_file_fails_its_maker_stops_and_nothing_is_repeated(directory, operation):
    class Failing(RecordingDisk):
        def operation(self, name, path, call):
            if name == operation:
                call = replace(call, perform=fails)
            return super().operation(name, path, call)

    def fails(call):
        if call.name == "close":
            os.close(fd)
        raise OSError(errno.EIO, "broken")

    def chunks():
        try:
            for i in range(3):
                yield i, memoryview(b"x")
        finally:
            stopped.append(True)

    directory.mkdir(mode=0o700)
    disk, stopped = Failing(), []
    opened = disk.open_directory(directory)
    fd = disk.create(opened, "file")
    with pytest.raises(PublicationError) as raised:
        fill(disk, fd, chunks())
    assert raised.value.operation == operation and stopped == [True]
    names = [record.name for record in disk.records]
    assert names.count(operation) == names.count("close") == 1 and names.count("fsync") <= 1
    with pytest.raises(OSError):
        os.fstat(fd)
    disk.release(opened)


def test_a_disk_with_operations_of_its_own_passes_all_of_them_to_the_inner_one(directory):
    class Extended(ForwardingDisk):
        def look(self, directory):
            return self.perform("look", self.path_of(directory), lambda op: os.listdir(directory))

    plain, inner = RecordingDisk(), RecordingDisk()
    store_with(directory.parent / "plain", 2, disk=plain)
    extended = Extended(inner)
    store_with(directory, 2, disk=extended)
    assert [str(record) for record in inner.records] == [
        str(record).replace("plain", directory.name) for record in plain.records]
    opened = extended.open_directory(directory)
    assert LOCK_NAME in extended.look(opened) and inner.records[-1].name == "look"
    extended.release(opened)


@pytest.mark.parametrize("taken", [0, -1])
def test_a_write_that_takes_nothing_is_an_error_and_not_a_loop(directory, taken):
    class Stuck(Disk):
        def operation(self, name, path, call):
            return taken if name == "write" and path.name != LOCK_NAME else call()

    with CheckpointStore(directory, disk=Stuck()) as store, pytest.raises(PublicationError, match="no byte was taken"):
        store.save(a_run(1))
    assert not contents(directory)


class Failing(Disk):
    "Fails the operations of one name; `after` fails it although it was done."

    def __init__(self, failing, code, *, after=False, times=10**9):
        super().__init__()
        self.failing, self.code, self.after, self.left, self.seen = failing, getattr(errno, code), after, times, []
        self.armed = False

    def operation(self, name, path, call):
        if not self.armed or path.name == LOCK_NAME:
            return call()
        self.seen.append(name)
        if name != self.failing or self.left == 0:
            return call()
        self.left -= 1
        if self.after:
            call()
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", ERRNOS)
@pytest.mark.parametrize("operation", [*dict.fromkeys(RECIPE), "unlink"])
def test_every_errno_at_every_operation_of_a_save(directory, operation, code):
    store_with(directory, 1, 2)
    before = contents(directory)
    disk = Failing(operation, code)
    with CheckpointStore(directory, disk=disk) as store:
        disk.armed = True
        with pytest.raises(PublicationError) as caught:
            store.save(a_run(3))
    error = caught.value
    assert error.operation == operation and error.errno == getattr(errno, code)
    assert isinstance(error.__cause__, OSError) and error.remedy in str(error) and code in str(error)
    assert f"checkpoints/{error.path.name}" in str(error) or error.path == directory
    assert str(directory.parent) not in str(error)

    after = contents(directory)
    published = operation in ("sync_directory", "unlink")
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == ({generation_name(3)} if published else set())
    assert (error.published is not None) == (operation == "unlink")
    repeatable = operation in ("create", "write") and code == "EINTR"
    assert disk.seen.count(operation) == 1 or repeatable, "nothing else is ever tried again"

    with CheckpointStore(directory) as store:  # and the next save needs nobody's repair
        store.save(a_run(4))
        assert store.restore(a_run(0)).step == 4
    assert not [name for name in contents(directory) if name.endswith(".tmp")]


@pytest.mark.parametrize("operation", ["open_lock", "lock", "truncate", "list_names", "write", "open_directory",
                                       "sync_directory"])
def test_a_failure_while_opening_leaves_no_lock_behind(directory, operation):
    store_with(directory, 1)

    class Refusing(Disk):
        def operation(self, name, path, call):
            if name == operation:
                raise OSError(errno.EIO, "Input/output error")
            return call()

    n_open = len(os.listdir("/dev/fd"))
    with pytest.raises(PublicationError, match=operation), CheckpointStore(directory, disk=Refusing()):
        raise AssertionError("it must not open")
    assert len(os.listdir("/dev/fd")) == n_open
    assert store_with(directory, 2).latest().step == 2


def test_a_temporary_that_cannot_be_removed_is_told_and_goes_with_the_next_save(directory):
    class Sticky(Disk):
        broken = True

        def operation(self, name, path, call):
            if self.broken and (name == "fsync" or name == "unlink"):
                raise OSError(errno.EIO, "Input/output error")
            return call()

    with CheckpointStore(directory, disk=(disk := Sticky())) as store:
        with pytest.raises(PublicationError, match="fsync.*could not be removed.*the next writer does it"):
            store.save(a_run(1))
        disk.broken = False
        assert [name for name in contents(directory) if name.endswith(".tmp")]
        store.save(a_run(1))  # the same step, in the same process
    assert list(contents(directory)) == [generation_name(1)]


def test_a_failed_directory_sync_never_costs_an_older_checkpoint(directory):
    store_with(directory, 1, 2)
    disk = Failing("sync_directory", "EIO", times=1)
    with CheckpointStore(directory, keep_last=1, disk=disk) as store:
        disk.armed = True
        with pytest.raises(PublicationError, match="complete and readable"):
            store.save(a_run(3))
        assert [g.step for g in store.generations()] == [1, 2, 3]
        store.save(a_run(4))
        assert [g.step for g in store.generations()] == [3, 4]  # 3 is not counted; 4 is safe, so 1 and 2 may go


def test_keyboard_interrupt_in_the_middle_of_a_write_leaves_nothing(directory):
    class Impatient(Disk):
        def operation(self, name, path, call):
            if name == "write" and path.name != LOCK_NAME:
                call.shortened(10)()
                raise KeyboardInterrupt
            return call()

    with pytest.raises(KeyboardInterrupt):
        store_with(directory, 1, disk=Impatient())
    assert not contents(directory)


def test_a_file_size_limit_of_the_system_is_reported_and_survived(directory):
    "The real errno: RLIMIT_FSIZE, in a process of its own."
    store_with(directory, 1)
    before = contents(directory)

    def child():
        with CheckpointStore(directory) as store:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4100, 4100))
            with pytest.raises(PublicationError, match=r"write .*EFBIG.*ulimit -f"):
                store.save(a_run(2))
            os.kill(os.getpid(), signal.SIGUSR1)

    assert len(before[generation_name(1)]) > 4100
    assert in_child(child) == signal.SIGUSR1
    assert contents(directory) == before


def test_too_little_space_is_told_before_the_first_byte_with_both_figures(directory):
    class Small(RecordingDisk):
        def free_bytes(self, opened):
            super().free_bytes(opened)
            return 700

    with CheckpointStore(directory, disk=(disk := Small())) as store, pytest.raises(PublicationError) as caught:
        store.save(a_run(1))
    need = encode(a_run(1).capture()).n_bytes
    assert f"need {need:,} bytes, have 700" in str(caught.value) and caught.value.errno == errno.ENOSPC
    assert disk.records[-2].name == "free_bytes" and not contents(directory)


def test_unknown_free_space_is_not_taken_for_none(directory):
    class Silent(Disk):
        def free_bytes(self, opened):
            return None

    assert store_with(directory, 1, disk=Silent()).latest().step == 1


# Killed at every operation


class Deadly(Disk):
    "Ends its process by SIGKILL at the k-th operation: before it, in its middle (writes), or after it."

    def __init__(self, k, when):
        super().__init__()
        self.k, self.when, self.n = k, when, -1

    def operation(self, name, path, call):
        self.n += 1
        if self.n != self.k:
            return call()
        if self.when == "middle" and call.data is not None:
            call.shortened(len(call.data) // 2)()
        elif self.when == "after":
            call()
        os.kill(os.getpid(), signal.SIGKILL)


def restore_and_rewind(place, disk):
    with CheckpointStore(place, keep_last=9, disk=disk) as store:
        store.restore(a_run(0))
        store.rewind(2)


def n_operations(template, work):
    shutil.copytree(template.parent, template.parent.parent / "count")
    disk = RecordingDisk()
    work(template.parent.parent / "count" / template.name, disk)
    return len(disk.records)


@pytest.mark.parametrize("when", ["before", "middle", "after"])
@pytest.mark.parametrize("steps", [(), (1, 2)], ids=["first save", "save with retention"])
def test_killed_at_every_operation_a_reader_finds_old_or_new_and_the_next_save_works(tmp_path, steps, when):
    def work(place, disk):
        with CheckpointStore(place, disk=disk) as store:
            store.save(a_run(3))

    template = tmp_path / "template" / "checkpoints"
    template.parent.mkdir()
    if steps:
        store_with(template, *steps)
    total, seen = n_operations(template, work), set()
    for k in range(total):
        place = tmp_path / f"{when}-{k}"
        shutil.copytree(template.parent, place)
        assert in_child(lambda: work(place / "checkpoints", Deadly(k, when))) == signal.SIGKILL  # noqa: B023
        reader = Generations(place / "checkpoints")
        latest = reader.latest()
        seen.add(latest and latest.step)
        assert (latest.step in (2, 3)) if steps else (latest is None or latest.step == 3)
        assert all(verify(g.path).step == g.step for g in reader.generations()), "every published name is whole"
        assert not steps or len(reader.generations()) >= 2
        assert reader.is_empty() == (latest is None)
        after = store_with(place / "checkpoints", 4)
        assert after.latest().step == 4
        assert not [name for name in after.names() if name.endswith(".tmp")]
    assert total > 15 and seen == ({2, 3} if steps else {None, 3})


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_setting_aside_no_bytes_are_lost_and_it_can_be_done_again(tmp_path, when):
    template = tmp_path / "template" / "checkpoints"
    template.parent.mkdir()
    store_with(template, 1, 2, 3, 4, 5, keep_last=9)
    for step in (4, 5):
        damage(template / generation_name(step))
    everything = sorted(contents(template).values())
    for k in range(n_operations(template, restore_and_rewind)):
        place = tmp_path / f"{when}-{k}" / "checkpoints"
        shutil.copytree(template, place)
        assert in_child(lambda: restore_and_rewind(place, Deadly(k, when))) == signal.SIGKILL  # noqa: B023
        assert Generations(place).latest().step in (2, 3)
        assert sorted(contents(place).values()) == everything
        if Generations(place).latest().step == 3:
            restore_and_rewind(place, Disk())
        assert [g.step for g in Generations(place).generations()] == [1, 2]
        assert sorted(contents(place).values()) == everything


@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_killed_at_every_operation_of_a_small_file(tmp_path, when):
    path = tmp_path / "manifest.json"
    write_atomically(path, b"old")
    disk = RecordingDisk()
    write_atomically(path, b"old", disk)
    for k in range(len(disk.records)):
        path.write_bytes(b"old")
        assert in_child(lambda: write_atomically(path, b"newer", Deadly(k, when))) == signal.SIGKILL  # noqa: B023
        assert path.read_bytes() in (b"old", b"newer")
        write_atomically(path, b"next")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json"] and path.read_bytes() == b"next"


def test_killed_between_making_a_directory_and_syncing_it_the_next_open_syncs_it(tmp_path):
    target = tmp_path / "a" / "b" / "checkpoints"
    for name in ("a", "b", "checkpoints"):
        class Stop(Disk):
            def operation(self, operation, path, call, wanted=name):
                result = call()
                if operation == "make_directory" and path.name == wanted:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

        assert in_child(lambda: make_directories(target, Stop())) == signal.SIGKILL
        made = next(p for p in (target, *target.parents) if p.name == name)
        disk = RecordingDisk()
        make_directories(made, disk)
        assert any(r.name == "sync_directory" and r.path == made.parent for r in disk.records)
        assert not any(r.name == "make_directory" for r in disk.records)


# The kernel's record


STRACED = ("openat", "open", "creat", "write", "pwrite64", "writev", "pwritev", "pwritev2", "fsync", "fdatasync",
           "sync_file_range", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir",
           "ftruncate", "truncate", "fallocate", "link", "linkat", "symlink", "symlinkat", "flock", "mmap", "sendfile",
           "copy_file_range", "chmod", "fchmod", "fchmodat", "utimensat", "io_uring_enter")


def whole_lines(text):
    "strace's lines without process numbers; a call that another thread interrupted is put together again."
    begun = {}
    for line in text.splitlines():
        pid, line = line.split(maxsplit=1)
        if line.endswith("<unfinished ...>"):
            begun[pid] = line.removesuffix("<unfinished ...>")
            continue
        if line.startswith("<... "):
            line = begun.pop(pid) + line.partition("resumed>")[2]
        yield line


def from_strace(text, root):
    "The operations that change something below `root`, as (name, file, target, offset, bytes)."
    def relative(path):
        return os.path.relpath(path, root)

    found = []
    for line in whole_lines(text):
        call, _, rest = line.partition("(")
        if str(root) not in line or "= -1" in line or call not in STRACED:
            continue
        paths = re.findall(r"<([^>]*)>", rest)
        names = re.findall(r'"([^"]*)"', rest)
        if call in ("openat", "open", "creat"):
            if not re.search(r"O_CREAT|O_WRONLY|O_RDWR|O_TRUNC", rest):
                continue
            name = "open_lock" if names[0] == LOCK_NAME else "create"
            found.append((name, relative(Path(paths[0]) / names[0]), None, None, None))
        elif call == "pwrite64":
            n_bytes, offset = re.search(r", (\d+), (\d+) *\) +=", rest).groups()
            found.append(("write", relative(paths[0]), None, int(offset), int(n_bytes)))
        elif call == "fsync":
            name = "sync_directory" if Path(paths[0]).is_dir() else "fsync"
            found.append((name, relative(paths[0]), None, None, None))
        elif call in ("renameat", "renameat2"):
            old, new = (relative(Path(p) / n) for p, n in zip(paths, names, strict=False))
            found.append(("replace", old, new, None, None))
        elif call in ("unlinkat", "mkdirat"):
            name = {"unlinkat": "unlink", "mkdirat": "make_directory"}[call]
            found.append((name, relative(Path(paths[0]) / names[0]), None, None, None))
        elif call == "flock":
            if "LOCK_UN" not in rest:
                found.append(("lock", relative(paths[0]), None, None, None))
        elif call == "sync_file_range":
            found.append(("start_writeback", relative(paths[0]), None, int(re.search(r">, (\d+),", rest)[1]), None))
        elif call == "ftruncate":
            found.append(("truncate", relative(paths[0]), None, None, None))
        elif call == "mmap" and "PROT_WRITE" not in rest:
            continue
        else:
            found.append((call, line, None, None, None))  # nothing of the kind passes the seam: a difference
    return found


@pytest.mark.skipif(not (shutil.which("strace") and sys.platform == "linux"), reason="strace is not installed")
def test_the_kernel_saw_exactly_what_the_seam_recorded(tmp_path):
    root, log, said = tmp_path / "run", tmp_path / "trace", tmp_path / "said.json"
    root.mkdir()
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_publication import *
        disk = RecordingDisk()
        with CheckpointStore({str(root / "checkpoints")!r}, disk=disk) as store:
            for step in (1, 2, 3): store.save(a_run(step))
            store.save(a_run(4, width=1_500_000))  # large enough to pass by the page cache
            disk.set_direct = lambda fd, on: False  # as where a file system has no such thing
            store.save(a_run(5, width=1_500_000))  # large enough for an early start of the writing
            store.save(a_run(6, width=1_500_000), wait=False)
        write_atomically({str(root / "manifest.json")!r}, b"{{}}", disk)
        with CheckpointStore({str(root / "checkpoints")!r}, disk=disk) as store:
            store.restore(a_run(0, width=1_500_000)); store.rewind(5)
        records = [(r.name, str(r.path), r.target and str(r.target), r.offset, r.n_bytes) for r in disk.records]
        open({str(said)!r}, "w").write(json.dumps(records))
    """
    command = ["strace", "-f", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace={','.join('?' + c for c in STRACED)}",
               "-o", log, sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in done.stderr.lower() and not said.exists():
        pytest.skip(f"tracing is not permitted here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr
    recorded = [(name, os.path.relpath(path, root), target and os.path.relpath(target, root), offset, n_bytes)
                for name, path, target, offset, n_bytes in json.loads(said.read_text())
                if name not in ("open_directory", "close", "free_bytes", "list_names")]
    recorded = [entry for entry in recorded if not entry[1].startswith("..")]
    seen = [entry for entry in from_strace(log.read_text(), root) if not entry[1].startswith("..")]
    assert seen == recorded
    assert {name for name, *_ in seen} >= {"create", "write", "fsync", "replace", "sync_directory", "unlink", "lock",
                                           "make_directory", "open_lock", "truncate", "start_writeback"}


# Names, generations, retention


@given(st.integers(0, 10**19 - 1))
def test_a_step_and_its_name_go_both_ways(step):
    assert step_of(generation_name(step)) == step


@given(st.text(alphabet="step-0123456789.safetensors/x\n٤", max_size=40))
def test_only_the_names_that_we_give_are_checkpoints(name):
    assert step_of(name) is None or generation_name(step_of(name)) == name


@pytest.mark.parametrize("step", [-1, 10**19])
def test_a_step_without_a_name_is_refused(step):
    with pytest.raises(CheckpointError, match="whole number"):
        generation_name(step)


def test_large_steps_work_and_sort_as_numbers(directory):
    class Counter:
        step = 0

        def state_dict(self):
            return {"at": self.step}

        def load_state_dict(self, state):
            self.step = state["at"]

    counter = Counter()
    contract = Contract(counter=counter)
    with CheckpointStore(directory, keep_last=3) as store:
        for counter.step in (99_999_999, 100_000_000, 10**12):
            store.save(contract, step=counter.step)
        assert [g.step for g in store.generations()] == [99_999_999, 100_000_000, 10**12]
        assert store.latest().step == 10**12
        counter.step = 0
        assert store.restore(contract).step == counter.step == 10**12


@given(st.lists(st.integers(0, 60), max_size=20), st.integers(1, 5), st.none() | st.integers(1, 9))
def test_retention_against_the_rule_said_one_step_at_a_time(steps, keep_last, keep_every):
    gone = to_delete(steps, keep_last=keep_last, keep_every=keep_every)
    for step in set(steps):
        n_newer = len({other for other in steps if other > step})
        stays = n_newer < keep_last or (keep_every is not None and step % keep_every == 0)
        assert (step in gone) == (not stays)
    assert set(steps) == set() or set(steps) - set(gone)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 3))
def test_damaged_files_do_not_count_and_are_not_deleted(tmp_path_factory, sound, keep_last):
    place = tmp_path_factory.mktemp("retention") / "checkpoints"
    store_with(place, *range(1, len(sound) + 1), keep_last=100)
    for step, is_sound in enumerate(sound, 1):
        if not is_sound:
            (place / generation_name(step)).write_bytes(b"short")
    last = len(sound) + 1
    store = store_with(place, last, keep_last=keep_last)
    good = [step for step, is_sound in enumerate(sound, 1) if is_sound] + [last]
    bad = [step for step, is_sound in enumerate(sound, 1) if not is_sound]
    assert [g.step for g in store.generations()] == sorted(good[-keep_last:] + bad)


def test_keep_every_keeps_milestones(directory):
    store = store_with(directory, 1, 2, 3, 4, 5, 6, 7, keep_last=1, keep_every=3)
    assert [g.step for g in store.generations()] == [3, 6, 7]


@pytest.mark.parametrize(
    "options", [{"keep_last": 0}, {"keep_last": True}, {"keep_last": 1.5}, {"keep_every": 0}, {"keep_every": -1}]
)
def test_impossible_retention_is_refused(directory, options):
    with pytest.raises(ValueError, match="keep_(last|every): expected a whole number"):
        CheckpointStore(directory, **options)


# Restoring


def test_restore_brings_back_the_newest_state(directory):
    store_with(directory, 3, 7)
    contract = a_run(0)
    restored = CheckpointStore(directory).restore(contract)
    assert (restored.step, restored.path.name, restored.skipped) == (7, "step-00000007.safetensors", ())
    assert torch.equal(contract.participants["model"].weight, a_run(7).participants["model"].weight)
    assert contract.participants["progress"].step == 7


def test_nothing_is_restored_unverified(directory):
    store = store_with(directory, 1)
    with pytest.raises(TypeError, match="verify"):
        store.restore(a_run(0), verify=False)


def test_damage_falls_back_is_reported_and_kept_only_by_the_writer(directory):
    store_with(directory, 1, 2, 3, keep_last=5)
    bad = {step: damage(directory / generation_name(step)) for step in (2, 3)}
    reader = CheckpointStore(directory)
    restored = reader.restore(a_run(0))
    assert restored.step == 1
    assert [path.name for path, _ in restored.skipped] == [generation_name(3), generation_name(2)]
    assert len(reader.generations()) == 3, "a reader renames nothing"
    with CheckpointStore(directory, keep_last=5) as store:
        restored = store.restore(a_run(0))
        assert all("kept as" in why for _, why in restored.skipped)
        assert [g.step for g in store.generations()] == [1]
        store.save(a_run(2))
        again = damage(directory / generation_name(2))
        store.restore(a_run(0))
    names = [f"{generation_name(2)}.corrupt", f"{generation_name(2)}.corrupt-2", f"{generation_name(3)}.corrupt"]
    assert sorted(set(contents(directory)) - {generation_name(1)}) == names
    assert [(directory / name).read_bytes() for name in names] == [bad[2], again, bad[3]]


def test_a_file_under_a_newer_name_does_not_win(directory):
    store_with(directory, 1, 2)
    shutil.copy(directory / generation_name(1), directory / generation_name(9))
    store = CheckpointStore(directory)
    assert store.latest().step == 2
    restored = store.restore(a_run(0))
    assert restored.step == 2 and "holds step 1" in restored.skipped[0][1]


def test_another_experiment_never_falls_back(directory):
    with CheckpointStore(directory) as store:
        store.save(a_run(1))
        store.save(a_run(2, width=7))
        with pytest.raises(CheckpointMismatchError, match="width: checkpoint 7, requested 6"):
            store.restore(a_run(0))
        assert [g.step for g in store.generations()] == [1, 2] and store.names().count(LOCK_NAME) == 1


def test_an_unknown_layout_never_falls_back(directory, monkeypatch):
    from fault_tolerant_transformer_lab import checkpoint_file

    store_with(directory, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file, "SCHEMA_VERSION", 99)
        store_with(directory, 2)
    store = CheckpointStore(directory)
    for attempt in (lambda: store.restore(a_run(0)), store.latest):
        with pytest.raises(UnknownSchemaError):
            attempt()
    assert [g.step for g in store.generations()] == [1, 2]


def test_one_chosen_step_has_no_substitute(directory):
    store_with(directory, 1, 2, 3, keep_last=5)
    store = CheckpointStore(directory)
    assert store.restore(a_run(0), step=2).step == 2
    with pytest.raises(NoCheckpointError, match=r"no checkpoint of step 4; it holds: 1, 2, 3") as caught:
        store.restore(a_run(0), step=4)
    assert not caught.value.empty
    damage(directory / generation_name(2))
    with pytest.raises(CheckpointCorruptError):
        store.restore(a_run(0), step=2)


def test_nothing_there_and_nothing_usable_are_told_apart(directory):
    store = CheckpointStore(directory)
    with pytest.raises(NoCheckpointError, match="start from step 0") as caught:
        store.restore(a_run(0))
    assert caught.value.empty and store.is_empty() and store.latest() is None
    store_with(directory, 1, 2)
    for step in (1, 2):
        (directory / generation_name(step)).write_bytes(b"")
    with store, pytest.raises(NoCheckpointError, match="none can be used") as caught:
        store.restore(a_run(0))
    assert not caught.value.empty and len(caught.value.reasons) == 2 and store.latest() is None
    assert [g.step for g in store.generations()] == [1, 2], "with nothing better, the names stay"
    for step in (1, 2):
        (directory / generation_name(step)).rename(directory / f"{generation_name(step)}.corrupt")
    with pytest.raises(NoCheckpointError, match="set aside earlier") as caught:
        store.restore(a_run(0))
    assert not caught.value.empty and not store.is_empty()


def test_a_folder_that_several_ranks_wrote_is_named_with_what_to_do(directory):
    store = CheckpointStore(directory)
    (directory / "step-00000008").mkdir(parents=True)
    with pytest.raises(NoCheckpointError, match="step-00000008: several ranks wrote it.*as many ranks") as caught:
        store.restore(a_run(0))
    assert not caught.value.empty and caught.value.reasons == ((directory / "step-00000008", "several ranks wrote it"),)
    store_with(directory, 1)
    (directory / generation_name(1)).write_bytes(b"")
    with pytest.raises(NoCheckpointError, match="several ranks wrote it.*put a sound copy back"):
        store.restore(a_run(0))


def test_a_lone_temporary_and_the_lock_are_no_checkpoint(directory):
    store_with(directory)
    (directory / f".{generation_name(4)}.tmp").write_bytes(b"half")
    (directory / "notes.txt").write_text("somebody's")
    assert CheckpointStore(directory).is_empty()
    store_with(directory)
    assert sorted(contents(directory)) == ["notes.txt"]


def test_a_generation_that_vanishes_while_reading_is_looked_up_again(directory, monkeypatch):
    store_with(directory, 1, 2)
    real, lost = publication.open_checkpoint, []

    def overtaken(path):
        if not lost:
            lost.append(path)
            store_with(directory, 3, 4)  # retention removes what was about to be read
        return real(path)

    monkeypatch.setattr(publication, "open_checkpoint", overtaken)
    restored = CheckpointStore(directory).restore(a_run(0))
    assert lost[0].name == generation_name(2) and restored.step == 4 and restored.skipped == ()


def test_what_was_restored_from_stays_until_something_newer_is_published(directory):
    store_with(directory, 1, 2, 3, keep_last=5)
    for step in (2, 3):
        (directory / generation_name(step)).write_bytes(b"")
    with CheckpointStore(directory, keep_last=1) as store:
        store.restore(a_run(0))
        store.save(a_run(1))  # the same step again: still the only one
        assert [g.step for g in store.generations()] == [1]
        store.save(a_run(2))
        assert [g.step for g in store.generations()] == [2]


def test_a_refusal_by_the_system_is_no_damage_and_does_not_fall_back(directory, monkeypatch):
    store_with(directory, 1, 2)
    store = CheckpointStore(directory)

    def refuse(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(publication, "open_checkpoint", refuse)
    monkeypatch.setattr(publication, "verify", refuse)
    for attempt in (lambda: store.restore(a_run(0)), store.latest):
        with pytest.raises(PublicationError, match=r"read .*/checkpoints/step-00000002.*EMFILE.*ulimit -n"):
            attempt()


def test_copies_with_other_timestamps_restore_the_same(directory, tmp_path):
    store_with(directory, 1, 2)
    shutil.copytree(directory, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / generation_name(1), (2**31, 2**31))
    os.utime(tmp_path / "copy" / generation_name(2), (0, 0))
    assert CheckpointStore(tmp_path / "copy").restore(a_run(0)).step == 2


# Going back, and the same step again


def test_a_step_below_the_newest_is_refused_with_the_way_out(directory):
    store_with(directory, 1, 5)
    before = contents(directory)
    with CheckpointStore(directory) as store, pytest.raises(CheckpointError, match="step 3.*existing step 5.*rewind"):
        store.save(a_run(3))
    assert contents(directory) == before


def moved(step):
    "The run of a step with one bit of work more."
    contract = a_run(step)
    with torch.no_grad():
        contract.participants["model"].weight.add_(1)
    return contract


def test_the_same_step_with_another_state_is_refused_and_the_published_one_stays(directory):
    store_with(directory, 2, 4)
    before = contents(directory)
    with CheckpointStore(directory) as store:
        with pytest.raises(CheckpointError, match="checkpoints/step-00000004.*nothing was replaced.*rewind.*another"):
            store.save(moved(4))
        assert contents(directory) == before
        store.rewind(2)  # the remedy that the message names
        store.save(moved(4))
    assert [g.step for g in store.generations()] == [2, 4]


def test_the_same_state_is_published_again_with_the_lineage_that_it_has_now(directory):
    store_with(directory, 4)
    with CheckpointStore(directory) as store:
        again = a_run(0)
        store.restore(again)  # one segment more
        published = store.save(again)
    assert list(contents(directory)) == [generation_name(4)]
    assert len(read_manifest(published.path).lineage) == 2
    assert published.state_digest == state_digest(a_run(4).capture())


@pytest.mark.parametrize("at", [-50, 200, None], ids=["data", "header", "another step's file"])
def test_a_damaged_file_of_the_same_step_may_be_replaced(directory, at):
    store_with(directory, 4)
    path = directory / generation_name(4)
    if at is None:
        store_with(directory.parent / "other", 3)
        path.write_bytes((directory.parent / "other" / generation_name(3)).read_bytes())
    else:
        damage(path, at)
    with CheckpointStore(directory) as store:
        store.save(moved(4))
    assert store.latest().step == 4


def test_rewind_sets_later_ones_aside_durably_and_deletes_none(directory):
    store_with(directory, 1, 2, 3, keep_last=9)
    before = contents(directory)
    disk = RecordingDisk()
    with CheckpointStore(directory, keep_last=9, disk=disk) as store:
        n = len(disk.records)
        aside = store.rewind(1)
        assert [r.name for r in disk.records[n:]] == ["list_names", "replace", "replace", "sync_directory"]
        store.save(a_run(2))
        again = store.rewind(1)
    assert [path.name for path in aside] == [f"{generation_name(3)}.rewound", f"{generation_name(2)}.rewound"]
    assert [path.name for path in again] == [f"{generation_name(2)}.rewound-2"]
    assert aside[0].read_bytes() == before[generation_name(3)]
    assert [g.step for g in store.generations()] == [1]


def test_rewind_to_what_is_missing_or_damaged_changes_nothing(directory):
    store_with(directory, 1, 2, 3, keep_last=9)
    damage(directory / generation_name(1))
    before = contents(directory)
    with CheckpointStore(directory) as store:
        with pytest.raises(NoCheckpointError, match="it holds: 1, 2, 3"):
            store.rewind(7)
        with pytest.raises(CheckpointCorruptError):
            store.rewind(1)
    assert contents(directory) == before
    with pytest.raises(CheckpointError, match="needs its lock"):
        store.rewind(2)


# One writer


def hold(directory, before_pause=lambda: ()):
    """A process of its own that holds the lock: its number, and those of the processes it started."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with CheckpointStore(directory):
                started = before_pause()
                os.write(writing, " ".join(map(str, (os.getpid(), *started))).encode() + b"\n")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        holder, *started = map(int, said.readline().split())
    assert holder == child
    return child, started


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_writer_is_refused_by_name_and_a_dead_one_is_no_obstacle(directory):
    holder, _ = hold(directory)
    with pytest.raises(CheckpointLockedError) as caught, CheckpointStore(directory):
        pass
    assert caught.value.pid == holder and caught.value.host == os.uname().nodename
    assert str(holder) in str(caught.value) and caught.value.started[:4].isdigit()
    assert CheckpointStore(directory).is_empty(), "readers need no lock"
    end(holder)
    assert store_with(directory, 1).latest().step == 1


def test_children_of_the_holder_keep_no_lock(directory):
    "A forked worker and a started program outlive the holder; neither stops the next writer."
    def start():
        child = os.fork()
        if child == 0:
            signal.pause()
        return child, subprocess.Popen(["sleep", "30"], close_fds=False).pid

    holder, orphans = hold(directory, start)
    end(holder)
    try:
        for pid in orphans:
            os.kill(pid, 0)  # alive
        assert store_with(directory, 1).latest().step == 1
    finally:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)


def test_a_child_that_python_did_not_fork_keeps_no_lock_after_an_orderly_end(directory):
    "C's own fork runs no hook of Python's, so that child holds a copy until it ends; leaving the store unlocks it."
    libc = ctypes.CDLL(None)
    with CheckpointStore(directory):
        child = libc.fork()
        if child == 0:
            libc.pause()
            os._exit(0)
    try:
        assert store_with(directory, 1).latest().step == 1
    finally:
        end(child)


def test_a_run_that_outlives_its_launcher_is_named(directory):
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        try:
            run, _ = hold(directory)
            os.write(writing, f"{run}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        orphan = int(said.readline())
    end(launcher)
    with pytest.raises(CheckpointLockedError) as caught, CheckpointStore(directory):
        pass
    assert caught.value.pid == orphan
    os.kill(orphan, signal.SIGKILL)
    for _ in range(200):  # it is not our child: wait until the kernel has let go
        try:
            assert store_with(directory, 1).latest().step == 1
            break
        except CheckpointLockedError:
            time.sleep(0.02)
    else:
        pytest.fail("the lock outlived its holder")


def test_the_number_of_a_dead_holder_that_lives_again_does_not_fool_the_lock(directory):
    store_with(directory, 1)
    (directory / LOCK_NAME).write_text(json.dumps({"pid": os.getppid(), "host": os.uname().nodename, "started": "x"}))
    assert store_with(directory, 2).latest().step == 2


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff" * 10])
def test_a_holder_without_a_readable_name_is_refused_all_the_same(directory, text):
    with CheckpointStore(directory):
        (directory / LOCK_NAME).write_bytes(text)
        with pytest.raises(CheckpointLockedError, match="another process") as caught, CheckpointStore(directory):
            pass
    assert caught.value.pid is None


def test_writing_needs_the_lock_and_a_forked_child_has_none(directory):
    with pytest.raises(CheckpointError, match="needs its lock.*`with` block"):
        CheckpointStore(directory).save(a_run(1))
    with CheckpointStore(directory) as store:
        def child():
            with pytest.raises(CheckpointError, match="forked child"):
                store.save(a_run(1))
            with pytest.raises(CheckpointLockedError), CheckpointStore(directory):
                pass
            os.kill(os.getpid(), signal.SIGUSR1)

        assert in_child(child) == signal.SIGUSR1
        store.save(a_run(1))  # the parent's lock is whole
        with pytest.raises(CheckpointError, match="enter it once"), store:
            pass
        with pytest.raises(CheckpointLockedError), CheckpointStore(directory):
            pass
        store.save(a_run(2))
    with store:
        store.save(a_run(3))


def test_readers_beside_a_busy_writer_always_find_something_whole(directory):
    "A child saves as fast as it can; every restore here succeeds, and steps never go back."
    store_with(directory, 1)

    def write():
        with CheckpointStore(directory, keep_last=1) as store:
            for step in range(2, 200):
                store.save(a_run(step))
            os.kill(os.getpid(), signal.SIGUSR1)

    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            os._exit(1)
    steps, reader = [], CheckpointStore(directory)
    try:
        while not steps or steps[-1] < 40:
            restored = reader.restore(a_run(0))
            assert restored.skipped == ()
            steps.append(restored.step)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps == sorted(steps) and len(set(steps)) > 1


# Hostile directories


def test_links_in_a_checkpoints_place_are_refused_and_not_followed(directory, tmp_path):
    store_with(directory, 1)
    outside = tmp_path / "outside"
    outside.write_bytes((directory / generation_name(1)).read_bytes())
    (directory / generation_name(2)).symlink_to(outside)
    store = CheckpointStore(directory)
    for attempt in (store.latest, lambda: store.restore(a_run(0))):
        with pytest.raises(CheckpointError, match="symbolic link.*only regular files"):
            attempt()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_what_is_no_file_in_a_checkpoints_place_is_refused_at_once(directory, make):
    store_with(directory, 1)
    make(directory / generation_name(2))
    with pytest.raises(CheckpointError, match="not a regular file"):
        CheckpointStore(directory).restore(a_run(0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_checkpoint_of_another_user_is_refused_and_one_of_the_directorys_owner_is_not(directory):
    store_with(directory, 1, 2)
    os.chown(directory / generation_name(2), 12345, -1)
    store = CheckpointStore(directory)
    for attempt in (store.latest, lambda: store.restore(a_run(0))):
        with pytest.raises(CheckpointError, match="belongs to another user .uid 12345"):
            attempt()
    os.chown(directory, 12345, -1)
    assert store.restore(a_run(0)).step == 2


def test_a_link_planted_at_the_temporary_name_is_refused_and_its_target_untouched(directory, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    store_with(directory, 1)
    temporary = directory / f".{generation_name(2)}.tmp"
    temporary.symlink_to(outside)
    with pytest.raises(CheckpointError, match="not a regular file"), CheckpointStore(directory):
        pass

    class Planting(Disk):
        "Plants the link at the last moment, between the clean-up and the creation."

        def operation(self, name, path, call):
            if name == "create":
                temporary.symlink_to(outside)
            return call()

    temporary.unlink()
    with CheckpointStore(directory, disk=Planting()) as store, pytest.raises(PublicationError, match="EEXIST"):
        store.save(a_run(2))
    assert outside.read_text() == "precious" and temporary.is_symlink()


@pytest.mark.parametrize("plant", ["link", "hard link", "fifo", "directory"])
def test_a_lock_file_that_is_something_else_is_refused_and_nothing_outside_is_written(directory, tmp_path, plant):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    directory.mkdir()
    lock = directory / LOCK_NAME
    {"link": lambda: lock.symlink_to(outside), "hard link": lambda: lock.hardlink_to(outside),
     "fifo": lambda: os.mkfifo(lock), "directory": lock.mkdir}[plant]()
    with pytest.raises(CheckpointError, match="symbolic link|regular file|EISDIR"), CheckpointStore(directory):
        pass
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("spelled", ["{}", "{}/", "{}/."])
def test_a_linked_directory_is_refused_for_writing_and_for_reading(directory, tmp_path, spelled):
    real = tmp_path / "real"
    with CheckpointStore(real) as store:
        store.save(a_run(1))
    directory.symlink_to(real)
    for kind in (CheckpointStore, Generations):
        with pytest.raises(CheckpointError, match=r"symbolic link.*name the directory itself \(real/\)"):
            kind(spelled.format(directory))
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="symbolic link"):
        CheckpointStore(dangling)


def test_a_directory_exchanged_for_a_link_is_not_read(directory, tmp_path):
    with CheckpointStore(directory) as store:
        store.save(a_run(1))
    reader = Generations(directory)
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    for look in (reader.generations, reader.latest, lambda: store.restore(a_run(1))):
        with pytest.raises(CheckpointError, match="symbolic link"):
            look()


def test_links_above_a_store_are_resolved_once_and_later_exchanges_change_nothing(directory, tmp_path):
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    other.mkdir()
    directory.symlink_to(real)  # the run's folder, on another disk
    with CheckpointStore(directory / "checkpoints") as store:
        store.save(a_run(1))
        directory.unlink()
        directory.symlink_to(other)
        store.save(a_run(2))
        real.rename(tmp_path / "moved")
        real.symlink_to(other)
        store.disk.unlink(store._writable(), generation_name(1))
    assert list(other.iterdir()) == []
    assert sorted(contents(tmp_path / "moved/checkpoints")) == [generation_name(2)]


def test_a_store_exchanged_for_a_link_before_it_is_opened_is_refused(directory, tmp_path):
    directory.mkdir()
    store = CheckpointStore(directory)
    directory.rmdir()
    directory.symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    with pytest.raises(PublicationError, match="open_directory.*ENOTDIR.*link is never followed"), store:
        pass
    assert list((tmp_path / "other").iterdir()) == []


def test_a_link_at_a_small_files_name_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / "result.json").symlink_to(outside)
    write_atomically(tmp_path / "result.json", b"{}")
    assert outside.read_text() == "precious" and not (tmp_path / "result.json").is_symlink()


@pytest.mark.parametrize("which", ["store", "parent"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_is_warned_about(tmp_path, which, mode):
    directory = tmp_path / "run" / "checkpoints"
    store_with(directory, 1)
    target = directory if which == "store" else directory.parent
    target.chmod(mode)
    with pytest.warns(UserWarning, match=rf"{target.name}/ can be written by others \(mode 0{mode:o}\)"):
        store_with(directory, 2)
    target.chmod(mode | stat.S_ISVTX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store_with(directory, 3).latest().step == 3  # sticky: only owners can rename and delete


def test_a_file_in_the_directorys_place_is_an_error_with_a_remedy(directory):
    directory.write_text("a file")
    with pytest.raises(PublicationError, match="ENOTDIR.*not a directory"), CheckpointStore(directory):
        pass
    with pytest.raises(PublicationError, match="ENOTDIR"):
        CheckpointStore(directory).generations()


@pytest.mark.parametrize("below", ["checkpoints", "deep/er/checkpoints"])
def test_a_file_above_the_directory_is_named_and_not_the_path_that_cannot_exist(tmp_path, below):
    (tmp_path / "output").write_text("a file")
    store = CheckpointStore(tmp_path / "output" / below)
    for use in (store.generations, store.__enter__, lambda: write_atomically(tmp_path / "output" / below / "a", b"")):
        with pytest.raises(PublicationError, match="ENOTDIR") as caught:
            use()
        assert "output is a file and not a directory: choose another directory" in str(caught.value)
        assert "remove it" not in str(caught.value)
    assert (tmp_path / "output").read_text() == "a file"


@pytest.mark.skipif(sys.platform != "linux", reason="there is a /proc")
def test_where_the_system_makes_no_directory_another_one_is_the_remedy():
    with pytest.raises(PublicationError, match="nothing can be made in proc/: choose another directory") as caught:
        CheckpointStore("/proc/no-such-run/checkpoints").__enter__()
    assert "put it back" not in str(caught.value)


def test_a_directory_that_was_deleted_meanwhile_is_told_as_that(directory):
    with CheckpointStore(directory) as store:
        shutil.rmtree(directory)
        with pytest.raises(CheckpointError, match="moved or deleted"):
            store.save(a_run(1))


def test_a_directory_that_was_moved_is_not_written_and_a_rival_in_its_place_is_left_alone(directory, tmp_path):
    with CheckpointStore(directory, keep_last=2) as first:
        first.save(a_run(1))
        first.save(a_run(2))
        directory.rename(tmp_path / "moved")
        with pytest.raises(CheckpointError, match="moved or deleted"):
            first.save(a_run(3))
        with CheckpointStore(directory, keep_last=4) as second:
            for step in (1, 2, 3, 4):
                second.save(a_run(step))
        before = contents(directory), contents(tmp_path / "moved")
        for wait in (True, False):
            with pytest.raises(CheckpointError, match="moved or deleted"):
                first.save(a_run(5), wait=wait)
        assert (contents(directory), contents(tmp_path / "moved")) == before


def test_what_does_not_look_sound_under_a_later_step_stops_no_save(directory):
    with CheckpointStore(directory) as store:
        store.save(a_run(1))
        (directory / generation_name(50)).touch(0o600)
        assert store.save(a_run(2)).step == 2 and store.save(a_run(2)).step == 2
        with pytest.raises(CheckpointError, match="published with state"):
            changed = a_run(2)
            with torch.no_grad():
                changed.participants["model"].weight.add_(1)
            store.save(changed)
    with CheckpointStore(directory) as store:
        restored = store.restore(fresh := a_run(0))
        assert restored.step == fresh.step == 2 and [path.name for path, _ in restored.skipped] == [generation_name(50)]


@pytest.mark.parametrize("name", ["step-00000004", "step-00000004.corrupt", "step-00000004.rewound-2"])
def test_a_folder_that_several_ranks_wrote_is_no_empty_store(directory, name):
    (directory / name).mkdir(parents=True)
    assert not Generations(directory).is_empty()


def test_a_checkpoint_with_a_second_name_is_not_read(directory, tmp_path):
    with CheckpointStore(directory) as store:
        store.save(a_run(1))
        (tmp_path / "outside").hardlink_to(directory / generation_name(1))
        with pytest.raises(CheckpointError, match=r"has 2 names \(hard links\).*copy it"):
            store.restore(a_run(0))
        (tmp_path / "outside").unlink()
        assert store.restore(a_run(0)).step == 1


@pytest.mark.parametrize("exchange", [lambda lock: None, Path.touch, lambda lock: lock.symlink_to("elsewhere")],
                         ids=["removed", "exchanged", "a link"])
def test_a_lock_file_that_is_taken_away_stops_its_holder_before_it_writes(directory, exchange):
    with CheckpointStore(directory) as store:
        store.save(a_run(1))
        store.save(a_run(2))
        (directory / LOCK_NAME).unlink()
        exchange(directory / LOCK_NAME)
        before = contents(directory)
        for attempt in (lambda: store.save(a_run(3)), lambda: store.rewind(1)):
            with pytest.raises(CheckpointError, match=r"\.lock was removed or exchanged while this process held it"):
                attempt()
        assert contents(directory) == before


def test_a_second_writer_that_a_removed_lock_let_in_is_alone_afterwards(directory):
    with CheckpointStore(directory) as first:
        first.save(a_run(1))
        (directory / LOCK_NAME).unlink()
        with CheckpointStore(directory) as second:
            with pytest.raises(CheckpointError, match="another process may write here"):
                first.save(a_run(2))
            assert second.save(a_run(2)).step == 2


@pytest.mark.parametrize("path, told", [
    ("/a/b/run/checkpoints/.x.tmp", "run/checkpoints/.x.tmp"), ("/a/run/checkpoints", "run/checkpoints"),
    ("/a/b/c/d", "c/d"), ("run", "run"), ("/run", "run"), ("/", "/"), ("checkpoints/x", "checkpoints/x"),
    ("/checkpoints", "checkpoints"), ("/a/checkpoints/checkpoints/x", "a/checkpoints/checkpoints/x")])
def test_a_place_is_told_with_its_run(path, told):
    assert place_of(Path(path)) == told


def test_errors_of_a_resume_name_the_run_and_not_only_its_folder_of_checkpoints(directory):
    run = f"{directory.parent.name}/checkpoints/"
    for use in (lambda: CheckpointStore(directory).restore(a_run(0)),
                lambda: CheckpointStore(directory).save(a_run(1))):
        with pytest.raises(CheckpointError, match=re.escape(run)):
            use()
    store_with(directory, 1)
    with pytest.raises(NoCheckpointError, match=re.escape(run)):
        CheckpointStore(directory).restore(a_run(0), step=7)
    (directory / generation_name(1)).write_bytes(b"")
    with pytest.raises(NoCheckpointError, match=re.escape(run)):
        CheckpointStore(directory).restore(a_run(0))
    with CheckpointStore(directory), pytest.raises(CheckpointLockedError, match=re.escape(run)):
        CheckpointStore(directory).__enter__()


# Small files


def test_two_writers_of_one_small_file_never_mix(tmp_path):
    path = tmp_path / "result.json"
    texts = [bytes([65 + i]) * (4000 + i) for i in range(3)]

    def write(text):
        for _ in range(30):
            try:
                write_atomically(path, text)
            except PublicationError as error:
                assert error.errno == errno.ENOENT

    children = []
    for text in texts:
        child = os.fork()
        if child == 0:
            try:
                write(text)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    write_atomically(path, texts[0])
    while children:
        assert path.read_bytes() in texts
        done, status = os.waitpid(children[0], os.WNOHANG)
        if done:
            assert status == 0
            children.pop(0)
    write_atomically(path, b"last")
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_writer_in_the_middle_is_not_robbed_of_its_temporary(tmp_path):
    path, (going, go), (saying, say) = tmp_path / "result.json", os.pipe(), os.pipe()

    class Waiting(Disk):
        def operation(self, name, path, call):
            if name == "fsync":
                os.write(say, b"x")
                os.read(going, 1)
            return call()

    def slow():
        write_atomically(path, b"slow", Waiting())
        os.kill(os.getpid(), signal.SIGUSR1)

    child = os.fork()
    if child == 0:
        try:
            slow()
        finally:
            os._exit(1)
    os.read(saying, 1)
    write_atomically(path, b"quick")
    assert path.read_bytes() == b"quick" and len(list(tmp_path.glob(".*.tmp"))) == 1
    os.write(go, b"x")
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1, "it came to its end without an error"
    assert path.read_bytes() == b"slow" and [p.name for p in tmp_path.iterdir()] == ["result.json"]
    for fd in (going, go, saying, say):
        os.close(fd)


def test_a_small_file_makes_its_directories_durable(tmp_path):
    disk = RecordingDisk()
    write_atomically(tmp_path / "a" / "b" / "x.json", b"{}", disk)
    done = [(r.name, r.path.name) for r in disk.records if r.name in ("make_directory", "sync_directory")]
    assert done[1:] == [("make_directory", "a"), ("sync_directory", tmp_path.name), ("make_directory", "b"),
                        ("sync_directory", "a"), ("sync_directory", "b")]


# Platforms


def test_without_flock_the_module_imports_and_the_store_says_why(tmp_path):
    code = """
        import sys
        sys.modules["fcntl"] = None
        from fault_tolerant_transformer_lab.publication import CheckpointStore, CheckpointError, write_atomically
        for attempt in (lambda: CheckpointStore("x"), lambda: write_atomically("x/y", b"")):
            try: attempt()
            except CheckpointError as error: print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
                          cwd=tmp_path)
    assert done.stdout.count("Linux and macOS only") == 2 and not list(tmp_path.iterdir())


def test_on_macos_a_sync_is_a_full_sync(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(publication.sys, "platform", "darwin")
    monkeypatch.setattr(publication.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(publication.fcntl, "fcntl", lambda fd, command: asked.append(command))
    write_atomically(tmp_path / "x", b"1")
    assert asked == [51, 51]  # the file and the directory


def test_importing_registers_nothing(tmp_path):
    code = """
        import os
        import fault_tolerant_transformer_lab.checkpoint_file  # torch and the standard library register their own
        os.register_at_fork = lambda **hooks: print("registered")
        import fault_tolerant_transformer_lab.publication as publication
        print("imported")
        with publication.CheckpointStore("store"): pass
        with publication.CheckpointStore("store"): pass
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
                          cwd=tmp_path)
    assert done.stdout.split() == ["imported", "registered"]


def test_random_kills_of_a_saving_child_lose_nothing(directory):
    "Real time, real SIGKILL: wherever it lands, the newest acknowledged step or a later one is there."
    generator = random.Random(5)
    for _ in range(12):
        reading, writing = os.pipe()

        def work(writing=writing):
            with CheckpointStore(directory) as store:
                latest = store.latest()
                for step in range(latest.step + 1 if latest else 1, 10**6):
                    store.save(a_run(step))
                    os.write(writing, f"{step}\n".encode())

        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(1)
        os.close(writing)
        first = os.read(reading, 100)
        assert first, "the child saved at least once"
        time.sleep(generator.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = first
        while more := os.read(reading, 65536):
            said += more
        os.close(reading)
        acknowledged = int(said.split()[-1])
        assert Generations(directory).latest().step in (acknowledged, acknowledged + 1)
        assert CheckpointStore(directory).restore(a_run(0)).skipped == ()
    assert diff(*[g.path for g in Generations(directory).generations()][-2:])  # and they are different states


class Exchanging(Disk):
    "Moves the store away once, before or after an operation of a given name, and puts another in its place."

    def __init__(self, operation, store, rival, *, before=False):
        super().__init__()
        self.at, self.store, self.rival, self.before, self.armed = operation, store, rival, before, False

    def exchange(self):
        self.armed = False
        self.store.rename(self.store.parent / "moved")
        if self.rival is not None:
            self.rival.rename(self.store)

    def operation(self, name, path, call):
        now = self.armed and name == self.at
        if now and self.before:
            self.exchange()
        result = super().operation(name, path, call)
        if now and not self.before:
            self.exchange()
        return result


@pytest.mark.parametrize("rival", [True, False], ids=["a rival in its place", "nothing in its place"])
@pytest.mark.parametrize("operation, before", [("replace", True), ("replace", False), ("sync_directory", False)])
def test_a_store_exchanged_between_publication_and_retention_loses_nothing(
        directory, tmp_path, operation, before, rival):
    other = tmp_path / "other"
    if rival:
        store_with(other, 2, 3, 4, keep_last=5)
    theirs = contents(other) if rival else None
    disk = Exchanging(operation, directory, other if rival else None, before=before)
    with CheckpointStore(directory, keep_last=1, disk=disk) as store:
        store.save(a_run(1))
        disk.armed = True
        told = "is published and durable in the directory that was held.*no older one was removed"
        with pytest.raises(CheckpointError, match=rf"moved or deleted\).*{generation_name(2)} {told}"):
            store.save(a_run(2))
    assert sorted(contents(tmp_path / "moved")) == [generation_name(1), generation_name(2)]
    assert not rival or contents(directory) == theirs


def test_retention_never_removes_what_was_published_just_now(directory, monkeypatch):
    monkeypatch.setattr(publication, "_outdated", lambda found, *how: [g.step for g in found])
    assert store_with(directory, 1, 2).latest().step == 2
    assert sorted(contents(directory)) == [generation_name(2)]


@pytest.mark.parametrize("keep_every", [None, 2], ids=["all go", "an older one stays"])
def test_a_reader_that_retention_outran_looks_again(directory, monkeypatch, keep_every):
    store_with(directory, 2, 3, keep_last=2)
    read = publication._verify

    def outrun(generation):  # between the reader's list and its first file
        monkeypatch.setattr(publication, "_verify", read)
        store_with(directory, 5, 7, keep_last=1, keep_every=keep_every)
        read(generation)

    monkeypatch.setattr(publication, "_verify", outrun)
    assert Generations(directory).latest().step == 7
    assert sorted(contents(directory)) == [generation_name(2)] * bool(keep_every) + [generation_name(7)]


def test_where_the_system_has_fewer_errors_the_module_is_imported_all_the_same():
    code = "import errno; del errno.EUCLEAN; import fault_tolerant_transformer_lab.publication"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_store_exchanged_while_a_rewind_reads_sets_nothing_aside(directory, tmp_path, monkeypatch):
    other = tmp_path / "other"
    store_with(other, 1, 2, 3, keep_last=5)
    theirs = contents(other)
    with CheckpointStore(directory, keep_last=5) as store:
        for step in (1, 2):
            store.save(a_run(step))
        mine, real = contents(directory), publication.verify

        def verify_and_exchange(path):
            found = real(path)
            directory.rename(tmp_path / "moved")
            other.rename(directory)
            return found

        monkeypatch.setattr(publication, "verify", verify_and_exchange)
        with pytest.raises(CheckpointError, match="moved or deleted"):
            store.rewind(1)
    assert contents(tmp_path / "moved") == mine and contents(directory) == theirs


@pytest.mark.parametrize("use", [
    Generations, CheckpointStore, make_directories, lambda path: write_atomically(path / "result.json", b"")],
    ids=["Generations", "CheckpointStore", "make_directories", "write_atomically"])
def test_a_path_that_cannot_be_followed_is_an_error_of_ours(tmp_path, monkeypatch, use):
    (tmp_path / "L").symlink_to("L")
    for path in (tmp_path / "L", tmp_path / "L" / "below"):
        with pytest.raises(CheckpointError, match="symbolic link|not a directory|moved or deleted"), use(path):
            pass
    with pytest.raises(CheckpointError, match="holds a NUL"):
        use(tmp_path / "a\0b")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(PublicationError, match="resolve x: ENOENT.*moved or deleted"):
        use(Path("x"))


@pytest.mark.parametrize("said", [
    b"[" * 4000, b"[]", b'{"pid": 1}', json.dumps({"pid": 1, "host": "h" * 2000, "started": "now"}).encode(),
    json.dumps({"pid": 1, "host": "h\nfttl: all is well", "started": "now"}).encode(), b'{"pid": 1' + b"0" * 60 + b"}"])
def test_what_somebody_else_wrote_into_the_lock_file_is_not_shown(directory, said):
    with CheckpointStore(directory):
        (directory / LOCK_NAME).write_bytes(said)
        with pytest.raises(CheckpointLockedError, match="is locked by another process; wait") as caught:
            CheckpointStore(directory).__enter__()
    assert caught.value.pid is caught.value.host is None


def test_a_directory_in_a_files_place_is_named_and_to_be_removed(directory, tmp_path):
    (directory / LOCK_NAME).mkdir(parents=True)
    with pytest.raises(PublicationError, match=r"open_lock .*checkpoints/\.lock: EISDIR.*remove it"):
        CheckpointStore(directory).__enter__()
    (directory / LOCK_NAME).rmdir()
    (directory / generation_name(1)).mkdir()
    with CheckpointStore(directory) as store, pytest.raises(CheckpointError, match="step-00000001.*remove"):
        store.save(a_run(1))
    (tmp_path / "result.json").mkdir()
    with pytest.raises(PublicationError, match=r"/result\.json: EISDIR.*remove it"):
        write_atomically(tmp_path / "result.json", b"{}")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: socket.socket(socket.AF_UNIX).bind(path)],
                         ids=["FIFO", "socket"])
def test_a_special_file_is_not_replaced(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make("special")
    mode = os.lstat("special").st_mode
    with pytest.raises(CheckpointError, match="special is a device, a FIFO or a socket"):
        write_atomically(tmp_path / "special", b"{}")
    assert os.lstat("special").st_mode == mode and os.listdir(tmp_path) == ["special"]
