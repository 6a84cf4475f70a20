"""Nothing reaches the run's folder unseen: what the seam records of a whole training run is what the kernel saw."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_publication import STRACED, from_strace, whole_lines

CODE = """
    import functools, json, sys
    from fault_tolerant_transformer_lab import training
    from fault_tolerant_transformer_lab.crashes import SOAK
    from fault_tolerant_transformer_lab.publication import RecordingDisk
    from fault_tolerant_transformer_lab.training import deterministic, train
    disk = RecordingDisk()
    training.Ledger = functools.partial(training.Ledger, disk=disk)  # has a real disk of its own else
    with deterministic(threads=1):
        for steps in (5, 8):  # and resumes
            train(SOAK.replace(steps=steps), sys.argv[1], disk=disk, progress_bar=False)
    records = [(r.name, str(r.path), r.target and str(r.target), r.offset, r.n_bytes) for r in disk.records]
    open(sys.argv[2], "w").write(json.dumps(records))
"""
ASKED_ONLY = ("open_directory", "close", "free_bytes", "list_names")


def seen_by_the_kernel(text, root):
    "As `from_strace`, and a file that is opened to grow, and what is appended to it."
    found = []
    for line in whole_lines(text):
        appended = re.match(r"write\(\d+<([^>]*)>.* = (\d+)$", line)
        opened = re.match(r'openat\([^<]*(?:<([^>]*)>)?, "([^"]*)", [^)]*O_APPEND', line)
        if appended and appended[1].startswith(f"{root}/"):
            found.append(("append", os.path.relpath(appended[1], root), None, None, int(appended[2])))
        elif opened and str(root) in line:
            path = os.path.join(opened[1] or "/", opened[2])
            found.append(("open_append", os.path.relpath(path, root), None, None, None))
        else:
            found += from_strace(f"1 {line}", root)
    return found


def test_the_kernel_saw_of_a_training_run_what_the_seam_recorded(tmp_path, not_run):
    if not shutil.which("strace"):
        not_run("strace is not installed")
    root, log, said = tmp_path / "run", tmp_path / "trace", tmp_path / "said.json"
    root.mkdir()
    command = ["strace", "-f", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace={','.join('?' + c for c in STRACED)}",
               "-o", log, sys.executable, "-c", textwrap.dedent(CODE), root, said]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in done.stderr.lower() and not said.exists():
        not_run(f"tracing is not permitted here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr
    recorded = [(name, os.path.relpath(path, root), target and os.path.relpath(target, root), offset, n_bytes)
                for name, path, target, offset, n_bytes in json.loads(said.read_text()) if name not in ASKED_ONLY]
    # The lines of the ledger are written by a descriptor whose path the seam does not know; publishing it is compared.
    inside = [[entry for entry in entries if not entry[1].startswith("..") and entry[1] != "ledger.jsonl"]
              for entries in (recorded, seen_by_the_kernel(log.read_text(), root))]
    assert inside[1] == inside[0]
    names = [name for name, *_ in inside[1]]
    assert names.count("append") == 8 and names.count("open_append") == 2
    assert {"create", "write", "fsync", "replace", "sync_directory", "unlink", "make_directory"} <= set(names)
