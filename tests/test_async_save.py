"""Saves in the background: one moment in every file, no failure lost, no promise of a synchronous save given up."""

import errno
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import forked
import pytest
import torch

from fault_tolerant_transformer_lab.checkpoint_file import encode, state_digest, verify
from fault_tolerant_transformer_lab.contract import CheckpointError, Contract, Progress
from fault_tolerant_transformer_lab.publication import (
    CheckpointStore,
    Disk,
    PublicationError,
    Published,
    RecordingDisk,
    generation_name,
)
from fault_tolerant_transformer_lab.staging import Memory


class Run:
    "A model with a buffer that every forward pass changes, its optimizer, and a counter."

    def __init__(self, width=64, step=0):
        generator = torch.Generator().manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width),
                                         torch.nn.Linear(width, 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.progress = Progress()
        self.batches = generator
        self.contract = Contract(model=self.model, optimizer=self.optimizer, progress=self.progress)
        for _ in range(step):
            self.advance()

    def backward(self):
        x = torch.randn(16, self.model[0].in_features, generator=self.batches)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def advance(self):
        loss = self.backward()
        self.optimizer.step()
        self.progress.record(loss.item(), n_tokens=16)

    def digest(self):
        encoding = encode(self.contract.capture())
        for _ in encoding.chunks():
            pass
        return encoding.manifest.state_digest

    def tensors(self):
        yield from self.model.state_dict().values()
        for state in self.optimizer.state.values():
            yield from state.values()


class GatedDisk(RecordingDisk):
    "Holds every operation of one name back until `open` is set; counts how often it was asked."

    def __init__(self, name="write", where=".tmp"):
        super().__init__()
        self.name, self.where, self.open, self.reached = name, where, threading.Event(), threading.Event()

    def operation(self, name, path, call):
        if name == self.name and path.name.endswith(self.where):
            self.reached.set()
            assert self.open.wait(60)
        return super().operation(name, path, call)


class Failing(Disk):
    "Fails once at the first operation of one name on a temporary file, or on anything."

    def __init__(self, name, code=errno.EIO, where=".tmp"):
        super().__init__()
        self.name, self.code, self.where, self.failed = name, code, where, 0

    def operation(self, name, path, call):
        if name == self.name and not self.failed and str(path).endswith(self.where):
            self.failed += 1
            raise OSError(self.code, os.strerror(self.code))
        return super().operation(name, path, call)


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_process(code, *arguments):
    return forked.run([sys.executable, "-c", textwrap.dedent(code), *arguments], timeout=120)


def test_the_published_state_is_that_of_the_call_though_every_tensor_changes_right_after(directory):
    run, disk = Run(step=3), GatedDisk()
    expected = run.digest()
    with CheckpointStore(directory, disk=disk) as store:
        pending = store.save(run.contract, wait=False)
        assert not pending.done() and pending.step == 3
        with torch.no_grad():
            for tensor in run.tensors():
                tensor.zero_()
        run.progress.record(9.0, n_tokens=1)
        assert disk.reached.wait(60) and store.generations() == []
        disk.open.set()
        published = pending.result()
    assert published == Published(directory / generation_name(3), 3, expected, published.path.stat().st_size)
    assert verify(published.path).state_digest == expected


def test_a_save_in_the_background_writes_the_very_bytes_of_a_synchronous_one(tmp_path):
    run, files = Run(step=2), []
    for name, options in (("a", {}), ("b", {"wait": False}), ("c", {"wait": False, "overlap": True})):
        (tmp_path / name).mkdir(mode=0o700)
        with CheckpointStore(tmp_path / name) as store:
            store.save(run.contract, **options)
        files.append((tmp_path / name / generation_name(2)).read_bytes())
    assert files[0] == files[1] == files[2]


def test_the_next_save_waits_for_the_one_before(directory):
    run, disk = Run(step=1), GatedDisk()
    with CheckpointStore(directory, disk=disk) as store:
        first = store.save(run.contract, wait=False)
        assert disk.reached.wait(60)
        threading.Timer(0.2, disk.open.set).start()
        run.advance()
        store.save(run.contract, wait=False)
        assert first.done() and [g.step for g in store.generations()][:1] == [1]
        store.wait()
        assert [g.step for g in store.generations()] == [1, 2]


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close", "replace"])
@pytest.mark.parametrize("told_by", ["save", "wait", "restore", "rewind", "exit", "result"])
def test_a_failure_in_the_background_is_told_once(directory, operation, told_by):
    run = Run(step=1)
    with CheckpointStore(directory) as store:
        store.save(run.contract)
    run.advance()
    disk = Failing(operation)
    calls = {"save": lambda s, p: s.save(run.contract), "wait": lambda s, p: s.wait(),
             "restore": lambda s, p: s.restore(run.contract), "rewind": lambda s, p: s.rewind(1),
             "result": lambda s, p: p.result(), "exit": lambda s, p: None}
    if told_by == "exit":
        with pytest.raises(PublicationError, match=operation), CheckpointStore(directory, disk=disk) as store:
            store.save(run.contract, wait=False)
    else:
        with CheckpointStore(directory, disk=disk) as store:
            pending = store.save(run.contract, wait=False)
            with pytest.raises(PublicationError, match=operation):
                calls[told_by](store, pending)
            store.wait()  # not told again, here or at exit
    assert disk.failed == 1 and [g.step for g in store.generations()] == [1]
    assert not [name for name in store.names() if name.endswith(".tmp")]


def test_a_failure_in_the_background_does_not_hide_that_of_the_body(directory):
    with pytest.raises(ValueError, match="of the loop") as caught, \
            CheckpointStore(directory, disk=Failing("fsync")) as store:
        store.save(Run(step=1).contract, wait=False)
        raise ValueError("of the loop")
    assert any("fsync" in note for note in caught.value.__notes__)


def test_threads_that_save_take_turns_and_each_file_is_one_state(directory, monkeypatch):
    from fault_tolerant_transformer_lab import staging
    inside, gate, copied = threading.Event(), threading.Event(), staging._Copier.wait

    def wait(copier):  # the first save stops when it has copied, and before anybody knows of it
        if not inside.is_set():
            inside.set()
            assert gate.wait(60)
        copied(copier)

    monkeypatch.setattr(staging._Copier, "wait", wait)
    models = {step: torch.nn.Linear(64, 64) for step in (1, 2)}
    with CheckpointStore(directory) as store:
        saves = [threading.Thread(target=store.save, args=(Contract(model=model), step), kwargs={"wait": False})
                 for step, model in models.items()]
        saves[0].start()
        assert inside.wait(60)
        saves[1].start()
        saves[1].join(0.3)
        assert saves[1].is_alive()
        gate.set()
        for save in saves:
            save.join()
    for step, model in models.items():
        digest = state_digest(Contract(model=model).capture(step=step))
        assert verify(directory / generation_name(step)).state_digest == digest


def test_an_interrupt_at_the_edge_of_a_call_leaves_the_next_one_its_turn(directory):
    "A signal strikes between any two steps of the interpreter, so many are sent; each call but those struck goes well."
    def handler(number, frame):
        raise KeyboardInterrupt

    struck, free = 0, []
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with CheckpointStore(directory) as store:
            for _ in range(400):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-5)
                    while True:
                        store.wait()
                except KeyboardInterrupt:
                    struck += 1
                store.wait()  # refused for ever, where the turn was never given back
            other = threading.Thread(target=lambda: (store.wait(), free.append(True)))
            other.start()
            other.join(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert struck == 400 and free == [True]


def test_leaving_the_store_waits_for_a_thread_that_saves(directory):
    disk, saved = GatedDisk(), []
    run = Run(step=1)
    with CheckpointStore(directory, disk=disk) as store:
        saver = threading.Thread(target=lambda: saved.append(store.save(run.contract)))
        saver.start()
        assert disk.reached.wait(60)
        threading.Timer(0.3, disk.open.set).start()
    saver.join()
    assert [published.step for published in saved] == [1]


@pytest.mark.parametrize("options", [{}, {"wait": False}, {"wait": False, "overlap": True}])
@pytest.mark.parametrize("call", ["save", "wait", "restore", "rewind"])
def test_a_signal_handler_in_the_middle_of_a_save_is_refused_and_the_save_goes_on(
        directory, monkeypatch, options, call):
    from fault_tolerant_transformer_lab import publication
    run, refused, take = Run(step=1), [], publication.encode if not options else publication.Encoding
    calls = {"save": lambda: store.save(run.contract), "wait": lambda: store.wait(), "rewind": lambda: store.rewind(1),
             "restore": lambda: store.restore(run.contract)}

    def handler(number, frame):
        with pytest.raises(CheckpointError, match="signal handler") as error:
            calls[call]()
        refused.append(error)

    def struck(snapshot):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return take(snapshot)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with CheckpointStore(directory) as store:
            store.save(run.contract)
            run.advance()
            expected = run.digest()
            monkeypatch.setattr(publication, take.__name__, struck)
            store.save(run.contract, **options)
            assert len(refused) == 1
            store.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert verify(directory / generation_name(2)).state_digest == expected


def test_nothing_is_published_when_the_lock_was_taken_away_meanwhile(directory):
    run, disk = Run(step=1), GatedDisk()
    with pytest.raises(CheckpointError, match="removed or exchanged"), CheckpointStore(directory, disk=disk) as store:
        store.save(run.contract, wait=False)
        assert disk.reached.wait(60)
        (directory / ".lock").unlink()
        disk.open.set()
    assert store.generations() == []


# The hidden snapshot


@pytest.fixture
def held_copy(monkeypatch):
    "Lets the background copy begin only when the event is set."
    from fault_tolerant_transformer_lab import staging
    gate, copy_rest = threading.Event(), staging.Staged.copy_rest

    def held(self):
        assert gate.wait(60)
        copy_rest(self)

    monkeypatch.setattr(staging.Staged, "copy_rest", held)
    yield gate
    gate.set()


def test_forward_and_backward_go_on_while_parameters_wait_to_be_copied(directory, held_copy):
    run = Run(step=3)
    expected = run.digest()
    with CheckpointStore(directory) as store:
        pending = store.save(run.contract, wait=False, overlap=True)
        run.backward()  # changes the batch norm's buffers, and every gradient
        run.progress.record(9.0, n_tokens=1)
        assert run.digest() != expected
        threading.Timer(0.2, held_copy.set).start()
        before = time.perf_counter()
        run.optimizer.step()  # waits for the copy
        assert time.perf_counter() - before > 0.1
        assert pending.result().state_digest == expected
    assert verify(directory / generation_name(3)).state_digest == expected


def test_a_loop_with_overlapped_saves_is_bitwise_the_loop_without(directory):
    plain, saved, digests = Run(), Run(), []
    with CheckpointStore(directory, keep_last=20) as store:
        for _ in range(8):
            plain.advance()
            saved.advance()
            digests.append(plain.digest())
            store.save(saved.contract, wait=False, overlap=True)
    assert [verify(g.path).state_digest for g in store.generations()] == digests


@pytest.mark.parametrize("change", [
    lambda run: run.model[0].weight.mul_(2), lambda run: run.model[2].bias.data.add_(1),
    lambda run: run.optimizer.state[run.model[0].weight]["exp_avg"].zero_(),
    lambda run: run.model[0].weight.detach().numpy().fill(3), lambda run: run.model[0].weight.view(-1)[5].fill_(3),
], ids=["in place", "through .data, unseen by the version counter", "optimizer state", "through NumPy",
        "in a view"])
def test_a_tensor_changed_behind_the_hook_fails_the_checkpoint_and_not_the_run(directory, held_copy, change):
    run = Run(step=2)
    with CheckpointStore(directory) as store:
        pending = store.save(run.contract, wait=False, overlap=True)
        with torch.no_grad():
            change(run)
        held_copy.set()
        run.advance()
        with pytest.raises(CheckpointError, match="was changed after save"):
            pending.result()
        assert store.generations() == []
        assert store.save(run.contract).step == 3


def scaled_and_skipped(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(run.model(torch.full((4, 64), float("inf"))).sum()).backward()
    scaler.step(run.optimizer)  # gradients that are not finite: this step does not take place
    scaler.update()
    run.advance()


def from_another_thread(run):
    run.backward()
    thread = threading.Thread(target=run.optimizer.step)
    thread.start()
    thread.join()


def exchanged(run):
    parameter = run.model[0].weight
    parameter.data = torch.zeros_like(parameter)  # another tensor; the one that was saved is left as it was
    run.optimizer.state[parameter]["exp_avg"] = torch.ones_like(parameter)
    run.advance()


def failed_backward(run):
    with pytest.raises(RuntimeError, match="shape"):
        run.model(torch.zeros(4, 3))
    run.optimizer.zero_grad(set_to_none=True)
    run.advance()


@pytest.mark.parametrize("body", [scaled_and_skipped, from_another_thread, exchanged, failed_backward])
def test_what_a_loop_may_do_before_its_next_step_does_not_touch_the_hidden_copy(directory, held_copy, body):
    run = Run(step=2)
    expected = run.digest()
    with CheckpointStore(directory) as store:
        pending = store.save(run.contract, wait=False, overlap=True)
        threading.Timer(0.2, held_copy.set).start()
        body(run)
        assert held_copy.is_set(), "a step did not wait"
        assert pending.result().state_digest == expected
    assert run.digest() != expected


@pytest.mark.parametrize("first", [0, 1])
def test_whichever_optimizer_steps_first_waits_for_the_whole_copy(directory, held_copy, first):
    run = Run(step=1)
    both = [torch.optim.LBFGS(run.model[0].parameters(), max_iter=2), torch.optim.SGD(run.model[2].parameters(), lr=1)]
    contract = Contract(model=run.model, lbfgs=both[0], sgd=both[1])

    def closure():
        run.model.zero_grad()
        loss = run.model(torch.ones(4, 64)).square().mean() + run.model[0].weight.square().mean()
        loss.backward()
        return loss

    for optimizer in both:
        optimizer.step(closure)
    with CheckpointStore(directory) as store:
        expected = store.save(contract, step=1).state_digest
        pending = store.save(contract, step=1, wait=False, overlap=True)
        threading.Timer(0.2, held_copy.set).start()
        for optimizer in (both[first], both[1 - first]):
            optimizer.step(closure)
            assert held_copy.is_set(), "a step did not wait"
        assert pending.result().state_digest == expected
        assert store.save(contract, step=2).state_digest != expected


def test_without_the_optimizer_in_the_contract_nothing_is_left_for_later(directory, held_copy):
    run = Run(step=2)
    contract = Contract(model=run.model)
    expected = encode(contract.capture(step=2))
    for _ in expected.chunks():
        pass
    with CheckpointStore(directory) as store:
        pending = store.save(contract, step=2, wait=False, overlap=True)
        with torch.no_grad():
            run.model[0].weight.zero_()
        held_copy.set()
        assert pending.result().state_digest == expected.manifest.state_digest


def test_hooks_do_not_outlive_the_store(directory):
    run = Run(step=1)
    with CheckpointStore(directory) as store:
        store.save(run.contract, wait=False, overlap=True)
        store.wait()
        store.save(Run(step=2).contract, wait=False, overlap=True)
        assert len(run.optimizer._optimizer_step_pre_hooks) == 1
    assert not run.optimizer._optimizer_step_pre_hooks
    run.advance()


def test_saves_in_the_background_copy_into_the_same_memory_until_the_store_is_left(directory):
    run, kept = Run(step=1), []
    with CheckpointStore(directory) as store:
        for overlap in (False, True, False):
            store.save(run.contract, wait=False, overlap=overlap).result()
            kept.append(store._staging._memory._kept)
            run.advance()
    assert kept[0] is not None and kept[0] is kept[1] is kept[2]
    assert store._staging._memory._kept is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="not run: the kernel does not say what is resident")
def test_memory_for_a_copy_exists_before_it_is_copied_into():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, memory = resident(), Memory()
    n_bytes = memory.of(256 << 20).nbytes
    assert resident() - before > 0.9 * n_bytes


def test_without_memory_for_a_copy_a_save_that_waits_still_works(directory):
    done = in_process("""
        import resource, sys
        sys.path.insert(0, sys.argv[2])
        from test_async_save import *
        run = Run(step=1)
        with CheckpointStore(sys.argv[1]) as store:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))
            for overlap in (False, True):
                try:
                    store.save(run.contract, wait=False, overlap=overlap)
                except CheckpointError as error:
                    print(error)
            run.optimizer.step()  # nothing is left that it would wait for
            print(store.save(run.contract).step)
    """, directory, Path(__file__).parent)
    assert done.stdout.count("save with wait=True") == 2 and done.stdout.endswith("\n1\n"), done.stderr


# Processes


SAVE_AND = """
    import os, sys, signal, threading, time
    sys.path.insert(0, sys.argv[2])
    from test_async_save import *
    torch.set_num_threads(1)
    run = Run(step=1)
    disk = GatedDisk({name!r}, {where!r})
    disk.open.set()
    store = CheckpointStore(sys.argv[1], disk=disk)
    store.__enter__()
    store.save(run.contract)
    disk.open.clear(); disk.reached.clear()
    run.advance()
    pending = store.save(run.contract, wait=False, overlap={overlap})
    assert disk.reached.wait(60)
"""


def child(directory, after, name="write", where=".tmp", overlap=False):
    code = textwrap.dedent(SAVE_AND.format(name=name, where=where, overlap=overlap)) + textwrap.dedent(after)
    return forked.run([sys.executable, "-c", code, directory, Path(__file__).parent], timeout=120)


@pytest.mark.parametrize("name, where", [("create", ".tmp"), ("write", ".tmp"), ("fsync", ".tmp"), ("replace", ".tmp")])
def test_sigkill_during_a_background_save_leaves_the_earlier_one(directory, name, where):
    done = child(directory, "os.kill(os.getpid(), signal.SIGKILL)", name, where)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with CheckpointStore(directory) as store:
        assert [g.step for g in store.generations()] == [1] and store.latest().step == 1
        assert not [n for n in store.names() if n.endswith(".tmp")]
        run = Run()
        assert store.restore(run.contract).step == 1
        run.advance()
        assert store.save(run.contract, wait=False).result().step == 2


def test_an_interpreter_that_exits_publishes_what_is_under_way(directory):
    done = child(directory, "threading.Timer(0.3, disk.open.set).start()")
    assert (done.returncode, done.stderr) == (0, "")
    assert verify(directory / generation_name(2)).step == 2


def test_an_interpreter_that_exits_tells_a_failure_that_nobody_collected(directory):
    done = child(directory, """
        (directory := Path(sys.argv[1]) / ".lock").unlink()
        disk.open.set()
    """)
    assert "removed or exchanged" in done.stderr and not (directory / generation_name(2)).exists()


@pytest.mark.parametrize("leave", ["sys.exit(0)", "exit_a_generator()"])
def test_a_program_that_leaves_its_store_early_ends_with_the_failure(directory, leave):
    done = child(directory, f"""
        import contextlib
        def opened():
            with contextlib.ExitStack() as leaving:
                leaving.push(store.__exit__)
                (Path(sys.argv[1]) / ".lock").unlink()
                disk.open.set()
                yield
        def exit_a_generator():
            generator = opened()
            next(generator)
            generator.close()
        if "{leave}" == "exit_a_generator()":
            exit_a_generator()
        with contextlib.ExitStack() as leaving:
            leaving.push(store.__exit__)
            (Path(sys.argv[1]) / ".lock").unlink()
            disk.open.set()
            {leave}
    """)
    assert done.returncode == 1 and "removed or exchanged" in done.stderr, (done.returncode, done.stderr)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_interrupted_as_it_begins_is_not_forgotten(directory, monkeypatch, when):
    run, begin = Run(), threading.Thread.start

    def start(thread):
        if thread.name.startswith("checkpoint-save"):
            monkeypatch.undo()
            if when == "after":
                begin(thread)
            raise KeyboardInterrupt if when == "after" else RuntimeError("can't start new thread")
        begin(thread)

    with CheckpointStore(directory) as store:
        run.advance()
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt if when == "after" else RuntimeError):
            store.save(run.contract, wait=False, overlap=True)
        run.advance()  # waits for the copy, or for none
        assert store.save(run.contract, wait=False).result().step == 2
        assert [g.step for g in store.generations()] == ([1, 2] if when == "after" else [2])


def test_a_forked_child_neither_waits_nor_publishes_nor_tells(directory):
    done = child(directory, """
        def in_child():
            for call in (lambda: store.save(run.contract), lambda: pending.result()):
                try:
                    call()
                except CheckpointError as error:
                    print("refused:", "forked child" in str(error))
            run.advance()  # the hook must not wait for a thread that is not here
            store.__exit__(None, None, None)
        pid = os.fork()
        if pid == 0:
            in_child()
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        disk.open.set()
        print(pending.result().step)
        store.__exit__(None, None, None)
    """, overlap=True)
    assert done.stdout.split() == ["refused:", "True"] * 2 + ["2"], done.stderr
    assert verify(directory / generation_name(2)).step == 2


def test_an_interrupted_exit_stops_the_save_and_gives_the_lock_back_only_then(directory):
    done = child(directory, """
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            disk.open.set()
        threading.Timer(0.2, interrupt).start()
        try:
            store.__exit__(None, None, None)
        except KeyboardInterrupt:
            print("interrupted", pending.done(), sorted(g.step for g in store.generations()))
    """)
    assert done.stdout == "interrupted True [1]\n", done.stderr
