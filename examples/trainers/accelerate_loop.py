"""A loop of one's own with Accelerate's `save_state` and `load_state`: `python accelerate_loop.py --out out`."""

import argparse
import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--mended", action="store_true", help="choose batches by the step, and make no loader's iterator")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

set_seed(7)
tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                                   bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
accelerator = Accelerator(cpu=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

saved = sorted(args.out.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
step = 0
if saved:
    accelerator.load_state(str(saved[-1]))
    step = int(saved[-1].name.split("-")[1])


def batches(step):
    "What is left of an epoch: by the loader, or mended, by a permutation that depends on the epoch alone."
    epoch, done = divmod(step, len(loader))
    if args.mended:
        order = torch.randperm(16, generator=torch.Generator().manual_seed(7 + epoch))
        return [(tokens[rows],) for rows in order.view(4, 4)[done:]]
    loader.set_epoch(epoch)
    return accelerator.skip_first_batches(loader, done) if done else loader


while step < args.steps:
    for (batch,) in batches(step):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        step += 1
        accelerator.save_state(str(args.out / f"step-{step}"))
        if step == args.steps:
            break
