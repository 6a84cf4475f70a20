"""What a durable, digested checkpoint costs: beside its peers, beside bare writes, and as the state grows.

Every way handles the same state in the same process, in rounds whose order rotates, after rounds that are not counted
(imports, pools, first touches of memory, and one in which the peak of memory is taken). Tables give medians, and the
medians of the ratios within a round, because the disk below is shared and noisy. Parts, chosen with `--only`:

    save      a finished checkpoint: ours, torch, safetensors, torch DCP, bare writes with an fsync as the limit
    blocking  how long a training loop stands still: asynchronous and overlapped saves, DCP's, one copy as the limit
    restore   verified and read in place; the limit is a bare read in place and one BLAKE3 pass on one core
    headers   reading and comparing manifests
    ways      bare ways of writing the same bytes, and what each costs with a digest: tried, and most of them lost
    growth    cost against size, number of tensors, and length of the history (minutes; `--max-mb`, `--max-tensors`)

Run on a quiet machine: `python benchmarks/checkpoint_cost.py --mb 1500 --rounds 9`.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from arguments import at_least, chosen_from, folder, record
from blake3 import blake3
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fault_tolerant_transformer_lab.checkpoint_file import byte_view, diff_manifests, read_manifest, verify
from fault_tolerant_transformer_lab.contract import Contract, Progress
from fault_tolerant_transformer_lab.publication import CheckpointStore, Disk

RESULTS = Path(__file__).parent / "results"
CHUNK = 1 << 20
Way = Callable[[], Any]  # its value, where it is a number, is what counts instead of the time that it took


# The state


class Model(torch.nn.Module):
    """Parameters with the shapes of a GPT-2 of twelve layers or so, of about a given number."""

    def __init__(self, n_parameters: int):
        super().__init__()
        d = max(32, round((0.7 * n_parameters / 144) ** 0.5 / 64) * 64)
        layer = {"attention.qkv.weight": (3 * d, d), "attention.qkv.bias": (3 * d,),
                 "attention.projection.weight": (d, d), "attention.projection.bias": (d,),
                 "mlp.up.weight": (4 * d, d), "mlp.up.bias": (4 * d,), "mlp.down.weight": (d, 4 * d),
                 "mlp.down.bias": (d,), "norm_1.weight": (d,), "norm_1.bias": (d,), "norm_2.weight": (d,),
                 "norm_2.bias": (d,)}
        shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (max(256, int(0.3 * n_parameters) // d), d)}
        index, used = 0, shapes["token_embedding.weight"][0] * d
        while used < n_parameters:
            shapes |= {f"blocks.{index}.{name}": shape for name, shape in layer.items()}
            used += sum(torch.Size(shape).numel() for shape in layer.values())
            index += 1
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(filled(shape)))


def filled(shape: tuple[int, ...]) -> torch.Tensor:
    """Make a tensor of noise, cheaply: the noise of one block, again and again."""
    tensor = torch.empty(shape)
    flat = tensor.reshape(-1)
    noise = torch.randn(min(flat.numel(), 1 << 20))
    for begin in range(0, flat.numel(), noise.numel()):
        flat[begin:begin + noise.numel()] = noise[:flat.numel() - begin]
    return tensor


class State:
    """A model and its AdamW as after a step, with the contract that saves them."""

    def __init__(self, n_bytes: int):
        self.model = Model(n_bytes // 12)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0), "exp_avg": filled(parameter.shape), "exp_avg_sq": filled(parameter.shape)}
        self.contract = Contract(model=self.model, optimizer=self.optimizer)
        self.steps = iter(range(1, 1 << 30))

    def plain(self) -> dict[str, Any]:
        """Give the state as torch's own tools take it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """List every tensor under a name of its own."""
        return dict(named_tensors(self.plain(), ""))


