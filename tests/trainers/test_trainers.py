"""The scripts of `examples/trainers`, killed. They take minutes: run with FTTL_LONG=1; what was found is committed."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab import script_proof
from fault_tolerant_transformer_lab.script_proof import prove_script

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "trainers.json").read_text())
long = pytest.mark.skipif(os.environ.get("FTTL_LONG") != "1", reason="long version not run: give FTTL_LONG=1")
needs_strace = pytest.mark.skipif(bool(script_proof._no_strace()), reason=script_proof._no_strace() or "none")


@long
@needs_strace
@pytest.mark.parametrize(("script", "checkpoints", "package", "verdict"), [
    ("plain_loop.py", "ckpt.pt", "torch", "EQUIVALENT"), ("plain_loop_flawed.py", "ckpt.pt", "torch", "DIVERGENT"),
    ("hf_trainer.py", "checkpoint-*", "transformers", "EQUIVALENT"),
    ("accelerate_loop.py", "step-*", "accelerate", "DIVERGENT"),
    ("accelerate_loop.py --mended", "step-*", "accelerate", "EQUIVALENT"),
    ("lightning_trainer.py", "step=*.ckpt", "lightning", "DIVERGENT"),
    ("lightning_trainer.py --mended", "step=*.ckpt", "lightning", "EQUIVALENT")])
def test_a_trainer_is_killed_within_an_epoch_after_a_whole_checkpoint(script, checkpoints, package, verdict):
    pytest.importorskip(package)
    name, *more = script.split()
    proof = prove_script([sys.executable, str(ROOT / "examples" / "trainers" / name), "--out", "{dir}", *more],
                         checkpoints=checkpoints, only=["checkpoint-2"], progress_bar=False,
                         environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert proof.verdict == verdict, proof


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_committed_names_a_verdict_a_version_and_no_machine(name):
    found = RESULTS[name]
    assert found["verdict"] in ("EQUIVALENT", "DIVERGENT", "LOST_WORK", "ERROR", "NOT_EXERCISED")
    assert re.fullmatch(r"(torch|transformers|accelerate|lightning) \d+\.\d+\.\d+", found["version"])
    assert "/tmp/" not in json.dumps(found) and found["rows"]
    if found["verdict"] == "DIVERGENT":
        assert found["first_difference"] and found["suspects"] and found["again"].startswith("fttl prove-script")


def test_the_first_example_is_as_short_as_a_newcomers_script():
    lines = (ROOT / "examples" / "trainers" / "plain_loop.py").read_text().splitlines()
    assert len(lines) <= 60 and not any("fault_tolerant" in line for line in lines)  # no line is added for the proof
