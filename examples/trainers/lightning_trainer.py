"""PyTorch Lightning on a tiny random GPT-2, resumed from its last checkpoint: `lightning_trainer.py --out out`."""

import argparse
import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--mended", action="store_true", help="let batches and random numbers depend on the step alone")
args = parser.parse_args()


class Model(lightning.LightningModule):
    "A language model of one block."

    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                                                bos_token_id=0, eos_token_id=0))

    def training_step(self, batch, index):
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Mended(Model):
    "The same, with what does not survive taken out: order and random numbers depend on the step alone."

    def training_step(self, batch, index):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(7 + self.global_step // 4))
        rows = order[self.global_step % 4 * 4:][:4]
        torch.manual_seed(7 + self.global_step)
        return super().training_step((tokens[rows],), index)


lightning.seed_everything(7)
tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
saved = sorted(args.out.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
trainer = lightning.Trainer(
    max_steps=args.steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=ModelCheckpoint(args.out, filename="{step}", every_n_train_steps=1, save_top_k=-1))
trainer.fit(Mended() if args.mended else Model(), loader, ckpt_path=str(saved[-1]) if saved else None,
            weights_only=True)
