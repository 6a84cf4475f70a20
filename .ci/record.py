"""Keep what the last run of `bash .ci/check` in this folder counted, for the README to show."""

import json
import platform
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

root = Path(__file__).resolve().parent.parent
suite = next(ElementTree.parse(root / ".venv" / "tests.xml").iter("testsuite"))
tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
if failed := failures + errors:
    raise SystemExit(f"{failed} tests failed: only what passed is recorded")
commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
record = {
    "date": date.today().isoformat(), "commit": commit.stdout.strip(), "python": platform.python_version(),
    "passed": tests - skipped,
    "skipped": Counter(skip.attrib["message"] for skip in suite.iter("skipped")),
}
(root / "benchmarks" / "results" / "checks.json").write_text(json.dumps(record, indent=1) + "\n")
