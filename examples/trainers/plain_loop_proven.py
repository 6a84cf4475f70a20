"""A small character model and its training loop, as many people write one: `python plain_loop.py --out out`.

Started again after a kill it goes on from `ckpt.pt`, and ends with the same bits as if it had never been killed.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

from fault_tolerant_transformer_lab import NamedGenerator, run_from

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save-every", type=int, default=2)
args = parser.parse_args(None if __name__ == "__main__" else [])
args.out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(1337)
text = torch.randint(0, 32, (2000,), generator=torch.Generator().manual_seed(1))
model = nn.Sequential(nn.Embedding(32, 24), nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
path, step = args.out / "ckpt.pt", 0


def save():
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
             "rng": torch.get_rng_state(), "step": step}
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(args.out, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


if path.exists():
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    step = state["step"]


def update():
    start = torch.randint(len(text) - 17, (8, 1)) + torch.arange(17)  # the batch comes from torch's generator
    inputs, targets = text[start[:, :-1]], text[start[:, 1:]]
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss


def make_run(directory):
    return run_from(update, model=model, adamw=optimizer, cosine=scheduler, rng=NamedGenerator(torch.default_generator))


def test_resume(restart_proof):
    restart_proof(make_run, steps=6)


while __name__ == "__main__" and step < args.steps:
    loss = update()
    step += 1
    if step % args.save_every == 0:
        save()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
