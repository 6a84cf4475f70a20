"""What exactness across ranks costs: sharded saves against raw writes, and elastic steps against DDP's.

    python benchmarks/distributed_cost.py              # some minutes on two idle cores

Rounds are interleaved, and what is compared takes turns in going first. Times are medians in milliseconds, each taken
by the slowest rank, ratios the medians of the ratio within a round. Ranks share this machine's cores, so more ranks
than cores show the growth of the work and not of a cluster. Saves are measured for a small state, whose cost is that
of the agreements and syncs, and for a larger one, whose cost is that of its bytes. The result is
benchmarks/results/distributed_cost.json, which notebook 11b shows.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist

from fault_tolerant_transformer_lab.config import ExperimentConfig, load_config, shipped_config
from fault_tolerant_transformer_lab.distributed import RankRun, Ranks, run_ranks
from fault_tolerant_transformer_lab.elastic import ElasticRun
from fault_tolerant_transformer_lab.model import Transformer, n_parameters
from fault_tolerant_transformer_lab.sharded import RankStore, read_generation
from fault_tolerant_transformer_lab.training import deterministic

SHARDS = 4
SMALL = load_config(shipped_config("smoke")).replace(
    d_model=192, n_heads=4, n_layers=4, block_size=32, batch_size=1, grad_accumulation=SHARDS)
LARGE = SMALL.replace(d_model=640, n_layers=5)
SIZES = (1, 2, 4)
ROUNDS = 11


def by_slowest(action: Callable[[], object]) -> float:
    "Seconds of an action; ranks begin together, and the slowest counts."
    dist.barrier()
    begun = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begun


def interleaved(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    "Seconds of each action in each round, after one round to warm up; each goes first in its turn."
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        names = list(actions)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = by_slowest(actions[name])
            if number:
                found[name].append(seconds)
    return found


def compared(found: dict[str, list[float]], name: str, base: str) -> float:
    "The median of the ratio within a round."
    return round(statistics.median(a / b for a, b in zip(found[name], found[base], strict=True)), 3)


def in_ms(found: dict[str, list[float]]) -> dict[str, float]:
    "The medians, in milliseconds."
    return {f"{name}_ms": round(1000 * statistics.median(values), 2) for name, values in found.items()}


def raw_write(path: Path, n_bytes: int) -> None:
    "Write and sync as many bytes as a rank's file has."
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    block = memoryview(bytes(1 << 20))
    for begin in range(0, n_bytes, 1 << 20):
        os.write(fd, block[:min(1 << 20, n_bytes - begin)])
    os.fsync(fd)
    os.close(fd)


def saves(folder: Path, config: ExperimentConfig, rounds: int) -> Callable[[Ranks], dict[str, float]]:
    "A function for `run_ranks`: sharded saves beside raw writes of the same bytes by the same ranks."
    def _run(ranks: Ranks) -> dict[str, float]:
        with deterministic(threads=1), RankStore(folder / "s", ranks) as store:
            run = RankRun(config, ranks, "fsdp")
            run.advance()
            stalls: list[float] = []

            def _save() -> None:
                run.progress.record(1.0, 1)
                store.save(run.contract)

            def _in_background() -> None:
                run.progress.record(1.0, 1)
                begun = time.perf_counter()
                store.save_async(run.contract)
                stalls.append(time.perf_counter() - begun)
                store.wait()

            _save()
            newest = max((folder / "s").glob("step-*"))
            n_bytes = read_generation(newest).files[ranks.rank].n_bytes
            found = interleaved({"raw": lambda: raw_write(folder / f"raw-{ranks.rank}", n_bytes), "save": _save,
                                 "background": _in_background}, rounds)
            stall = round(1000 * statistics.median(stalls[1:]), 2)
            return {"bytes_per_rank": n_bytes, **in_ms(found), "stall_ms": stall,
                    "save_to_raw": compared(found, "save", "raw")}
    return _run


def steps(ranks: Ranks) -> dict[str, float]:
    "For `run_ranks`: a step of the global batch, elastic beside DDP."
    with deterministic(threads=1):
        runs = {"ddp": RankRun(SMALL, ranks, "ddp"), "elastic": ElasticRun(SMALL, ranks)}
        found = interleaved({name: run.advance for name, run in runs.items()}, 2 * ROUNDS)
        return {**in_ms(found), "elastic_to_ddp": compared(found, "elastic", "ddp")}


def parameters_of(config: ExperimentConfig) -> int:
    "Parameters of a configuration's model."
    with deterministic():
        return n_parameters(Transformer.from_config(config))


def main() -> None:
    "Measure, and write the result."
    found: dict = {"logical_shards": SHARDS, "cores": len(os.sched_getaffinity(0)), "rounds": ROUNDS,
                   "parameters": {"small": parameters_of(SMALL), "large": parameters_of(LARGE)},
                   "saves": {"small": {}, "large": {}}, "steps": {}}
    for size in SIZES:
        for name, config in (("small", SMALL), ("large", LARGE)):
            with tempfile.TemporaryDirectory() as folder:
                found["saves"][name][str(size)] = run_ranks(saves(Path(folder), config, ROUNDS), size, timeout_s=600)[0]
            print(size, name, found["saves"][name][str(size)], flush=True)
        found["steps"][str(size)] = run_ranks(steps, size, timeout_s=600)[0]
        print(size, "step", found["steps"][str(size)], flush=True)
    path = Path(__file__).parent / "results" / "distributed_cost.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
