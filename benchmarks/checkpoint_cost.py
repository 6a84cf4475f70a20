"""What one durable, digested checkpoint costs, beside the same bytes through `torch.save` and through bare writes.

Every way saves the same state in the same process, in rounds whose order rotates, after one round that is not counted.
The table gives medians, because the disk below is shared and noisy, and medians of the ratio within each round
(`paired`). CPU seconds are this process's own, kernel included: what a save costs where no core is free. Bare writes
with an fsync are the limit: no format can be faster without writing less. Extra memory is the growth of the process's
peak resident set over what it held just before the save. Run: `python benchmarks/checkpoint_cost.py --size 1.5GB`.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fault_tolerant_transformer_lab.checkpoint_file import encode, open_checkpoint, verify
from fault_tolerant_transformer_lab.contract import Contract

RESULTS = Path(__file__).parent / "results"
UNITS = {"GB": 1e9, "MB": 1e6, "KB": 1e3}
LIMIT = "raw write + fsync"
PEER = "torch.save + fsync + rename"  # to a path, which is faster than through a Python file object
OURS = "CheckpointStore.save"


class Held:
    """Participant that is a dict of tensors."""

    def __init__(self, tensors: dict[str, Any]):
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def make_state(n_bytes: int) -> dict[str, dict[str, Any]]:
    """Make weights and two AdamW moments with the tensor shapes of a GPT-2, as many layers as fill the size."""
    d = max(32, round((0.7 * n_bytes / 12**3) ** 0.5 / 64) * 64)  # twelve layers or so
    layer = {"attention.qkv.weight": (3 * d, d), "attention.qkv.bias": (3 * d,), "attention.projection.weight": (d, d),
             "attention.projection.bias": (d,), "mlp.up.weight": (4 * d, d), "mlp.up.bias": (4 * d,),
             "mlp.down.weight": (d, 4 * d), "mlp.down.bias": (d,), "norm_1.weight": (d,), "norm_1.bias": (d,),
             "norm_2.weight": (d,), "norm_2.bias": (d,)}
    shapes = {"token_embedding.weight": (max(256, int(n_bytes * 0.3) // (12 * d)), d)}
    used, index = 12 * d * shapes["token_embedding.weight"][0], 0
    while used < n_bytes:
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in layer.items()}
        used += 12 * sum(torch.Size(shape).numel() for shape in layer.values())
        index += 1
    made = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3)]
    moments = {i: {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": v}
               for i, (m, v) in enumerate(zip(made[1].values(), made[2].values(), strict=True))}
    return {"model": made[0], "optimizer": {"state": moments}}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a state."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for child in tree.values() for tensor in tensors_of(child)]


def sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish_by_hand(write: Callable[[int], None], path: Path) -> None:
    """Write a temporary sibling, sync it, rename it, sync the directory: what every way is charged for."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write(fd)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_raw(state: dict[str, Any], fd: int) -> None:
    """Write the tensors' bytes and nothing else."""
    offset = 0
    for tensor in tensors_of(state):
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(view), 1 << 20):
            offset += os.pwrite(fd, view[begin:begin + (1 << 20)], offset)


def write_encoding(contract: Contract, fd: int) -> None:
    """Write an encoding without the store."""
    for offset, view in encode(contract.capture(step=1)).chunks():
        while view:
            n_written = os.pwrite(fd, view, offset)
            view, offset = view[n_written:], offset + n_written


def torch_save(state: dict[str, Any], path: Path) -> None:
    """Save with torch to a temporary name, sync the file, rename it, sync the directory."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_directory(path.parent)


def ways(state: dict[str, Any], directory: Path) -> dict[str, Callable[[], Any]]:
    """Name each way to save, as a function without arguments."""
    contract = Contract(**{name: Held(part) for name, part in state.items()})
    found: dict[str, Callable[[], Any]] = {
        LIMIT: lambda: publish_by_hand(lambda fd: write_raw(state, fd), directory / "raw"),
        PEER: lambda: torch_save(state, directory / "torch.pt"),
        "encode + write + fsync + rename": lambda: publish_by_hand(
            lambda fd: write_encoding(contract, fd), directory / "encoded.safetensors"),
    }
    if find_spec("fault_tolerant_transformer_lab.publication"):
        from fault_tolerant_transformer_lab.publication import CheckpointStore
        steps = iter(range(1, 1 << 30))

        def save() -> None:
            with CheckpointStore(directory / "store", keep_last=1) as store:
                store.save(contract, step=next(steps))
        found[OURS] = save
    return found


def resident(field: str) -> int:
    """Read a figure of this process's memory from the kernel, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) * 1024


def extra_memory(save: Callable[[], Any]) -> int | None:
    """Measure by how many bytes the peak resident set passes what the process held before the call (Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        save()
        return None
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    save()
    return resident("VmHWM") - before


def settle() -> None:
    """Write back what earlier rounds left dirty, so that no way pays for another's pages."""
    os.sync()
    gc.collect()


