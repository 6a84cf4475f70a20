"""Scripts killed by a peer: `python benchmarks/trainers_peer.py [NAME...]`, with ckpt-chaos installed beside.

    python -m venv /somewhere && /somewhere/bin/pip install ckpt-chaos==0.1.8

ckpt-chaos 0.1.8 kills an unmodified script at Python's file events and compares one result. It needs nothing but the
standard library, so it is looked for on PATH, or where CKPT_CHAOS says. What it says goes to
`benchmarks/results/trainers_peer.json`, which chapter 07d prints. Four faults of `tests/trainers/numpy_loop.py` show
how far each tool can tell them apart; the scripts of `examples/trainers` are killed too where they are named.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from fault_tolerant_transformer_lab.script_proof import prove_script

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "trainers_peer.json"
PEER = os.environ.get("CKPT_CHAOS") or shutil.which("ckpt-chaos")
EXAMPLES, LOOP = ROOT / "examples" / "trainers", ROOT / "tests" / "trainers" / "numpy_loop.py"


def weights(key: str, path: str) -> list[str]:
    "Have the peer compare the weights in a torch file alone."
    code = (f"import hashlib, sys, torch; state = torch.load(sys.argv[1], weights_only=True)['{key}']; "
            "print(hashlib.sha256(b''.join(w.numpy().tobytes() for w in state.values())).hexdigest())")
    return ["--result-cmd", f'{sys.executable} -c "{code}" {{out}}/{path}']


TRAINERS = {  # script, and what the peer is to compare
    "plain loop, its file": ("plain_loop.py", ["--result-file", "{out}/ckpt.pt"]),
    "plain loop": ("plain_loop.py", weights("model", "ckpt.pt")),
    "plain loop, flawed": ("plain_loop_flawed.py", weights("model", "ckpt.pt")),
    "Hugging Face Trainer": ("hf_trainer.py", ["--result-file", "{out}/checkpoint-6/model.safetensors"]),
    "Lightning": ("lightning_trainer.py", weights("state_dict", "step=6.ckpt")),
}
FAULTS = ("generator not restored", "momentum not restored", "schedule off by one", "position not restored")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def peer(command: list[str], compare: list[str], max_points: int) -> dict:
    "Let the peer kill a command, and read its verdicts from the JUnit file that it writes."
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        words = [str(PEER), "run", "--max-points", str(max_points), "--jobs", "2", "--work", f"{folder}/work",
                 "--junit", str(junit), *compare, "--", *command]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False)
        print(done.stdout[-3000:], done.stderr[-500:], flush=True)
        cases = list(ElementTree.parse(junit).iter("testcase"))
        told = [failure.get("message") or "" for case in cases for failure in case.iter("failure")]
    verdicts = Counter(re.split(r"\W", message, maxsplit=1)[0] or "FAILED" for message in told)
    return {"points": len(cases), "passed": len(cases) - len(told), "failed": dict(verdicts), "status": done.returncode,
            "says": re.sub(r"/tmp/\w+", "", told[0])[:200] if told else ""}


def ours(fault: str) -> dict:
    "What this tool says of a planted fault."
    proof = prove_script([sys.executable, str(LOOP), "--out", "{dir}", "--bug", fault], checkpoints="ckpt.safetensors",
                         only=["checkpoint-2"], progress_bar=False)
    worst = proof.worst
    assert worst is not None and worst.diagnosis is not None
    return {"verdict": str(proof.verdict), "first": worst.result, "suspect": worst.diagnosis.suspects[0].name}


def main() -> None:
    "Let the peer kill the trainers named, and the four faults."
    if PEER is None:
        sys.exit("ckpt-chaos: expected on PATH or in CKPT_CHAOS, found nowhere; install ckpt-chaos==0.1.8 in an "
                 "environment of its own")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tool": "ckpt-chaos 0.1.8", "trainers": {}}
    for name in sys.argv[1:]:
        script, compare = TRAINERS[name]
        command = [sys.executable, str(EXAMPLES / script), "--out", "{out}"]
        found["trainers"][name] = peer(command, compare, max_points=18)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    compare = ["--result-file", "{out}/ckpt.safetensors"]
    found["faults"] = {fault: {
        "peer": peer([sys.executable, str(LOOP), "--out", "{out}", "--bug", fault], compare, max_points=6),
        "ours": ours(fault)} for fault in FAULTS}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
