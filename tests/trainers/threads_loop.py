"""A loop that adds up a long vector, and with `--drift` does so with one thread more once it is resumed."""

import argparse
import os

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--drift", action="store_true")
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)
path = os.path.join(args.out, "ckpt.pt")
generator = torch.Generator().manual_seed(1)
data = torch.randn(4, 100_003, generator=generator)
state = {"model": {"weight": torch.zeros(4)}, "optimizer": {"momentum": torch.zeros(4)}, "step": 0}
resumed = os.path.exists(path)
if resumed:
    state = torch.load(path, weights_only=True)
torch.set_num_threads(2 if resumed and args.drift else 1)
while state["step"] < 3:
    weight, momentum = state["model"]["weight"], state["optimizer"]["momentum"]
    errors = (data - weight[:, None]) * data.abs()
    gradient = torch.stack([row.sum() for row in errors]) / data.shape[1]  # torch splits so long a sum over its threads
    momentum.mul_(0.9).add_(gradient)
    weight.add_(momentum, alpha=0.1)
    state["step"] += 1
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)
