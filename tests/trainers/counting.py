"""The smallest script that has something to lose: a number, saved as JSON, in ways that do and do not survive.

`--how` says how a checkpoint is written. It starts in 30 milliseconds, and the tests of script mode kill it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--how", default="safe")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--resume", default="")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--linger", type=float, default=0.0)
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)
path = os.path.join(args.out, "ckpt" if "folder" in args.how else "ckpt.json")
if args.how == "escapes":  # a helper that leaves the process group, as a tracker or a launcher does
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(os.path.join(args.out, "helper.pid"), "a") as file:
        file.write(f"{helper.pid}\n")


def sync(name):
    descriptor = os.open(name, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(state):
    text = json.dumps(state)
    if args.how == "in place":
        with open(path, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync(args.out)
    elif args.how == "native":
        with subprocess.Popen(["dd", f"of={path}", "status=none"], stdin=subprocess.PIPE) as writer:
            time.sleep(0.05)  # the file is open, and empty
            writer.communicate(text.encode())
    elif args.how == "quiet":
        try:
            with open(path + ".tmp", "w") as file:
                file.write(text)
            os.replace(path + ".tmp", path)
        except OSError:
            pass
    elif args.how == "folder in place":
        os.makedirs(path, exist_ok=True)
        for name in ("a", "b"):
            with open(os.path.join(path, f"{name}.json"), "w") as file:
                file.write(text)
    elif args.how == "folder renamed":
        os.makedirs(path + ".tmp")
        with open(os.path.join(path + ".tmp", "a.json"), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync(path + ".tmp")
        shutil.rmtree(path, ignore_errors=True)
        os.rename(path + ".tmp", path)
        sync(args.out)
    elif args.how in ("elsewhere", "beside", "process number"):  # a name that no other run has, opened twice
        name = f"{path}.{os.getpid()}.tmp"
        if args.how != "process number":
            descriptor, name = tempfile.mkstemp(dir=args.out if args.how == "beside" else None)
            os.close(descriptor)
        with open(name, "w") as file:
            file.write(text)
        shutil.move(name, path)
    else:
        with open(path + ".tmp", "w") as file:
            file.write(text)
            file.flush()
            if args.how != "no file sync":
                os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
        if args.how != "no parent sync":
            sync(args.out)


state = {"step": 0, "total": 1.0}
found = args.resume or (os.path.join(path, "a.json") if "folder" in args.how else path)
if os.path.exists(found):
    with open(found) as file:
        state = json.load(file)
if args.how == "hopeless":
    sys.exit("nothing can be done")
while state["step"] < args.steps:
    state = {"step": state["step"] + 1, "total": state["total"] * 1.1 + state["step"]}
    save(state)
    time.sleep(args.pause)
time.sleep(args.linger)  # as the end of a process does that has imported much
