"""Kill runs of several ranks in every way, compare their ends bit for bit, and write what came of it.

    python benchmarks/distributed_matrix.py            # the part that CI runs: about two minutes on two idle cores
    python benchmarks/distributed_matrix.py --full     # 1 to 4 ranks, every boundary and operation: about an hour

The result is benchmarks/results/distributed_matrix.json, which notebook 11c shows; the exit status is 1 where any cell
is not equal. An interrupted full run goes on where it was: finished groups are kept in the result.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fault_tolerant_transformer_lab.config import load_config, shipped_config
from fault_tolerant_transformer_lab.launch import Place, operations_of, places_of, prove_distributed, prove_launcher

STEPS = 4
RESULT = Path(__file__).parent / "results" / "distributed_matrix.json"
CONFIG = load_config(shipped_config("smoke")).replace(
    grad_accumulation=12, batch_size=1, n_layers=1, d_model=8, n_heads=1, dropout=0.1, steps=STEPS, checkpoint_every=2)


def part(parallel: str, size: int) -> list[list[Place]]:
    "The chains that CI runs for a mode and a number of ranks."
    last, everybody = size - 1, tuple(range(size))
    chains = [[Place((last,), "after_backward", 3)], [Place(everybody, "after_publication", 2)],
              [Place((0,), "during_write", 2, 11)],
              [Place((last,), "before_forward", 1), Place((0,), "after_update", 3)]]
    return [*chains, [Place((last,), "during_write", 2, 4)]] if parallel == "fsdp" else chains


def main() -> int:
    "Run the matrix."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every boundary, operation and number of ranks")
    parser.add_argument("--output", type=Path, default=RESULT, help="where to write the result")
    arguments = parser.parse_args()
    begun, extent = time.monotonic(), "full" if arguments.full else "part"
    found: dict = {"extent": extent, "steps": STEPS, "cells": []}
    if arguments.full and arguments.output.exists():
        earlier = json.loads(arguments.output.read_text())
        found = earlier if earlier["extent"] == "full" else found
    done = {(cell["parallel"], cell["size"]) for cell in found["cells"]}
    for size in (1, 2, 3, 4) if arguments.full else (2, 3):
        for parallel in ("ddp", "fsdp", "elastic"):
            if (parallel, size) in done:
                continue
            chains = places_of(size, step=2, operations=operations_of(CONFIG, parallel, size, 2)) \
                if arguments.full else part(parallel, size)
            cells = prove_distributed(CONFIG, parallel, size, chains, timeout_s=600)
            if arguments.full and size > 1 and parallel != "elastic":
                cells.append(prove_launcher(CONFIG, parallel, size))
            found["cells"] += [asdict(cell) for cell in cells]
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")
            equal = sum(cell.equal and cell.struck for cell in cells)
            took = f"{time.monotonic() - begun:.0f} s"
            print(f"{parallel:8} {size} ranks: {equal} of {len(cells)} equal, {took}", flush=True)
            for cell in cells:
                if not (cell.equal and cell.struck):
                    print("  ", cell, flush=True)
    return 0 if all(cell["equal"] and cell["struck"] for cell in found["cells"]) else 1


if __name__ == "__main__":
    sys.exit(main())
