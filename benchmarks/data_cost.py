"""What a batch costs: at any step, at any size of the data, and with a positional read against a memory map.

    python benchmarks/data_cost.py [--rounds 7] [--output benchmarks/results/data_cost.json]

Prints medians over interleaved rounds and writes them as JSON. Nothing here is a test: a figure
belongs to the machine it was measured on.
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.data import Permutation, StepBatches, SyntheticReader, TokenStream, open_data

SMOKE = Path(__file__).resolve().parent.parent / "configs" / "smoke.json"


def microseconds(call: Callable[[int], object], repeats: int) -> float:
    "Mean time of a call, which is given the number of its repetition."
    start = time.perf_counter()
    for i in range(repeats):
        call(i)
    return (time.perf_counter() - start) / repeats * 1e6


def medians(cases: dict[str, Callable[[int], object]], rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    "Median and spread of each case in microseconds; the rounds take the cases in turn, after one to warm up."
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for name, call in cases.items():
            figure = microseconds(call, repeats)
            if round_:
                times[name].append(figure)
    return {
        name: {"median": round(statistics.median(t), 1), "least": round(min(t), 1), "most": round(max(t), 1)}
        for name, t in times.items()
    }


def by_step(rounds: int) -> dict[str, dict[str, float]]:
    "The same batch of the smoke experiment's shape, near and far."
    batches = StepBatches(open_data(load_config(SMOKE)).train, block_size=16, batch_size=4, seed=2712)
    starts = {"step 0": 0, "step 10**6": 10**6, "step 10**9": 10**9, "step 10**15": 10**15}
    return medians({name: lambda i, s=s: batches.batch(s + i) for name, s in starts.items()}, rounds, 200)


def by_size(rounds: int) -> dict[str, dict[str, float]]:
    "Sources from a thousand windows to 10**15, and what a stored order would cost to draw up instead."
    cases: dict[str, Callable[[int], object]] = {}
    for exponent in (3, 6, 9, 15):
        about = dict(vocab_size=64, kind="synthetic", tokenizer="none", split={}, about={})
        source = TokenStream(SyntheticReader(64), 16 * 10**exponent + 1, **about)
        batches = StepBatches(source, block_size=16, batch_size=4, seed=2712)
        cases[f"10**{exponent} windows"] = lambda i, b=batches: b.batch(i)
    return medians(cases, rounds, 200)


def shuffles(rounds: int) -> dict[str, dict[str, float]]:
    "Windows of one step in the middle of an epoch of 10**6 windows: computed, or taken from a stored order."
    order = Permutation(10**6, b"key")
    four = np.arange(4)

    def stored(i: int) -> object:
        generator = torch.Generator().manual_seed(i)
        return torch.randperm(10**6, generator=generator)[4 * i : 4 * i + 4]

    cases = {
        "keyed permutation, 4 windows": lambda i: order(four + 4 * i),
        "keyed permutation, 1,024 windows": lambda i: order(np.arange(1024) + 4 * i),
        "torch.randperm of the epoch": stored,
    }
    return medians(cases, rounds, 20)


READS = """
import json, mmap, os, resource, sys, time
import numpy as np
from pathlib import Path
from fault_tolerant_transformer_lab.data import FileReader

path, way, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
n_tokens = os.path.getsize(path) // 2
starts = np.random.default_rng(int(sys.argv[4])).integers(0, n_tokens - 1025, n).tolist()
if way == "positional":
    read = FileReader(path, "uint16")
else:
    tokens = np.memmap(path, dtype="<u2", mode="r")
    if way == "mapped, no read-ahead":
        tokens._mmap.madvise(mmap.MADV_RANDOM)
    read = lambda start, n: tokens[start : start + n].astype(np.int64)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
held = bytearray(b"x") * 2**26  # above any earlier peak, so that growth shows
before, start = peak(), time.perf_counter()
for s in starts:
    read(s, 1025)
print(json.dumps({"microseconds": (time.perf_counter() - start) / n * 1e6, "growth": (peak() - before) / n}))
"""


def file_reads(rounds: int, n: int = 200) -> dict[str, dict[str, float]]:
    "Windows of 1,025 tokens at random places of a sparse file of 64 GiB, each way in a process of its own."
    ways = ("positional", "mapped", "mapped, no read-ahead")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparse.bin"
        path.touch()
        os.truncate(path, 64 * 2**30)
        for round_ in range(rounds):
            for j, way in enumerate(ways):
                command = [sys.executable, "-c", READS, str(path), way, str(n), str(round_ * len(ways) + j)]
                found[way].append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    return {
        way: {
            "median": round(statistics.median(f["microseconds"] for f in figures), 1),
            "least": round(min(f["microseconds"] for f in figures), 1),
            "most": round(max(f["microseconds"] for f in figures), 1),
            "resident KiB per window": round(statistics.median(f["growth"] for f in figures) / 1024, 1),
        }
        for way, figures in found.items()
    }


def digest_rate() -> dict[str, dict[str, float]]:
    "One pass of the identity over 64 Mi tokens of a file in the page cache."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.zeros(2**26, dtype="<u2").tofile(path)
        config = load_config(SMOKE, {"data": f"tokens:{path}"})
        source = open_data(config).train
        start = time.perf_counter()
        source.identity()
        seconds = time.perf_counter() - start
    return {"identity, 64 Mi tokens": {"median": round(seconds * 1e6), "million tokens/s": round(60.4 / seconds)}}


def main() -> None:
    "Measure, print, write."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, after one to warm up")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "data_cost.json")
    arguments = parser.parse_args()
    tables = {
        "one batch, by step": by_step(arguments.rounds),
        "one batch, by size of the data": by_size(arguments.rounds),
        "windows of one step": shuffles(arguments.rounds),
        "one window of a 64 GiB file": file_reads(min(3, arguments.rounds)),
        "identity": digest_rate(),
    }
    for title, rows in tables.items():
        print(f"\n{title} (medians, microseconds)")
        for name, row in rows.items():
            rest = ", ".join(f"{key} {value}" for key, value in row.items() if key != "median")
            print(f"  {name:34} {row['median']:>12,}   {rest}")
    machine = {
        "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__,
        "system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count(),
        "page_bytes": mmap.PAGESIZE,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "rounds": arguments.rounds, "unit": "microseconds", "tables": tables}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