def named_tensors(node: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk nested state."""
    if isinstance(node, torch.Tensor):
        yield prefix, node
    elif isinstance(node, dict | list | tuple):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from named_tensors(child, f"{prefix}.{key}" if prefix else str(key))


class Touched:
    """Memory as long as the state that begins on a page and whose pages all exist, and copies into it."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.sources = list(tensors.values())
        self.n_bytes = sum(tensor.nbytes for tensor in self.sources)
        self.area = mmap.mmap(-1, -(-self.n_bytes // CHUNK) * CHUNK)
        with suppress(OSError, AttributeError):
            self.area.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self.area, dtype=torch.uint8).zero_()
        self.places, begin = [], 0
        for tensor in self.sources:
            self.places.append(self.memory[begin:begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            begin += tensor.nbytes

    def touch(self) -> None:
        """Have every page exist, without bringing its content near."""
        self.memory[::mmap.PAGESIZE].add_(1)

    def fill(self) -> None:
        """Copy the state once: the least that a snapshot can cost."""
        for place, source in zip(self.places, self.sources, strict=True):
            place.copy_(source.detach())


# Durable writing by hand: what every way is charged for


def publish(write: Callable[[Path], None], path: Path) -> None:
    """Have a temporary sibling written, sync it, rename it, sync the directory."""
    temporary = path.with_suffix(".tmp")
    write(temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Put a file's bytes, or a directory's names, on the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Bare:
    """Writes given bytes into a file, in one of several ways."""

    def __init__(self, views: list[memoryview], *, direct: bool = False, chunk: int = CHUNK, writers: int = 1,
                 early: int = 0, digest: str = ""):
        self.views, self.direct, self.chunk, self.writers = views, direct, chunk, writers
        self.early = early  # bytes after which writing to the device is started; 0: left to the kernel
        self.digest = digest  # "", "before" the writing, or "beside" it
        self.disk = Disk()

    def parts(self) -> Iterator[tuple[int, memoryview]]:
        """Cut the bytes for the writers."""
        offset = 0
        for view in self.views:
            for begin in range(0, len(view), self.chunk):
                yield offset + begin, view[begin:begin + self.chunk]
            offset += len(view)

    def __call__(self, path: Path) -> None:
        """Write all of them."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if self.direct else 0), 0o600)
        hashing = threading.Thread(target=self.hash_all) if self.digest == "beside" else None
        try:
            if self.digest == "before":
                self.hash_all()
            if hashing:
                hashing.start()
            parts, lock = self.parts(), threading.Lock()
            threads = [threading.Thread(target=self.write_some, args=(fd, parts, lock))
                       for _ in range(self.writers - 1)]
            for thread in threads:
                thread.start()
            self.write_some(fd, parts, lock)
            for thread in (*threads, *([hashing] if hashing else [])):
                thread.join()
        finally:
            os.close(fd)

    def hash_all(self) -> None:
        """Digest every byte, on one core."""
        for view in self.views:
            hasher = blake3()
            for begin in range(0, len(view), 8 * CHUNK):
                hasher.update(view[begin:begin + 8 * CHUNK])
            hasher.digest()

    def write_some(self, fd: int, parts: Iterator[tuple[int, memoryview]], lock: threading.Lock) -> None:
        """Write parts until none is left."""
        begin = end = 0
        while True:
            with lock:
                part = next(parts, None)
            if part is None:
                return
            end = part[0] + os.pwrite(fd, part[1], part[0])
            if self.early and end - begin >= self.early:
                self.disk.start_writeback(fd, begin, end - begin)
                begin = end


# Memory and time


def resident(field: str) -> int:
    """Read a figure of this process's memory from the kernel, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) * 1024


def extra_memory(way: Way) -> int | None:
    """Measure by how many bytes the peak resident set passes what the process held before the call (Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        way()
        return None
    gc.collect()
    with suppress(OSError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier way gave back must not be there for this one
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    way()
    return resident("VmHWM") - before


def measure(ways: dict[str, Way], n_rounds: int, limit: str) -> dict[str, dict[str, Any]]:
    """Time every way in interleaved rounds: one to warm up, one for the peak of memory, and those that count."""
    for way in ways.values():
        way()
    rows: dict[str, dict[str, Any]] = {
        name: {"extra_bytes": extra_memory(way), "seconds": [], "cpu_seconds": [], "load": []}
        for name, way in ways.items()}
    names = list(ways)
    for turn in range(n_rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            os.sync()  # no way pays for what another left dirty
            gc.collect()
            start, cpu_start = time.perf_counter(), time.process_time()
            own = ways[name]()
            passed = time.perf_counter() - start
            rows[name]["seconds"].append(own if isinstance(own, float) else passed)
            rows[name]["cpu_seconds"].append(time.process_time() - cpu_start)
            rows[name]["load"].append(os.getloadavg()[0])
            print(f"round {turn + 1}/{n_rounds}  {name:44} {rows[name]['seconds'][-1]:8.4f} s", flush=True)
    for row in rows.values():
        row["median_s"], row["least_s"] = statistics.median(row["seconds"]), min(row["seconds"])
        row["median_cpu_s"] = statistics.median(row["cpu_seconds"])
    for row in rows.values():
        pairs = zip(row["seconds"], rows[limit]["seconds"], strict=True)
        row["ratio"] = row["median_s"] / rows[limit]["median_s"]
        row["paired_ratio"] = statistics.median(own / other for own, other in pairs)
    return rows


def paired(rows: dict[str, dict[str, Any]], name: str, other: str) -> float:
    """Give the median of one way's time divided by another's of the same round."""
    return statistics.median(a / b for a, b in zip(rows[name]["seconds"], rows[other]["seconds"], strict=True))


# The parts

ALL = "save,blocking,restore,headers,ways,growth"  # in this order: the last one has states of its own
LIMIT = "raw buffered write + fsync + rename"
SAVE, TORCH = "CheckpointStore.save", "torch.save + fsync + rename"
COPY, READ = "one copy into touched memory", "raw read in place + BLAKE3 on one core"
ASYNC, OVERLAP = "save(wait=False)", "save(wait=False, overlap=True)"
DCP_ASYNC, DCP_REUSED = "DCP async_save, default", "DCP async_save, staging kept"


def save_ways(state: State, folder: Path, opened: ExitStack) -> dict[str, Way]:
    """Name each way to have a finished checkpoint on the disk."""
    tensors = state.tensors()
    views = [view for tensor in tensors.values() if (view := byte_view(tensor)) is not None]
    store = opened.enter_context(CheckpointStore(folder / "store", keep_last=1))
    touched = Touched(tensors)
    aligned = [memoryview(touched.area)]
    return {
        LIMIT: lambda: publish(Bare(views), folder / "raw"),
        "raw O_DIRECT from an aligned copy + fsync + rename": lambda: publish(
            Bare(aligned, direct=True, chunk=8 * CHUNK), folder / "direct"),
        SAVE: lambda: store.save(state.contract, step=next(state.steps)),
        "torch.save": lambda: torch.save(state.plain(), folder / "torch.pt"),
        TORCH: lambda: publish(lambda path: torch.save(state.plain(), path), folder / "torch-durable.pt"),
        "safetensors save_file": lambda: safetensors.torch.save_file(tensors, folder / "plain.safetensors"),
        "safetensors save_file + fsync + rename": lambda: publish(
            lambda path: safetensors.torch.save_file(tensors, path), folder / "durable.safetensors"),
        "DCP save": lambda: dcp.save(state.plain(), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True),
    }


def measure_save(state: State, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Time finished saves, and note the size of what each leaves."""
    with ExitStack() as opened:
        rows = measure(save_ways(state, folder, opened), n_rounds, LIMIT)
    left = {LIMIT: "raw", SAVE: "store", "torch.save": "torch.pt", "safetensors save_file": "plain.safetensors",
            "DCP save": "dcp"}
    for name, where in left.items():
        rows[name]["file_bytes"] = size_of(folder / where)
    return {"rows": rows, "bars": {
        "save ÷ raw buffered write + fsync": (paired(rows, SAVE, LIMIT), 1.10),
        "save ÷ torch.save + fsync + rename": (paired(rows, SAVE, TORCH), 0.75),
        "peak extra memory of a save, MiB": ((rows[SAVE]["extra_bytes"] or 0) / 2**20, 64)}}


def size_of(path: Path) -> int:
    """Add up the bytes of a file or of a folder's files."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


class Loop:
    """The rest of a training step: matrix products that last as long as some copies, then the update."""

    def __init__(self, optimizer: torch.optim.Optimizer, seconds: float):
        self.optimizer, self.seconds = optimizer, seconds
        self.matrix = torch.randn(512, 512)

    def compute(self) -> None:
        """Stand for forward and backward: they change neither parameters nor optimizer state."""
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            _ = self.matrix @ self.matrix

    def update(self) -> float:
        """Give the seconds until the optimizer's step may begin; without gradients it changes nothing."""
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start


def blocking_ways(state: State, folder: Path, opened: ExitStack) -> dict[str, Way]:
    """Name each way to save while a run goes on; each gives the seconds for which the run stands still."""
    touched, store = Touched(state.tensors()), opened.enter_context(CheckpointStore(folder / "store", keep_last=1))
    kept = DefaultStager(StagingOptions(False, False, False, False))
    opened.callback(kept.close)
    touched.fill()
    start = time.perf_counter()
    touched.fill()
    loop = Loop(state.optimizer, seconds=5 * (time.perf_counter() - start))

    def ours(overlap: bool) -> float:
        start = time.perf_counter()
        pending = store.save(state.contract, step=next(state.steps), wait=False, overlap=overlap)
        stall = time.perf_counter() - start
        loop.compute()
        stall += loop.update()
        store.wait()
        assert pending is not None
        return stall

    def theirs(**options: Any) -> float:
        start = time.perf_counter()
        future = dcp.async_save(state.plain(), checkpoint_id=folder / "dcp", no_dist=True, **options)
        stall = time.perf_counter() - start
        loop.compute()
        stall += loop.update()
        getattr(future, "upload_completion", future).result()
        return stall

    def copy() -> float:
        touched.touch()  # some kernels take back pages that lay idle since the round before
        return timed(touched.fill, n=1)

    return {COPY: copy, ASYNC: lambda: ours(False), OVERLAP: lambda: ours(True), DCP_ASYNC: lambda: theirs(),
            DCP_REUSED: lambda: theirs(async_stager=kept)}


def measure_blocking(state: State, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Time for how long each way keeps a loop waiting."""
    with ExitStack() as opened:
        rows = measure(blocking_ways(state, folder, opened), n_rounds, COPY)
    return {"rows": rows, "bars": {
        "wait=False ÷ one copy": (paired(rows, ASYNC, COPY), 1.15),
        "wait=False ÷ DCP async_save": (paired(rows, ASYNC, DCP_ASYNC), 0.35),
        "overlap=True ÷ one copy": (paired(rows, OVERLAP, COPY), 0.25)}}


def restore_ways(state: State, folder: Path, opened: ExitStack) -> dict[str, Way]:
    """Name each way to get the state back into the tensors that are there, out of the page cache."""
    tensors = state.tensors()
    store = opened.enter_context(CheckpointStore(folder / "store", keep_last=1))
    store.save(state.contract, step=next(state.steps))
    file = store.generations()[-1].path
    views = [view for tensor in tensors.values() if (view := byte_view(tensor)) is not None]
    Bare(views)(folder / "raw")
    torch.save(state.plain(), folder / "torch.pt")
    safetensors.torch.save_file(tensors, folder / "plain.safetensors")
    dcp.save(state.plain(), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)

    def raw_read() -> None:
        fd, offset = os.open(folder / "raw", os.O_RDONLY), 0
        for view in views:
            for begin in range(0, len(view), 64 * CHUNK):
                offset += os.preadv(fd, [view[begin:begin + 64 * CHUNK]], offset)
        os.close(fd)

    def by_torch() -> None:
        found = torch.load(folder / "torch.pt", weights_only=True)
        state.model.load_state_dict(found["model"])
        for tensor, (_, value) in zip(tensors.values(), named_tensors(found, ""), strict=True):
            tensor.detach().copy_(value)

    def by_safetensors() -> None:
        for name, value in safetensors.torch.load_file(folder / "plain.safetensors").items():
            tensors[name].detach().copy_(value)

    limit = Bare(views)
    return {
        READ: lambda: (raw_read(), limit.hash_all())[0],
        "raw read in place": raw_read,
        "CheckpointStore.restore": lambda: store.restore(state.contract),
        "verify alone": lambda: verify(file),
        "torch.load + copy, unverified": by_torch,
        "safetensors load_file + copy, unverified": by_safetensors,
        "DCP load, unverified": lambda: dcp.load(
            state.plain(), storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True),
    }


def measure_restore(state: State, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Time restoring."""
    with ExitStack() as opened:
        rows = measure(restore_ways(state, folder, opened), n_rounds, READ)
    ours = "CheckpointStore.restore"
    return {"rows": rows, "bars": {
        "restore ÷ raw read in place + one BLAKE3 pass": (paired(rows, ours, READ), 1.0),
        "peak extra memory of a restore, MiB": ((rows[ours]["extra_bytes"] or 0) / 2**20, 64)}}


def measure_headers(state: State, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Time what reads no tensor, on two checkpoints that differ in one tensor."""
    with CheckpointStore(folder / "store", keep_last=2) as store:
        for _ in range(2):
            next(iter(state.model.parameters())).data[0, 0] += 1
            store.save(state.contract, step=next(state.steps))
    a, b = (generation.path for generation in store.generations())
    rows = measure({"read_manifest": lambda: read_manifest(a),
                    "diff_manifests": lambda: diff_manifests(read_manifest(a), read_manifest(b))}, n_rounds,
                   "read_manifest")
    differing = [difference.path for difference in diff_manifests(read_manifest(a), read_manifest(b))]
    return {"rows": rows, "file_bytes": a.stat().st_size, "header_bytes": read_manifest(a).data_start,
            "differing": differing}


def measure_ways(state: State, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Time bare ways of writing the same bytes with and without a digest: which shape a save should have."""
    tensors = state.tensors()
    views = [view for tensor in tensors.values() if (view := byte_view(tensor)) is not None]
    touched = Touched(tensors)
    touched.fill()
    aligned = [memoryview(touched.area)]
    limit = "buffered, 1 MiB chunks"
    bare = {
        limit: Bare(views), "buffered, 8 MiB chunks": Bare(views, chunk=8 * CHUNK),
        "buffered, two writers": Bare(views, writers=2),
        "buffered, writing started every 8 MiB": Bare(views, early=8 * CHUNK),
        "buffered, writing started every 32 MiB": Bare(views, early=32 * CHUNK),
        "O_DIRECT from an aligned copy, 8 MiB": Bare(aligned, direct=True, chunk=8 * CHUNK),
        "O_DIRECT from an aligned copy, two writers": Bare(aligned, direct=True, chunk=8 * CHUNK, writers=2),
        "buffered, digest before": Bare(views, digest="before"),
        "buffered, digest beside": Bare(views, digest="beside"),
        "buffered, started every 8 MiB, digest beside": Bare(views, early=8 * CHUNK, digest="beside"),
        "O_DIRECT, digest beside": Bare(aligned, direct=True, chunk=8 * CHUNK, digest="beside"),
    }
    ways: dict[str, Way] = {name: lambda way=way: publish(way, folder / "way") for name, way in bare.items()}
    ways["the copy that O_DIRECT needs"] = touched.fill
    return {"rows": measure(ways, n_rounds, limit)}


class Many:
    """A participant that is a number of small tensors."""

    def __init__(self, n: int):
        values = torch.randn(n, 16)
        self.tensors = {f"layer.{i}.weight": values[i].clone() for i in range(n)}

    def state_dict(self) -> dict[str, Any]:
        """Give the tensors."""
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:  # pragma: no cover
        """Take them."""
        self.tensors = state


def timed(way: Way, n: int = 3) -> float:
    """Give the least of some times: what it costs where nothing disturbs it."""
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def growth_point(contract: Contract, folder: Path, steps: Iterator[int]) -> dict[str, Any]:
    """Save, look at and verify one state."""
    shutil.rmtree(folder / "growth", ignore_errors=True)
    with CheckpointStore(folder / "growth", keep_last=1) as store:
        row: dict[str, Any] = {"save_s": timed(lambda: store.save(contract, step=next(steps)))}
        row["extra_bytes"] = extra_memory(lambda: store.save(contract, step=next(steps)))
        blocking = []
        for _ in range(3):
            blocking.append(timed(lambda: store.save(contract, step=next(steps), wait=False), n=1))
            store.wait()
        file = store.generations()[-1].path
        manifest = read_manifest(file)
        return row | {"blocking_s": min(blocking), "file_bytes": manifest.n_bytes, "header_bytes": manifest.data_start,
                      "n_tensors": len(manifest.tensors), "read_manifest_s": timed(lambda: read_manifest(file)),
                      "verify_s": timed(lambda: verify(file))}


def measure_growth(folder: Path, max_mb: int, max_tensors: int) -> dict[str, Any]:
    """Follow the cost as the state grows in bytes, in tensors, in steps of history."""
    found: dict[str, Any] = {"size": [], "tensors": [], "history": []}
    steps = iter(range(1, 1 << 30))
    for mb in (10, 30, 100, 300, 1000, 2000, 4000):
        if mb <= max_mb:
            state = State(mb * 1_000_000)
            found["size"].append({"mb": mb} | growth_point(state.contract, folder, steps))
            del state
            gc.collect()
            print("size", found["size"][-1], flush=True)
    for n in (100, 1000, 10_000, 30_000, 100_000):
        if n <= max_tensors:
            found["tensors"].append({"n": n} | growth_point(Contract(model=Many(n)), folder, steps))
            print("tensors", found["tensors"][-1], flush=True)
    for n in (0, 1_000_000):
        progress = Progress()
        for i in range(n):
            progress.record(1 / (i + 1), n_tokens=1)
        contract = Contract(model=Many(100), progress=progress)
        found["history"].append({"steps": n} | growth_history(contract, folder))
        print("history", found["history"][-1], flush=True)
    return found


def growth_history(contract: Contract, folder: Path) -> dict[str, Any]:
    """Save a run's history at its own step, in a folder of its own."""
    def save() -> None:
        shutil.rmtree(folder / "history", ignore_errors=True)
        with CheckpointStore(folder / "history") as store:
            store.save(contract)

    seconds = timed(save)
    return {"save_s": seconds, "file_bytes": size_of(folder / "history")}


# The command


def table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    """Format medians and ratios for people."""
    lines = [f"{title:52}{'median s':>10}{'least s':>9}{'CPU s':>8}{'ratio':>8}{'paired':>8}{'extra MiB':>11}"]
    for name, row in rows.items():
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.1f}"
        lines.append(f"{name:52}{row['median_s']:10.4f}{row['least_s']:9.4f}{row['median_cpu_s']:8.3f}"
                     f"{row['ratio']:8.2f}{row['paired_ratio']:8.2f}{extra:>11}")
    return "\n".join(lines)


def report(found: dict[str, Any]) -> str:
    """Format all parts that were measured."""
    lines = [f"state of {found['about']['state_bytes'] / 1e9:.3f} GB, {found['about']['n_tensors']} tensors"]
    for part in ("save", "blocking", "restore", "headers", "ways"):
        if part in found:
            lines += ["", table(part, found[part]["rows"])]
    bars = [bar for part in found.values() if isinstance(part, dict) for bar in part.get("bars", {}).items()]
    for name, (reached, wanted) in bars:
        lines.append(f"{name:52}{reached:8.2f}  bar {wanted:g}  {'met' if reached <= wanted else 'MISSED'}")
    return "\n".join(lines)


def for_planning(found: dict[str, Any]) -> None:
    """Repeat the two figures that planning (`costs_of_benchmark`) looks for, under the names by which it does."""
    if "save" in found:
        found["save"][SAVE] = {"median_s": found["save"]["rows"][SAVE]["median_s"]}
        found["about"] = found["save"]["about"]  # the state to which the figures belong
    found.pop("read", None)
    if "restore" in found and found["restore"]["about"]["state_bytes"] == found["about"]["state_bytes"]:
        seconds = found["restore"]["rows"]["CheckpointStore.restore"]["median_s"]
        found["read"] = {"verify and load in place": {"median_s": seconds}}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=at_least(1), default=1500, help="size of the state in millions of bytes")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="rounds that count")
    parser.add_argument("--only", type=chosen_from(ALL), default="save,blocking,restore,headers",
                        help="parts, separated by commas, or all")
    parser.add_argument("--max-mb", type=at_least(0), default=4000, help="growth: largest state")
    parser.add_argument("--max-tensors", type=at_least(0), default=100_000, help="growth: most tensors")
    parser.add_argument("--directory", type=folder, default=None, help="where to write; default temporary")
    parser.add_argument("--output", type=record, default=RESULTS / "checkpoint_cost.json",
                        help="JSON; parts are merged")
    return parser.parse_args()


def main() -> None:
    """Measure, print tables, write JSON."""
    given = arguments()
    warnings.filterwarnings("ignore", module="torch.distributed")
    found = json.loads(given.output.read_text()) if given.output.exists() else {}
    state = State(given.mb * 1_000_000)
    tensors = state.tensors()
    about = {"state_bytes": sum(tensor.nbytes for tensor in tensors.values()), "n_tensors": len(tensors),
             "rounds": given.rounds, "torch": torch.__version__, "machine": platform.machine(),
             "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
             "python": platform.python_version()}
    measures = {"save": measure_save, "blocking": measure_blocking, "restore": measure_restore,
                "headers": measure_headers, "ways": measure_ways}
    for part in given.only:
        with tempfile.TemporaryDirectory(dir=given.directory) as name:
            if part == "growth":
                del state
                result = measure_growth(Path(name), given.max_mb, given.max_tensors)
            else:
                result = measures[part](state, Path(name), given.rounds)
        found |= {"about": about, part: result | {"about": about}}
    for_planning(found)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + report(found))


if __name__ == "__main__":
    main()
