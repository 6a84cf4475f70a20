"""What the benchmarks left on record: it is whole, and within the bars that it names. Nothing is timed here."""

import importlib
import itertools
import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab.launch import MatrixCell
from fault_tolerant_transformer_lab.training import BOUNDARIES

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COST, OVERHEAD, RANKS = (json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
                  for name in ("checkpoint_cost", "training_overhead", "distributed_cost"))
RATIOS = {  # by hand: what is divided by what, and the bar
    "save": [("CheckpointStore.save", "raw buffered write + fsync + rename", 1.10),
             ("CheckpointStore.save", "torch.save + fsync + rename", 0.75)],
    "blocking": [("save(wait=False)", "one copy into touched memory", 1.15),
                 ("save(wait=False)", "DCP async_save, default", 0.35),
                 ("save(wait=False, overlap=True)", "one copy into touched memory", 0.25)],
    "restore": [("CheckpointStore.restore", "raw read in place + BLAKE3 on one core", 1.0)],
}


@pytest.mark.parametrize("part", RATIOS)
def test_the_recorded_costs_are_within_their_bars(part):
    rows, about = COST[part]["rows"], COST[part]["about"]
    assert about["state_bytes"] > 1.48e9 and about["rounds"] >= 5
    for name, other, bar in RATIOS[part]:
        pairs = zip(rows[name]["seconds"], rows[other]["seconds"], strict=True)
        assert statistics.median(a / b for a, b in pairs) <= bar, (name, other)
    assert all(reached <= bar for reached, bar in COST[part]["bars"].values())
    kept = {"save": "CheckpointStore.save", "restore": "CheckpointStore.restore"}.get(part)
    assert kept is None or rows[kept]["extra_bytes"] <= 64 << 20


def test_the_recorded_headers_are_read_in_milliseconds():
    headers = COST["headers"]
    assert headers["file_bytes"] > 1.48e9 and "model.token_embedding_weight" in headers["differing"]
    assert all(row["median_s"] < 0.1 for row in headers["rows"].values())


def test_the_recorded_headers_stay_within_what_a_tensor_may_take():
    growth = COST["growth"]
    assert len(growth["size"]) >= 4 and len(growth["tensors"]) >= 4
    assert all(row["header_bytes"] < 4096 + 260 * (row["n"] + 16) for row in growth["tensors"])
    none, million = growth["history"]
    assert (none["steps"], million["steps"]) == (0, 1_000_000)
    assert 8_000_000 <= million["file_bytes"] - none["file_bytes"] <= 10_000_000


def test_the_recorded_growth_covers_all_sizes_and_is_linear():
    growth = COST["growth"]
    assert {10, 4000} <= {row["mb"] for row in growth["size"]}
    assert {100, 100_000} <= {row["n"] for row in growth["tensors"]}
    for rows, size in ((growth["size"], "mb"), (growth["tensors"], "n")):
        large = [row for row in rows if row[size] >= rows[-1][size] / 10]
        for cost in ("save_s", "verify_s"):
            prices = [row[cost] / row[size] for row in large]
            assert max(prices) < 3 * min(prices), (size, cost, prices)  # what grows by the square would be at ten
    assert all(row["extra_bytes"] <= 64 << 20 for row in growth["size"])
    assert all(row["extra_bytes"] <= 64 << 20 for row in growth["tensors"] if row["n"] <= 30_000)
    assert growth["tensors"][-1]["header_bytes"] < 260 * 100_016 and growth["tensors"][-1]["read_manifest_s"] < 10


def test_the_recorded_cost_of_ranks_is_whole():
    assert list(RANKS["steps"]) == list(RANKS["saves"]["small"]) == list(RANKS["saves"]["large"]) == ["1", "2", "4"]
    for size, row in RANKS["saves"]["large"].items():  # the parts add up to the state
        whole = RANKS["saves"]["large"]["1"]["bytes_per_rank"]
        assert whole <= int(size) * row["bytes_per_rank"] < 1.05 * whole
        assert row["save_to_raw"] < RANKS["saves"]["small"][size]["save_to_raw"]


def test_the_recorded_overhead_is_whole_and_within_its_bars():
    assert OVERHEAD["about"]["parameters"] >= 10_000_000 and not OVERHEAD["about"]["quick"]
    saving = {name: row["ratio"] for name, row in OVERHEAD["saving"].items()}
    ways = ("sync", "async", "overlapped", "DCP async_save", "DCP async_save, reused stager")
    assert set(saving) == {"none", *(f"{way}, every {every}" for way in ways for every in (1, 10, 100))}
    assert saving["async, every 10"] <= 1.03
    assert saving["async, every 10"] < min(saving[f"{way}, every 10"] for way in ways[3:])
    assert OVERHEAD["loop"]["large"]["speed"] >= 0.97


