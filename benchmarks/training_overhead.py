"""What saving costs a run, and what the loop around a step costs.

Three questions, each answered in interleaved rounds whose order rotates, by medians of the ratio within a round, or
between neighbours:

* how fast `train` is with a save every 1, 10 and 100 steps against none, waiting for it (sync), in the background
  (async) and with the copy hidden too (overlapped); torch's `distributed.checkpoint.async_save` saves the same state in
  the same loop, as it is called by default and with a stager that is reused. Every way keeps the last two checkpoints.
  Ours are digested and durable when they count as published; those of torch are not.
* how fast `train` is without any save against the bare loop that one would write by hand (batch, forward, backward,
  clip, step) for the same model, at a model of 10M parameters and at the size of `smoke.json`;
* what the difference at the small size is spent on.

A window of steps begins right after a save and ends right after one, so that each step carries its share of a save that
goes on behind it. CPU seconds are the whole process's, kernel and background threads included: what a step costs where
no core is free, and what a machine that others use can still measure. Run: `python benchmarks/training_overhead.py`;
`--quick` tries everything at a small size. `--add --every 100 --batch-size 2` measures further intervals alone and puts
them beside those of the file: each window between two without saves, which its ratio is against, so that the rows may
come from different hours and sizes of a step.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from arguments import at_least, folder, record
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn import functional as F

from fault_tolerant_transformer_lab.config import ExperimentConfig, load_config, shipped_config
from fault_tolerant_transformer_lab.contract import Contract, Progress
from fault_tolerant_transformer_lab.data import StepBatches, open_data
from fault_tolerant_transformer_lab.ledger import Ledger, StopWatch
from fault_tolerant_transformer_lab.model import Transformer, n_parameters
from fault_tolerant_transformer_lab.publication import Disk
from fault_tolerant_transformer_lab.training import (
    MetricsLog,
    RunDisk,
    TrainingRun,
    deterministic,
    encode_line,
    known_row,
    learning_rate_at,
    no_boundary,
    tokens_per_step,
    train,
)

RESULTS = Path(__file__).parent / "results"
NEVER = 10**9
MODES = ("sync", "async", "overlapped")
PEERS = ("DCP async_save", "DCP async_save, reused stager")
LARGE = ExperimentConfig(
    data="pydoc", tokenizer="byte", vocab_size=257, block_size=128, d_model=384, n_heads=6, n_layers=6, dropout=0.0,
    seed=2712, steps=1, batch_size=8, learning_rate=3e-4, grad_clip=1.0, checkpoint_every=NEVER,
)
SMALL = load_config(shipped_config("smoke")).replace(grad_clip=1.0, checkpoint_every=NEVER)
QUICK = LARGE.replace(d_model=64, n_heads=4, n_layers=2, block_size=32)


Cost = tuple[float, float]  # seconds and CPU seconds of a step


def now() -> Cost:
    """Read both clocks."""
    return time.perf_counter(), time.process_time()


def per_step(begin: Cost, end: Cost, n_steps: int) -> Cost:
    """Share a span among steps."""
    return (end[0] - begin[0]) / n_steps, (end[1] - begin[1]) / n_steps


class Clock:
    """Sees the boundaries of a run, and keeps when each step was begun."""

    def __init__(self) -> None:
        self.begun: dict[int, Cost] = {}

    def __call__(self, name: str, step: int) -> None:
        """Note the time where a step begins: the save after the step before has returned by then."""
        if name == "before_forward":
            self.begun[step] = now()

    def cost(self, first: int, n_steps: int) -> Cost:
        """What a step cost, from the beginning of a step over so many."""
        return per_step(self.begun[first], self.begun[first + n_steps], n_steps)


class TorchSaver(Clock):
    """Saves with torch's `async_save` where `train` would save: an observer of the run and its boundaries."""

    def __init__(self, folder: Path, every: int, reuse: bool) -> None:
        super().__init__()
        self.folder, self.every = folder, every
        self.stager = DefaultStager(StagingOptions(False, True, False, False)) if reuse else None
        self.future: Any = None

    def started(self, contract: Contract, step: int, run: TrainingRun) -> None:
        """Keep the run's participants."""
        self.parts = {name: contract.participants[name] for name in ("model", "optimizer")}

    def completed(self, step: int, loss: float) -> None:
        """Nothing."""

    def __call__(self, name: str, step: int) -> None:
        """Save what the step before has completed, then note the time."""
        if name == "before_forward" and step > 1 and (step - 1) % self.every == 0:
            self.wait()
            old = self.folder / str(step - 1 - 2 * self.every)
            shutil.rmtree(old, ignore_errors=True)
            state = {name: part.state_dict() for name, part in self.parts.items()}
            self.future = dcp.async_save(state, checkpoint_id=self.folder / str(step - 1), async_stager=self.stager,
                                         no_dist=True)
        super().__call__(name, step)

    def wait(self) -> None:
        """Wait for the save before."""
        if self.future is not None:
            getattr(self.future, "upload_completion", self.future).result()


