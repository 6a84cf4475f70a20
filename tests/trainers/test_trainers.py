"""The scripts of `examples/trainers`, killed for good. The plain ones in every run; the libraries' take minutes and are
run with FTTL_LONG=1. What `benchmarks/trainers.py` found of all of them is committed."""

import configparser
import difflib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab import script_proof
from fault_tolerant_transformer_lab.script_proof import prove_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "trainers"
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "trainers.json").read_text())
needs_strace = pytest.mark.skipif(bool(script_proof._no_strace()), reason=script_proof._no_strace() or "none")


def killed(script, checkpoints, point, **wishes):
    "Kill an example after a whole checkpoint."
    name, *more = script.split()
    return prove_script([sys.executable, str(EXAMPLES / name), "--out", "{dir}", *more], checkpoints=checkpoints,
                        only=[point], progress_bar=False, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                        **wishes)


@needs_strace
@pytest.mark.parametrize(("script", "verdict"), [  # the loop of the first is that of plain_loop.py, see below
    ("plain_loop_proven.py", "EQUIVALENT"), ("plain_loop_flawed.py", "DIVERGENT")])
def test_a_plain_loop_is_killed_and_started_again(script, verdict):
    proof = killed(script, "ckpt.pt", "checkpoint-1", steps_flag="--steps", steps=4)
    assert proof.verdict == verdict, proof
    flaws = ["written in place", "file not synced", "folder not synced"] if verdict == "DIVERGENT" else []
    assert [finding.kind for finding in proof.findings] == flaws


@pytest.mark.long
@needs_strace
@pytest.mark.parametrize(("script", "checkpoints", "package", "verdict"), [
    ("hf_trainer.py", "checkpoint-*", "transformers", "EQUIVALENT"),
    ("accelerate_loop.py", "step-*", "accelerate", "DIVERGENT"),
    ("accelerate_loop.py --mended", "step-*", "accelerate", "EQUIVALENT"),
    ("lightning_trainer.py", "step=*.ckpt", "lightning", "DIVERGENT"),
    ("lightning_trainer.py --mended", "step=*.ckpt", "lightning", "EQUIVALENT")])
def test_a_librarys_trainer_is_killed_within_an_epoch_after_a_whole_checkpoint(script, checkpoints, package, verdict):
    pytest.importorskip(package)
    proof = killed(script, checkpoints, "checkpoint-2")
    assert proof.verdict == verdict, proof


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_committed_names_a_verdict_a_version_and_no_machine(name):
    found = RESULTS[name]
    assert found["verdict"] in ("EQUIVALENT", "DIVERGENT", "LOST_WORK", "ERROR", "NOT_EXERCISED")
    assert re.fullmatch(r"(torch|transformers|accelerate|lightning) \d+\.\d+\.\d+", found["version"])
    assert "/tmp/" not in json.dumps(found) and found["rows"]
    if found["verdict"] == "DIVERGENT":
        words = shlex.split(found["again"])
        assert found["first_difference"] and found["suspects"]
        assert words[words.index("prove-script") + 1].startswith("--checkpoints")


@pytest.mark.parametrize(("extra", "script"), [
    ("hf", "hf_trainer.py"), ("accelerate", "accelerate_loop.py"), ("lightning", "lightning_trainer.py")])
def test_each_librarys_script_has_an_extra_with_all_that_it_imports(extra, script):
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini")
    needed = {name: set(settings["DEFAULT"][f"{name}_requirements"].split())
              for name in ("hf", "accelerate", "lightning", "trainers")}
    assert needed["trainers"] == needed["hf"] | needed["accelerate"] | needed["lightning"]
    words = re.findall(r"^(?:import|from) (\w+)", (EXAMPLES / script).read_text(), re.MULTILINE)
    imported = set(words) & {"transformers", "accelerate", "lightning"}
    assert imported and imported <= {re.split("[><=]", word)[0] for word in needed[extra]}


# A newcomer's path: install, add at most ten lines or none, run one command


def code_of(path):
    "The lines of a script, without the empty ones."
    return [line for line in path.read_text().splitlines() if line.strip()]


def test_a_newcomers_script_is_sixty_lines_and_ten_are_added_for_the_proof():
    before = EXAMPLES / "plain_loop.py"
    assert len(before.read_text().splitlines()) <= 60 and "fault_tolerant" not in before.read_text()
    steps = difflib.ndiff(code_of(before), code_of(EXAMPLES / "plain_loop_proven.py"))
    added = [line for line in steps if line.startswith("+ ")]
    assert 0 < len(added) <= 10, added


def test_ten_lines_and_one_command_give_a_verdict(tmp_path):
    shutil.copy(EXAMPLES / "plain_loop_proven.py", tmp_path)
    plugin = ["-p", "fault_tolerant_transformer_lab.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *plugin, "--restart-proof-quick", "plain_loop_proven.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "test_resume: EQUIVALENT, 6 steps" in done.stdout, done.stdout + done.stderr
    text = (tmp_path / "plain_loop_proven.py").read_text()
    assert text.count("adamw=optimizer, ") == 1
    (tmp_path / "plain_loop_proven.py").write_text(text.replace("adamw=optimizer, ", ""))
    done = subprocess.run([sys.executable, "-m", "pytest", *plugin, "--restart-proof-quick", "plain_loop_proven.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "suspect learning rate" in done.stdout, done.stdout + done.stderr  # AdamW holds it


@needs_strace
def test_no_line_and_one_command_give_a_verdict(tmp_path):
    shutil.copy(EXAMPLES / "plain_loop.py", tmp_path)
    command = [sys.executable, "-m", "fault_tolerant_transformer_lab", "prove-script", "--checkpoints", "ckpt.pt",
               "--only", "checkpoint-1", "--", sys.executable, "plain_loop.py", "--out", "{dir}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "EQUIVALENT: all 1 killed runs" in done.stdout, done.stdout + done.stderr
