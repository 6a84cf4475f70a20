"""Nothing reaches the run's folder unseen: what the seam records of whole training runs is what the kernel saw.

Runs in each mode, and some whose checkpoints are longer than 8 MiB. A save in the background writes while the run
appends to its log, so the two are not in one order: what happens in the store's directory and what happens outside it
are compared each for itself.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_publication import STRACED, from_strace, whole_lines

CODE = """
    import functools, json, sys
    from fault_tolerant_transformer_lab import training
    from fault_tolerant_transformer_lab.crashes import SOAK, NotingDisk
    from fault_tolerant_transformer_lab.training import deterministic, train
    disk = NotingDisk()
    config = SOAK.replace(checkpoint_mode=sys.argv[3], d_model=int(sys.argv[4]))
    training.Ledger = functools.partial(training.Ledger, disk=disk)  # has a real disk of its own else
    with deterministic(threads=1):
        for steps in (5, 8):  # and resumes
            train(config.replace(steps=steps), sys.argv[1], disk=disk, progress_bar=False)
    records = [(r.name, str(r.path), r.target and str(r.target), r.offset, r.n_bytes) for r in disk.records]
    open(sys.argv[2], "w").write(json.dumps([disk.direct, records]))
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


def in_the_store(entries):
    "What happened in the directory of checkpoints, and what happened elsewhere."
    inner = [entry for entry in entries if "checkpoints" in Path(entry[1]).parts]
    return inner, [entry for entry in entries if entry not in inner]


@pytest.mark.parametrize(("mode", "d_model"), [("sync", 16), ("async", 16), ("overlapped", 16), ("sync", 256),
                                               ("overlapped", 256)])
def test_the_kernel_saw_of_a_training_run_what_the_seam_recorded(tmp_path, not_run, mode, d_model):
    if not shutil.which("strace"):
        not_run("strace is not installed")
    root, log, said = tmp_path / "run", tmp_path / "trace", tmp_path / "said.json"
    root.mkdir()
    command = ["strace", "-f", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace={','.join('?' + c for c in STRACED)}",
               "-o", log, sys.executable, "-c", textwrap.dedent(CODE), root, said,
               mode, str(d_model)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in done.stderr.lower() and not said.exists():
        not_run(f"tracing is not permitted here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr
    direct, records = json.loads(said.read_text())
    recorded = [(name, os.path.relpath(path, root), target and os.path.relpath(target, root), offset, n_bytes)
                for name, path, target, offset, n_bytes in records if name not in ASKED_ONLY]
    # The lines of the ledger are written by a descriptor whose path the seam does not know; publishing it is compared.
    inside = [[entry for entry in entries if not entry[1].startswith("..") and entry[1] != "ledger.jsonl"]
              for entries in (recorded, seen_by_the_kernel(log.read_text(), root))]
    assert in_the_store(inside[1]) == in_the_store(inside[0])
    assert mode != "sync" or inside[1] == inside[0]  # nothing else writes meanwhile: one order
    ends = [offset + n_bytes for name, _, _, offset, n_bytes in inside[1] if name == "write"]
    assert (max(ends) > 8 << 20) == (d_model > 16) and direct <= (d_model > 16)
    names = [name for name, *_ in inside[1]]
    assert names.count("append") == 8 and names.count("open_append") == 2
    assert {"create", "write", "fsync", "replace", "sync_directory", "unlink", "make_directory"} <= set(names)


BYPASSES = {  # what reaches a file without passing the seam: the calls by which the kernel sees it, and how it is done
    "written": (("append",), "open(at, 'r+b', buffering=0).write(b'x')"),
    "mapped": (("mmap",), "file = open(at, 'r+b'); mmap.mmap(file.fileno(), 4096)[0] = 1"),
    "copied": (("sendfile", "copy_file_range"), "shutil.copyfile(other, at)"),
    "cut": (("truncate",), "os.truncate(at, 0)"),
    "linked": (("link", "linkat"), "os.link(other, at + '2')"),
    "renamed": (("rename", "renameat", "renameat2", "replace"), "os.rename(at, at + '2')"),
    "removed": (("unlink", "unlinkat"), "os.unlink(at)"),
    "opened": (("chmod", "fchmodat"), "os.chmod(at, 0o644)"),
    "dated": (("utimensat",), "os.utime(at)"),
}


def test_what_passes_by_the_seam_is_seen(tmp_path, not_run):
    if not shutil.which("strace"):
        not_run("strace is not installed")
    root, log = tmp_path / "run", tmp_path / "trace"
    root.mkdir()
    for path in (tmp_path / "other", *(root / name for name in BYPASSES)):
        path.write_bytes(bytes(4096))
    code = f"import mmap, os, shutil\nother = {str(tmp_path / 'other')!r}\n" + "".join(
        f"at = {str(root / name)!r}\n{done}\n" for name, (_, done) in BYPASSES.items())
    command = ["strace", "-f", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace={','.join('?' + c for c in STRACED)}",
               "-o", log, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in done.stderr.lower() and not log.exists():
        not_run(f"tracing is not permitted here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr
    seen = seen_by_the_kernel(log.read_text(), root)
    missed = [name for name, (calls, _) in BYPASSES.items()
              if not any(call in calls and name in f"{path} {target}" for call, path, target, *_ in seen)]
    assert missed == []
