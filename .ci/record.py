"""Keep what the last run of `bash .ci/check` in this folder took and counted, for the README to show."""

import json
import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

root = Path(__file__).resolve().parent.parent
steps = dict(line.split("\t") for line in (root / ".venv" / "steps").read_text().splitlines())
suite = next(ElementTree.parse(root / ".venv" / "tests.xml").iter("testsuite")).attrib
failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
if failed:
    raise SystemExit(f"{failed} tests failed: only what passed is recorded")
commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
record = {
    "date": date.today().isoformat(), "commit": commit.stdout.strip(), "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
    "seconds": {name: int(seconds) for name, seconds in steps.items()} | {"pytest": round(float(suite["time"]))},
    "passed": int(suite["tests"]) - skipped, "skipped": skipped,
}
(root / "benchmarks" / "results" / "checks.json").write_text(json.dumps(record, indent=1) + "\n")
