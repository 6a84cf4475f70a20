"""Kill trainers that nobody here wrote, and write down what the proof says: `python benchmarks/trainers.py [NAME...]`.

Each script of `examples/trainers` is killed after a checkpoint in the middle of an epoch, after one at an epoch's end,
before some system calls of a save, and with a full disk. The results go to `benchmarks/results/trainers.json`, from
which chapter 07d prints its table.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

from fault_tolerant_transformer_lab.script_proof import prove_script

ROOT = Path(__file__).resolve().parent.parent
MAX_EVENTS = 6
RESULTS = ROOT / "benchmarks" / "results" / "trainers.json"
TRAINERS = {
    "plain loop": ("plain_loop.py", (), "ckpt.pt", "torch"),
    "plain loop, flawed": ("plain_loop_flawed.py", (), "ckpt.pt", "torch"),
    "Hugging Face Trainer": ("hf_trainer.py", (), "checkpoint-*", "transformers"),
    "Hugging Face Trainer, mended": ("hf_trainer.py", ("--mended",), "checkpoint-*", "transformers"),
    "Accelerate": ("accelerate_loop.py", (), "step-*", "accelerate"),
    "Accelerate, mended": ("accelerate_loop.py", ("--mended",), "step-*", "accelerate"),
    "Lightning": ("lightning_trainer.py", (), "step=*.ckpt", "lightning"),
    "Lightning, mended": ("lightning_trainer.py", ("--mended",), "step=*.ckpt", "lightning"),
}


def proved(name: str, jobs: int) -> dict:
    "Run the proof on one trainer."
    script, more, checkpoints, package = TRAINERS[name]
    plain = name.startswith("plain")
    points = ["checkpoint-1"] if plain else ["checkpoint-2", "checkpoint-4"]
    command = [sys.executable, str(ROOT / "examples" / "trainers" / script), "--out", "{dir}", *more]
    proof = prove_script(command, checkpoints=checkpoints, only=[*points, "event-*", "disk-full"],
                         max_events=MAX_EVENTS, jobs=jobs, progress_bar=False,
                         environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    print(f"== {name}\n{proof.table()}\n", flush=True)
    worst = proof.worst
    diagnosis = worst.diagnosis if worst else None
    python, root = str(Path(sys.executable)), f"{ROOT}/"
    return {
        "version": f"{package} {version(package).split('+')[0]}", "verdict": str(proof.verdict),
        "reason": re.sub(r"/tmp/fttl-script-\w+", "", proof.reason.replace(root, "")),
        "first_difference": worst.result if worst and diagnosis else "",
        "suspects": [str(suspect) for suspect in diagnosis.suspects] if diagnosis else [],
        "rows": [{"point": row.point, "place": row.place, "outcome": row.outcome,
                  "detail": re.sub(r"/tmp/fttl-script-\w+", "", row.detail.replace(root, ""))} for row in proof.rows],
        "findings": [str(finding) for finding in proof.findings],
        "again": worst.command.replace(root, "").replace(python, "python") if worst else "",
        "processes": proof.facts["processes"],
    }


def main() -> None:
    "Prove the trainers named, or all, and keep what was found of the others."
    names = sys.argv[1:] or list(TRAINERS)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        found[name] = proved(name, jobs=2)
        RESULTS.write_text(json.dumps({key: found[key] for key in TRAINERS if key in found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
