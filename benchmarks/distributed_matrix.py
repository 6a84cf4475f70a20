"""Kill runs of several ranks in every way, compare their ends bit for bit, and write what came of it.

    python benchmarks/distributed_matrix.py            # a part: some minutes on two idle cores; nothing is written
    python benchmarks/distributed_matrix.py --full     # 1 to 4 ranks, every boundary and operation: half an hour

A full run writes benchmarks/results/distributed_matrix.json, which notebook 11c shows; with --resume it goes on where
an interrupted one of the same code was, and keeps the groups that were finished and fine. When the last kill of a chain
strikes, a checkpoint is published, so that the run must go on from one. The exit status is 1 where a cell is not equal,
began anew, or struck nobody.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fault_tolerant_transformer_lab import launch
from fault_tolerant_transformer_lab.config import load_config, shipped_config
from fault_tolerant_transformer_lab.distributed import Parallel
from fault_tolerant_transformer_lab.launch import (
    MatrixCell,
    Place,
    operations_of,
    places_of,
    prove_distributed,
    prove_launcher,
)
from fault_tolerant_transformer_lab.training import BOUNDARIES

STEPS, STRUCK = 6, 4  # the step with the second save
MODES: tuple[Parallel, ...] = ("ddp", "fsdp", "elastic")
RESULT = Path(__file__).parent / "results" / "distributed_matrix.json"
CONFIG = load_config(shipped_config("smoke")).replace(
    grad_accumulation=12, batch_size=1, n_layers=1, d_model=8, n_heads=1, dropout=0.1, steps=STEPS, checkpoint_every=2)


def part(parallel: Parallel, size: int) -> list[list[Place]]:
    "A few chains for a mode and a number of ranks."
    last, everybody = size - 1, tuple(range(size))
    chains = [[Place((last,), "after_backward", 3)], [Place(everybody, "after_publication", 2)],
              [Place((0,), "during_write", STRUCK, 11)],
              [Place((last,), "before_forward", 1), Place((0,), "after_update", 3)]]
    return [*chains, [Place((last,), "during_write", STRUCK, 4)]] if parallel == "fsdp" else chains


def group(parallel: Parallel, size: int, full: bool) -> list[MatrixCell]:
    "All kills of a mode and a number of ranks."
    if not full:
        return prove_distributed(CONFIG, parallel, size, part(parallel, size), timeout_s=600)
    operations = operations_of(CONFIG, parallel, size, STRUCK)
    launcher = [(name, 0) for name in BOUNDARIES] + [("during_write", rank) for rank, n in enumerate(operations)
                                                     if rank and n]
    chains = places_of(size, step=STRUCK, operations=operations)
    return [*prove_distributed(CONFIG, parallel, size, chains, timeout_s=600),
            *(prove_launcher(CONFIG, parallel, size, boundary=boundary, rank=rank) for boundary, rank in launcher)]


def code() -> dict[str, str]:
    "The SHA-256 of each module of the package, and of this program: a record of other code is not gone on with."
    files = [Path(__file__), *sorted(Path(launch.__file__).parent.glob("*.py"))]
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.stem != "_modidx"}


def is_fine(cell: dict[str, Any]) -> bool:
    "Whether a run that was killed went on from a checkpoint to the end of the undisturbed one."
    return cell["equal"] and cell["struck"] and cell["resumed_from"] is not None


def main() -> int:
    "Run the matrix."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every boundary, operation and number of ranks")
    parser.add_argument("--resume", action="store_true", help="keep the groups that an interrupted run has written")
    parser.add_argument("--output", type=Path, help="where to write the result; a full one has a place of its own")
    arguments = parser.parse_args()
    output = arguments.output or (RESULT if arguments.full else None)
    begun, extent = time.monotonic(), "full" if arguments.full else "part"
    found: dict[str, Any] = {"extent": extent, "steps": STEPS, "code": code(), "cells": []}
    if arguments.resume and output is not None and output.exists():
        earlier = json.loads(output.read_text())
        if all(earlier.get(name) == found[name] for name in ("extent", "steps", "code")):
            groups = itertools.groupby(earlier["cells"], key=lambda cell: (cell["parallel"], cell["size"]))
            found["cells"] = [cell for kept in (list(cells) for _, cells in groups) if all(map(is_fine, kept))
                              for cell in kept]
        else:
            print("the record is of other code or another extent: begun anew", flush=True)
    done = {(cell["parallel"], cell["size"]) for cell in found["cells"]}
    for size, parallel in itertools.product((1, 2, 3, 4) if arguments.full else (2, 3), MODES):
        if (parallel, size) in done:
            continue
        cells = [asdict(cell) for cell in group(parallel, size, arguments.full)]
        found["cells"] += cells
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(found, indent=1) + "\n")
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"{parallel:8} {size} ranks: {sum(map(is_fine, cells))} of {len(cells)} equal, {took}", flush=True)
        for cell in cells:
            if not is_fine(cell):
                print("  ", cell, flush=True)
    return 0 if all(map(is_fine, found["cells"])) else 1


if __name__ == "__main__":
    sys.exit(main())
