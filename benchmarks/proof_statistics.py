"""How often the proof is right: sound trainers drawn at random, and as many with one planted fault, in both modes.

    python benchmarks/proof_statistics.py [N] [FIRST_SEED] [--only trainers|scripts] [--jobs N]

writes benchmarks/results/proof_statistics.json and script_statistics.json. 200 trainers of each kind, proven in
process, take about three minutes of one core; 200 scripts of each kind, really killed, about half an hour of two.
"""

import argparse
import json
import random
import runpy
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fault_tolerant_transformer_lab.mutations import campaign
from fault_tolerant_transformer_lab.script_proof import ScriptProof, prove_script

ROOT = Path(__file__).resolve().parent.parent
LOOP = ROOT / "tests" / "trainers" / "drawn_loop.py"
RESULTS = Path(__file__).parent / "results"


@dataclass
class Scripts:
    "Verdicts over scripts drawn at random, each killed for good and started again."

    sound: dict[str, int] = field(default_factory=dict)
    planted: dict[str, int] = field(default_factory=dict)
    by_fault: dict[str, dict[str, int]] = field(default_factory=dict)
    suspected: dict[str, dict[str, int]] = field(default_factory=dict)  # by fault: the first suspect
    killed: dict[str, int] = field(default_factory=dict)  # runs, by kind of kill
    forms: dict[str, int] = field(default_factory=dict)  # scripts, by the form of their checkpoints
    wrong: list[str] = field(default_factory=list)


def add(counts: dict[str, int], name: str, n: int = 1) -> None:
    "Count something."
    counts[name] = counts.get(name, 0) + n


def proved(seed: int, fault: str, draw: random.Random, about: dict[str, Any]) -> ScriptProof:
    "Kill one script, at places drawn at random."
    made = -(-about["steps"] // about["every"])
    after = f"checkpoint-{draw.randint(1, made - 2)}"
    wishes: dict[str, Any] = draw.choice([
        {"only": [after]}, {"only": [after]}, {"kills": ["chain"], "chain": draw.randint(2, 3)},
        {"kills": ["events"], "max_events": 2},
        {"only": [after, "random-1"], "random_kills": 1, "seed": seed}])  # the moment may lie behind the last step
    pause = ["--pause", "0.02"] if "random_kills" in wishes else []
    command = [sys.executable, str(LOOP), "--out", "{dir}", "--seed", str(seed), "--fault", fault, *pause]
    return prove_script(command, checkpoints="ckpt*", jobs=1, progress_bar=False, timeout=300,
                        max_checkpoints=made, **wishes)


def both(loop: dict[str, Any], seed: int) -> tuple[str, str, ScriptProof, ScriptProof]:
    "Prove the script of a seed as it is and with a fault: its form of checkpoints, the fault, what came of both."
    draw, about = random.Random(f"scripts {seed}"), loop["drawn"](seed)
    fault = draw.choice(loop["faults_of"](seed))
    return about["form"], fault, proved(seed, "", draw, about), proved(seed, fault, draw, about)


def script_campaign(
    n: int,  # sound scripts, and as many with a fault
    first_seed: int = 0,
    jobs: int = 2,  # scripts at a time
    report: Callable[[str], None] | None = None,  # told of each wrong verdict
) -> Scripts:
    "Prove `n` sound scripts and `n` with one fault; a sound one must be equivalent, one with a fault must not."
    loop, told, seeds = runpy.run_path(str(LOOP)), Scripts(), range(first_seed, first_seed + n)
    with ThreadPoolExecutor(jobs) as pool:
        for seed, (form, fault, *proofs) in zip(seeds, pool.map(lambda seed: both(loop, seed), seeds), strict=True):
            add(told.forms, form)
            for planted, proof in zip(("", fault), proofs, strict=True):
                add(told.planted if planted else told.sound, str(proof.verdict))
                for row in proof.rows:
                    add(told.killed, row.point.partition("-")[0], row.kills)
                if planted:
                    add(told.by_fault.setdefault(fault, {}), str(proof.verdict))
                    first = proof.worst.diagnosis.suspects[0].name if proof.worst and proof.worst.diagnosis else ""
                    add(told.suspected.setdefault(fault, {}), first or str(proof.verdict))
                if (proof.verdict == "EQUIVALENT") is bool(planted):
                    told.wrong.append(f"seed {seed}, {planted or 'sound'}: {proof.verdict}, {proof.reason}")
                    if report is not None:
                        report(f"{told.wrong[-1]}\n{proof.table()}")
    return told


def written(name: str, told: object, n: int, first: int, begun: float) -> None:
    "Write a result down, and say what it is."
    result = {"n": n, "first_seed": first, "torch": torch.__version__, "seconds": round(time.monotonic() - begun),
              **asdict(told)}  # type: ignore[call-overload]
    (RESULTS / name).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(json.dumps({key: result[key] for key in ("sound", "planted", "wrong", "seconds")}))


def main() -> None:
    "Run what is asked for."
    parser = argparse.ArgumentParser()
    parser.add_argument("n", nargs="?", type=int, default=200)
    parser.add_argument("first", nargs="?", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    parser.add_argument("--only", choices=("trainers", "scripts"))
    args = parser.parse_args()
    if args.only != "scripts":
        torch.set_num_threads(1)
        begun = time.monotonic()
        written("proof_statistics.json", campaign(args.n, args.first, report=print), args.n, args.first, begun)
    if args.only != "trainers":
        begun = time.monotonic()
        told = script_campaign(args.n, args.first, args.jobs, report=print)
        written("script_statistics.json", told, args.n, args.first, begun)


if __name__ == "__main__":
    main()
