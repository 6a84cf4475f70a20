"""A training script without torch, which starts in a tenth of a second: momentum, noise, shuffled data, checkpoints.

`--bug` plants one fault, as it is made in earnest. The tests of script mode kill this script.
"""

import argparse
import json
import os
import sys
import time

import numpy as np
from safetensors.numpy import load_file, save_file

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--bug", default="")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--series", action="store_true", help="a file for each checkpoint, not one for all")
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)

data = np.random.default_rng(1).normal(size=(12, 4)).astype(np.float32)
start = np.random.default_rng(int.from_bytes(os.urandom(4), "little") if args.bug == "unseeded" else 2)
weights = start.normal(size=4).astype(np.float32)
momentum, ema, noise, step, rate, position = np.zeros_like(weights), weights.copy(), np.random.default_rng(3), 0, 0.1, 0


def where(step):
    return os.path.join(args.out, f"step-{step}.safetensors" if args.series else "ckpt.safetensors")


def publish(tensors, path, notes=None):
    if args.bug == "in place":
        save_file(tensors, path, notes)
        return
    save_file(tensors, path + ".tmp", notes)
    if args.bug != "no fsync":
        with open(path + ".tmp", "rb") as file:
            os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
    if args.bug not in ("no folder sync", "no fsync"):
        folder = os.open(args.out, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def save():
    tensors = {"model.weight": weights, "ema.weight": ema, "optimizer.momentum": momentum}
    left_out = {"momentum not saved": "optimizer.momentum", "EMA outside": "ema.weight"}.get(args.bug)
    tensors.pop(left_out, None)
    notes = {"step": str(step), "lr": repr(rate), "position": str(position),
             "rng": json.dumps(noise.bit_generator.state)}
    notes.pop({"generator not saved": "rng", "position not saved": "position"}.get(args.bug), None)
    publish(tensors, where(step), notes)


found = [s for s in range(args.steps, 0, -1) if os.path.exists(where(s))]
if found and args.bug == "refuses":
    print("checkpoint: expected the same machine, got another one; start anew")
    sys.exit(2)
if found and args.bug == "breaks":
    raise RuntimeError("cannot restore")
if found and args.bug != "starts over":
    from safetensors import safe_open

    tensors = load_file(where(found[0]))
    with safe_open(where(found[0]), "np") as file:
        notes = file.metadata()
    weights, step = tensors["model.weight"].copy(), int(notes["step"])
    if args.bug not in ("momentum not saved", "momentum not restored"):
        momentum = tensors["optimizer.momentum"].copy()
    ema = weights.copy() if args.bug in ("EMA outside", "EMA not restored") else tensors["ema.weight"].copy()
    if args.bug not in ("generator not saved", "generator not restored"):
        noise.bit_generator.state = json.loads(notes["rng"])
    position = int(notes.get("position", 0))
    if args.bug == "position not restored":
        position = 0
    if args.bug == "batch repeated":
        position -= 1
    if args.bug == "epoch boundary" and step % 3 == 0:
        position = 0 if position % 12 == 0 else position
        noise.normal()
    rate = 0.05 if args.bug == "rate changed" else float(notes["lr"])
    if args.bug == "schedule off by one":
        rate *= 0.9
    if args.bug == "step off by one":
        step += 1

while step < args.steps:
    rows = [(7 * (position + i)) % 12 for i in range(3)]
    batch = data[rows]
    position += 3
    gradient = batch.T @ (batch @ weights - 1) / 3 + noise.normal(size=4).astype(np.float32) * 0.1
    if args.bug == "nothing learned":
        gradient[:] = 0
    momentum = (0.9 * momentum + gradient).astype(np.float32)
    weights = (weights - np.float32(rate) * momentum).astype(np.float32)
    ema = (0.9 * ema + 0.1 * weights).astype(np.float32)
    rate *= 0.9
    step += 1
    time.sleep(args.pause)
    if step % args.every == 0 or step == args.steps:
        save()
publish({"ema.weight": ema}, os.path.join(args.out, "final-ema.safetensors"))