def saved_run(config: ExperimentConfig, way: str, every: int, n_steps: int, directory: Path) -> Cost:
    """Train with saves and give the cost of a step, in a window that begins and ends right after a save."""
    warm_up = max(2, every) if every != NEVER else 2
    config = config.replace(steps=warm_up + n_steps + 1)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        if way in PEERS:
            saver = TorchSaver(Path(name) / "dcp", every, reuse=way != PEERS[0])
            train(config, Path(name) / "run", on_boundary=saver, observer=saver, progress_bar=False)
            saver.wait()
            if saver.stager is not None:
                saver.stager.close()
            return saver.cost(warm_up + 1, n_steps)
        clock, mode = Clock(), {} if way == "none" else {"checkpoint_mode": way, "checkpoint_every": every}
        train(config.replace(**mode), Path(name) / "run", on_boundary=clock, progress_bar=False)
        return clock.cost(warm_up + 1, n_steps)


def bare_loop(config: ExperimentConfig) -> Callable[[int], None]:
    """Build the loop that one would write by hand, as a function that makes the given step."""
    torch.manual_seed(config.seed)
    model = Transformer.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0,
                                  fused=True)
    batches = StepBatches(open_data(config).train, block_size=config.block_size, batch_size=config.batch_size,
                          seed=config.seed)

    def make_step(step: int) -> None:
        [batch] = batches.batch(step)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(batch.inputs_BT).flatten(0, 1), batch.targets_BT.flatten())
        loss.backward()
        if config.grad_clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()

    return make_step


def bare_run(config: ExperimentConfig, n_steps: int) -> Cost:
    """Cost of a step of the bare loop."""
    make_step = bare_loop(config)
    make_step(0)
    make_step(1)
    begin = now()
    for step in range(2, 2 + n_steps):
        make_step(step)
    return per_step(begin, now(), n_steps)


