"""What exactness across ranks costs: sharded saves against raw writes, and elastic steps against DDP's.

    python benchmarks/distributed_cost.py              # about a minute on two idle cores

Each figure is the best of several repeats, in milliseconds, taken by the slowest rank; ranks share this machine's
cores, so more ranks than cores show the growth of the work and not of a cluster. The result is
benchmarks/results/distributed_cost.json, which notebook 11b shows.
"""

import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist

from fault_tolerant_transformer_lab.config import load_config, shipped_config
from fault_tolerant_transformer_lab.distributed import RankRun, run_ranks
from fault_tolerant_transformer_lab.elastic import ElasticRun
from fault_tolerant_transformer_lab.sharded import RankStore, read_generation
from fault_tolerant_transformer_lab.training import deterministic

SHARDS = 4
CONFIG = load_config(shipped_config("smoke")).replace(
    d_model=192, n_heads=4, n_layers=4, block_size=32, batch_size=1, grad_accumulation=SHARDS)
REPEATS = 12


def timed(action) -> float:
    "Best time of an action in milliseconds; ranks begin together, and the slowest counts."
    best = float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        begun = time.perf_counter()
        action()
        dist.barrier()
        best = min(best, time.perf_counter() - begun)
    return round(1000 * best, 2)


def raw_write(path: Path, n_bytes: int) -> None:
    "Write and sync as many bytes as a rank's file has."
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    block = memoryview(bytes(1 << 20))
    for begin in range(0, n_bytes, 1 << 20):
        os.write(fd, block[:min(1 << 20, n_bytes - begin)])
    os.fsync(fd)
    os.close(fd)


def saves(folder: Path):
    "A function for `run_ranks`: time sharded saves, and raw writes of the same bytes by the same ranks."
    def _run(ranks):
        with deterministic(threads=1), RankStore(folder / "s", ranks) as store:
            run = RankRun(CONFIG, ranks, "fsdp")
            run.advance()

            def _save() -> None:
                run.progress.record(1.0, 1)
                store.save(run.contract)

            def _begin() -> None:
                run.progress.record(1.0, 1)
                store.save_async(run.contract)

            save = timed(_save)
            stall = float("inf")
            for _ in range(REPEATS):
                dist.barrier()
                begun = time.perf_counter()
                _begin()
                stall = min(stall, time.perf_counter() - begun)
                store.wait()
            newest = max((folder / "s").glob("step-*"))
            n_bytes = read_generation(newest).files[ranks.rank].n_bytes
            raw = timed(lambda: raw_write(folder / f"raw-{ranks.rank}", n_bytes))
            return {"bytes_per_rank": n_bytes, "save_ms": save, "raw_ms": raw, "async_stall_ms": round(1000 * stall, 2)}
    return _run


def steps(elastic: bool):
    "A function for `run_ranks`: time one step of the global batch."
    def _run(ranks):
        with deterministic(threads=1):
            run = ElasticRun(CONFIG, ranks) if elastic else RankRun(CONFIG, ranks, "ddp")
            run.advance()
            return timed(run.advance)
    return _run


def main() -> None:
    "Measure, and write the result."
    found: dict = {"parameters": None, "logical_shards": SHARDS, "cores": len(os.sched_getaffinity(0)),
                   "repeats": REPEATS, "saves": {}, "steps": {}}
    with deterministic():
        from fault_tolerant_transformer_lab.model import Transformer, n_parameters

        found["parameters"] = n_parameters(Transformer.from_config(CONFIG))
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as name:
            found["saves"][str(size)] = run_ranks(saves(Path(name)), size)[0]
        found["steps"][str(size)] = {"ddp_ms": run_ranks(steps(False), size)[0],
                                     "elastic_ms": run_ranks(steps(True), size)[0]}
        print(size, found["saves"][str(size)], found["steps"][str(size)], flush=True)
    path = Path(__file__).parent / "results" / "distributed_cost.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