def test_the_benchmark_of_costs_runs_at_any_size_and_keeps_other_parts(tmp_path):
    output = tmp_path / "cost.json"
    output.write_text(json.dumps({"growth": "kept"}))
    done = subprocess.run([sys.executable, BENCHMARKS / "checkpoint_cost.py", "--mb", "2", "--rounds", "1",
                           "--directory", tmp_path, "--output", output], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["growth"] == "kept" and {"save", "blocking", "restore", "headers", "about"} < set(found)
    assert {name for part in RATIOS for *names, _ in RATIOS[part] for name in names} <= {
        name for part in RATIOS for name in found[part]["rows"]}
    assert done.stdout.count("bar ") == sum(len(found[part]["bars"]) for part in RATIOS) == 8


@pytest.mark.parametrize(("program", "given"), [
    ("checkpoint_cost", ["--mb", "0"]), ("checkpoint_cost", ["--mb", "-5"]), ("checkpoint_cost", ["--rounds", "0"]),
    ("checkpoint_cost", ["--only", "everything"]), ("checkpoint_cost", ["--only", ""]),
    ("checkpoint_cost", ["--max-mb", "-1"]), ("checkpoint_cost", ["--max-tensors", "1e5"]),
    *[(program, [*only, option, name]) for program, only in (
        ("checkpoint_cost", ["--mb", "1"]), ("training_overhead", ["--quick"]))
      for option, name in (("--directory", "none"), ("--directory", "text"), ("--output", "text"), ("--output", "list"),
                           ("--output", "."), ("--output", ""), ("--output", "link"))],
    *[("training_overhead", ["--quick", option, wrong]) for option in (
        "--rounds", "--loop-rounds", "--steps", "--every", "--threads", "--batch-size") for wrong in ("0", "-1", "x")],
    ("training_overhead", ["--pieces", "--output", "none"]), ("training_overhead", ["--add", "--output", "none"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else value)
def test_an_argument_that_no_benchmark_can_use_is_refused_before_anything_is_measured(
        program, given, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    benchmark = importlib.import_module(program)
    monkeypatch.setattr(sys, "argv", [program, *given])
    with pytest.raises(SystemExit) as refused:
        benchmark.main()
    [said] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert refused.value.code == 2 and given[-2] in said
    assert sorted(tmp_path.iterdir()) == before


def test_the_recorded_matrix_is_the_full_one_and_every_cell_is_equal():
    matrix = json.loads((BENCHMARKS / "results" / "distributed_matrix.json").read_text())
    assert matrix["extent"] == "full" and all(cell["equal"] and cell["struck"] for cell in matrix["cells"])
    groups = Counter((cell["parallel"], cell["size"]) for cell in matrix["cells"])
    assert set(groups) == set(itertools.product(("ddp", "fsdp", "elastic"), (1, 2, 3, 4)))
    for parallel, size in groups:
        of_group = [cell["places"] for cell in matrix["cells"] if (cell["parallel"], cell["size"]) == (parallel, size)]
        where = " ".join(place for places in of_group for place in places)
        assert [name for name in BOUNDARIES if name not in where] == [], (parallel, size)
        assert any(len(places) == 3 for places in of_group)  # a chain
        assert [name for name in BOUNDARIES if f"launcher {name}" in where] == (
            list(BOUNDARIES) if size == 2 else ["before_forward"])
    assert all(cell["resumed_from"] in (2, 4) for cell in matrix["cells"])  # one that begins anew proves no resume


@pytest.mark.parametrize(("change", "again"), [({}, {("fsdp", 1)}), ({"code": {}}, None), ({"steps": 5}, None),
                                               ({"extent": "part"}, None)])
def test_a_matrix_goes_on_from_groups_that_were_fine_of_the_same_code(change, again, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    matrix = importlib.import_module("distributed_matrix")
    everything = set(itertools.product(matrix.MODES, (1, 2, 3, 4)))
    cells = [{"parallel": mode, "size": size, "places": ["x"], "struck": True, "equal": True, "problem": "",
              "resumed_from": None if (mode, size) == ("fsdp", 1) and nth else 2}  # one of two began anew
             for mode, size in sorted(everything) for nth in range(2)]
    record = tmp_path / "record.json"
    sound = {"extent": "full", "steps": matrix.STEPS, "code": matrix.code(), "cells": cells}
    record.write_text(json.dumps(sound | change))
    ran = []

    def group(parallel, size, full):
        ran.append((parallel, size))
        return [MatrixCell(parallel, size, ("y",), True, 2, True)]

    monkeypatch.setattr(matrix, "group", group)
    monkeypatch.setattr(sys, "argv", ["matrix", "--full", "--resume", "--output", str(record)])
    assert matrix.main() == 0 and set(ran) == (again or everything) and len(ran) == len(set(ran))
    found = json.loads(record.read_text())
    assert found["code"] == matrix.code() and {"launch", "sharded", "distributed_matrix"} <= set(found["code"])
    assert len(found["cells"]) == (2 * 11 + 1 if again else 12)