def measure(state: dict[str, Any], directory: Path, n_rounds: int) -> dict[str, dict[str, Any]]:
    """Time every way in interleaved rounds, after a warm-up round in which extra memory is measured."""
    saves = ways(state, directory)
    names = list(saves)
    rows: dict[str, dict[str, Any]] = {
        name: {"extra_bytes": extra_memory(saves[name]), "seconds": [], "cpu_seconds": []} for name in names}
    for turn in range(n_rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            settle()
            start, cpu_start = time.perf_counter(), time.process_time()
            saves[name]()
            rows[name]["seconds"].append(time.perf_counter() - start)
            rows[name]["cpu_seconds"].append(time.process_time() - cpu_start)
            print(f"round {turn + 1}/{n_rounds}  {name:34} {rows[name]['seconds'][-1]:7.2f} s", flush=True)
    for row in rows.values():
        row["median_s"] = statistics.median(row["seconds"])
        row["median_cpu_s"] = statistics.median(row["cpu_seconds"])
    for row in rows.values():
        for base in (LIMIT, PEER):
            row[f"ratio to {base}"] = row["median_s"] / rows[base]["median_s"]
            pairs = zip(row["seconds"], rows[base]["seconds"], strict=True)
            row[f"paired ratio to {base}"] = statistics.median(own / other for own, other in pairs)
    return rows


def measure_reading(path: Path, n_rounds: int, state: dict[str, Any]) -> dict[str, Any]:
    """Time verification alone, and verification followed by reading every tensor in place."""
    contract = Contract(**{name: Held(part) for name, part in state.items()})
    publish_by_hand(lambda fd: write_encoding(contract, fd), path)

    def restore() -> None:
        with open_checkpoint(path) as saved:
            for stored, live in zip(tensors_of_stored(saved.tree), tensors_of(state), strict=True):
                stored.load_into(live)

    rows: dict[str, Any] = {}
    for name, call in (("verify", lambda: verify(path)), ("verify and load in place", restore)):
        extra = extra_memory(call)
        seconds = []
        for _ in range(n_rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        rows[name] = {"median_s": statistics.median(seconds), "seconds": seconds, "extra_bytes": extra}
    return rows


def tensors_of_stored(tree: Any) -> list[Any]:
    """List the stored tensors of a saved state, in the order of `tensors_of`."""
    return [tree] if not isinstance(tree, dict) else [t for child in tree.values() for t in tensors_of_stored(child)]


def table(rows: dict[str, dict[str, Any]], reading: dict[str, Any], n_bytes: int) -> str:
    """Format medians and ratios for people."""
    lines = [f"state of {n_bytes / 1e9:.3f} GB, medians", "",
             f"{'save':36}{'seconds':>9}{'CPU s':>9}{'/ limit':>9}{'/ torch':>9}{'paired':>9}{'extra MiB':>11}"]
    for name, row in rows.items():
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.1f}"
        lines.append(f"{name:36}{row['median_s']:9.2f}{row['median_cpu_s']:9.2f}{row[f'ratio to {LIMIT}']:9.2f}"
                     f"{row[f'ratio to {PEER}']:9.2f}{row[f'paired ratio to {PEER}']:9.2f}{extra:>11}")
    lines += ["", f"{'read (from the page cache)':36}{'seconds':>9}{'GB/s':>9}{'extra MiB':>38}"]
    for name, row in reading.items():
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.1f}"
        lines.append(f"{name:36}{row['median_s']:9.2f}{n_bytes / 1e9 / row['median_s']:9.2f}{extra:>38}")
    return "\n".join(lines)


def parse_size(text: str) -> int:
    """Read a size such as `1.5GB`."""
    for unit, factor in UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[:-2]) * factor)
    return int(text)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("1.5GB"), help="bytes, as 1.5GB or 200MB")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default temporary")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default under results/")
    arguments = parser.parse_args()
    state = make_state(arguments.size)
    n_bytes = sum(tensor.nbytes for tensor in tensors_of(state))
    warm = make_state(1_000_000)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        for save in ways(warm, Path(name)).values():  # imports and thread pools are not part of a save's memory
            save()
        (Path(name) / "measured").mkdir()
        rows = measure(state, Path(name) / "measured", arguments.rounds)
        reading = measure_reading(Path(name) / "read.safetensors", arguments.rounds, state)
    text = table(rows, reading, n_bytes)
    print("\n" + text)
    output = arguments.output or RESULTS / f"checkpoint_cost_{arguments.size / 1e9:.1f}GB.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {"state_bytes": n_bytes, "n_tensors": len(tensors_of(state)), "rounds": arguments.rounds,
             "torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(),
             "python": platform.python_version()}
    output.write_text(json.dumps({"about": about, "save": rows, "read": reading}, indent=1) + "\n")
    output.with_suffix(".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
