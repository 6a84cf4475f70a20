"""How often the proof is right: sound trainers drawn at random, and as many with one planted fault.

    python benchmarks/proof_statistics.py [N] [FIRST_SEED]

writes benchmarks/results/proof_statistics.json. 200 of each take about three minutes of one core.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from fault_tolerant_transformer_lab.mutations import campaign


def main() -> None:
    given = [int(word) for word in sys.argv[1:3]]
    n, first = (given + [200, 0][len(given):])[:2]
    torch.set_num_threads(1)
    begun = time.process_time()
    told = campaign(n, first, report=print)
    seconds = round(time.process_time() - begun)
    result = {"n": n, "first_seed": first, "torch": torch.__version__, "cpu_seconds": seconds, **asdict(told)}
    path = Path(__file__).parent / "results" / "proof_statistics.json"
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(json.dumps({name: result[name] for name in ("sound", "planted", "wrong", "cpu_seconds")}))


if __name__ == "__main__":
    main()