def rounds_of(ways: dict[str, Callable[[], Cost]], n_rounds: int, base: str) -> dict[str, dict[str, Any]]:
    """Measure every way in rounds whose order rotates; ratios are taken within a round."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(n_rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            os.sync()
            costs[name].append(ways[name]())
            wall, cpu = (1e3 * seconds for seconds in costs[name][-1])
            print(f"round {turn + 1}/{n_rounds}  {name:42} {wall:10.3f} ms a step, CPU {cpu:10.3f} ms", flush=True)
    return {name: row_of(found, costs[base]) for name, found in costs.items()}


def row_of(own: list[Cost], beside: list[Cost]) -> dict[str, Any]:
    """What a way costs, and the ratio to what each of its windows is compared with, by both clocks."""
    row: dict[str, Any] = {}
    for clock, key in enumerate(("", "cpu_")):
        mine = [cost[clock] for cost in own]
        ratios = [cost / other[clock] for cost, other in zip(mine, beside, strict=True)]
        row |= {f"{key}seconds_per_step": mine, f"{key}median_s": statistics.median(mine),
                f"{key}ratio": statistics.median(ratios), f"{key}ratios": ratios}
    return row


def between(ways: dict[str, Callable[[], Cost]], base: Callable[[], Cost], n_rounds: int) -> dict[str, dict[str, Any]]:
    """Measure every way between two windows of `base`; ratios are against the mean of the two."""
    found: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in ways}  # its own cost, that of its neighbours
    names = list(ways)
    before = base()
    for turn in range(n_rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            os.sync()
            own = ways[name]()
            os.sync()
            after = base()
            found[name].append((own, ((before[0] + after[0]) / 2, (before[1] + after[1]) / 2)))
            before = after
            wall, cpu = (a / b for a, b in zip(*found[name][-1], strict=True))
            print(f"round {turn + 1}/{n_rounds}  {name:42} {1e3 * own[0]:10.3f} ms a step, ratio {wall:.3f}, "
                  f"CPU {cpu:.3f}", flush=True)
    return {name: row_of([own for own, _ in pairs], [near for _, near in pairs]) for name, pairs in found.items()}


def pieces_of_a_step(config: ExperimentConfig, directory: Path) -> dict[str, float]:
    """Time what the loop does in a step beside the bare loop, each alone: the least of many rounds, in microseconds."""
    run = TrainingRun(config)
    run.advance()
    one_group = torch.optim.AdamW(run.model.parameters(), lr=0.0, betas=config.betas, weight_decay=0.0, fused=True)
    ledger, watch = Ledger(directory / "ledger.jsonl"), StopWatch()
    ledger.open(0)
    batches, progress, row = run.batches.batch(1), Progress(), run.last
    path = directory / "metrics.jsonl"
    log = MetricsLog(path, RunDisk(Disk(), no_boundary))
    log.open([], lambda step: {})
    weights = run.optimizer.param_groups

    def set_rate() -> None:
        for group in weights:
            group["lr"] = learning_rate_at(config, 5)

    def time_step() -> None:
        with watch.step(1):
            pass

    pieces: dict[str, Callable[[], Any]] = {
        "AdamW of two groups": run.optimizer.step,
        "AdamW of one group": one_group.step,
        "drop gradients, as the loop does": lambda: run.model.zero_grad(set_to_none=True),
        "drop gradients, as the optimizer does": lambda: one_group.zero_grad(set_to_none=True),
        "count the step's time": time_step,
        "write down the time, where a line is due": ledger.record,
        "set the learning rate": set_rate,
        "look that every module trains": lambda: all(module.training for module in run.modules),
        "digest of the batch": lambda: b"".join(batch.digest() for batch in batches),
        "count the step": lambda: progress.record(1.0, tokens_per_step(config), b"x" * 32),
        "make the log's row": lambda: known_row(config, 5, 1.0) | {"grad_norm": 1.0, "batch": "x"},
        "encode the row": lambda: encode_line(row),
        "encode and write the row": lambda: log.append(row),
        "rejected: train() in every step": lambda: run.model.train(),
    }
    found = dict.fromkeys(pieces, math.inf)
    for _ in range(100):  # in turn, so that a slow spell of the machine meets all of them
        for name, piece in pieces.items():
            found[name] = min(found[name], timeit.timeit(piece, number=30) / 30 * 1e6)
    log.close()
    ledger.close("finished")
    for name, own, bare in (
        ("decay for matrices alone: a second group", "AdamW of two groups", "AdamW of one group"),
        ("drop gradients module by module", "drop gradients, as the loop does",
         "drop gradients, as the optimizer does"),
    ):
        found[name] = found.pop(own) - found.pop(bare)
    last = "rejected: train() in every step"
    return {name: found[name] for name in sorted(found, key=lambda name: (name == last, -found[name]))}


def measure_saving(arguments: argparse.Namespace, config: ExperimentConfig, directory: Path) -> dict[str, Any]:
    """Steps per second with saves against none."""
    ways: dict[str, Callable[[], Cost]] = {
        "none": lambda: saved_run(config, "none", NEVER, arguments.steps, directory)}
    for every in arguments.every:
        for way in (*MODES, *PEERS):
            n_steps = max(every, -(-arguments.steps // every // 2) * every)
            ways[f"{way}, every {every}"] = (
                lambda way=way, every=every, n_steps=n_steps: saved_run(config, way, every, n_steps, directory))
    if not arguments.add:
        return rounds_of(ways, arguments.rounds, "none")
    base = ways.pop("none")
    rows = between(ways, base, arguments.rounds)
    return {name: row | {"tokens_per_step": tokens_per_step(config)} for name, row in rows.items()}


def measure_loop(
    arguments: argparse.Namespace, config: ExperimentConfig, n_steps: int, directory: Path
) -> dict[str, Any]:
    """The loop of `train` without saves against the bare loop."""
    ways: dict[str, Callable[[], Cost]] = {
        "bare": lambda: bare_run(config, n_steps),
        "train": lambda: saved_run(config, "none", NEVER, n_steps, directory)}
    rows: dict[str, Any] = dict(rounds_of(ways, arguments.loop_rounds, "bare"))
    for key in ("", "cpu_"):
        own, bare = (rows[name][f"{key}seconds_per_step"] for name in ("train", "bare"))
        rows[f"{key}extra_us"] = statistics.median(1e6 * (a - b) for a, b in zip(own, bare, strict=True))
        rows[f"{key}speed"] = 1 / rows["train"][f"{key}ratio"]
    return rows


def table(found: dict[str, Any]) -> str:
    """Format the figures for people."""
    about = found["about"]
    lines = [f"{about['parameters']:,} parameters, state of {about['state_bytes'] / 1e6:.0f} MB, {about['threads']} "
             f"threads on {about['cores']} cores; medians, and medians of the ratio within a round", "",
             f"{'saving':44}{'ms a step':>11}{'steps/s':>9}{'overhead':>10}{'CPU ms':>11}{'overhead':>10}"]
    for name, row in found["saving"].items():
        lines.append(f"{name:44}{row['median_s'] * 1e3:11.2f}{1 / row['median_s']:9.2f}{100 * (row['ratio'] - 1):9.1f}%"
                     f"{row['cpu_median_s'] * 1e3:11.2f}{100 * (row['cpu_ratio'] - 1):9.1f}%")
    lines += ["", f"{'the loop without saves':44}{'ms a step':>11}{'bare':>9}{'speed':>10}{'CPU speed':>11}"
                  f"{'extra us':>10}{'CPU us':>9}"]
    for size, row in found["loop"].items():
        own, bare = (row[name]["median_s"] * 1e3 for name in ("train", "bare"))
        lines.append(f"{size:44}{own:11.3f}{bare:9.3f}{row['speed']:10.3f}{row['cpu_speed']:11.3f}"
                     f"{row['extra_us']:10.0f}{row['cpu_extra_us']:9.0f}")
    lines += ["", f"{'a step of the small size, beside the bare loop':48}{'us':>7}"]
    lines += [f"{name:48}{value:7.1f}" for name, value in found["pieces_us"].items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds of the saves")
    parser.add_argument("--loop-rounds", type=at_least(1), default=9, help="rounds of the loop without saves")
    parser.add_argument("--steps", type=at_least(1), default=40, help="steps in a window, about")
    parser.add_argument("--every", type=at_least(1), nargs="+", default=[1, 10, 100], help="steps between saves")
    parser.add_argument("--threads", type=at_least(1), default=None,
                        help="CPU threads; default as many as torch would use")
    parser.add_argument("--batch-size", type=at_least(1), default=LARGE.batch_size,
                        help="sequences of 128 tokens in a step")
    parser.add_argument("--pieces", action="store_true", help="anew only what a step of the small size is spent on")
    parser.add_argument("--add", action="store_true", help="only saves at --every, beside those that the file has")
    parser.add_argument("--quick", action="store_true", help="a small model in place of the one of 10M parameters")
    parser.add_argument("--directory", type=folder, default=None, help="where to write; default temporary")
    parser.add_argument("--output", type=record, default=RESULTS / "training_overhead.json", help="JSON file")
    arguments = parser.parse_args()
    if (arguments.pieces or arguments.add) and not arguments.output.exists():
        parser.error("--pieces and --add renew a part of the record at --output, and there is none: measure all first")
    config = (QUICK if arguments.quick else LARGE).replace(batch_size=arguments.batch_size)
    with deterministic(threads=arguments.threads), tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory, run = Path(name), TrainingRun(config)
        about = {"parameters": n_parameters(run.model), "state_bytes": 12 * n_parameters(run.model),
                 "tokens_per_step": tokens_per_step(config), "threads": torch.get_num_threads(),
                 "cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine(),
                 "python": platform.python_version(), "rounds": arguments.rounds, "steps": arguments.steps,
                 "loop_rounds": arguments.loop_rounds, "quick": arguments.quick}
        del run
        found = json.loads(arguments.output.read_text()) if arguments.pieces or arguments.add else {}
        if arguments.add:
            found["saving"] |= measure_saving(arguments, config, directory)
        elif arguments.pieces:
            found["pieces_us"] = pieces_of_a_step(SMALL, directory)
        else:
            found = {
                "about": about,
                "loop": {"large": measure_loop(arguments, config, max(5, arguments.steps // 4), directory),
                         "small": measure_loop(arguments, SMALL, 300, directory)},
                "pieces_us": pieces_of_a_step(SMALL, directory),
                "saving": measure_saving(arguments, config, directory),
            }
    text = table(found)
    print("\n" + text)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    arguments.output.with_suffix(".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
