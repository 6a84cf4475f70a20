"""Hugging Face's Trainer on a tiny random GPT-2, resumed from its last checkpoint: `python hf_trainer.py --out out`.

`--mended` resumes from the newest checkpoint that is whole.
"""

import argparse
import json
import os
from contextlib import suppress
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--mended", action="store_true", help="pass over a checkpoint that is not whole")
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)


class Tokens(Dataset):
    "Sixteen sequences of random tokens: an epoch of four steps."

    tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def newest_whole(folder):
    "The newest checkpoint whose `trainer_state.json` is whole, which Trainer writes after the other files of a resume."
    whole = {}
    for path in Path(folder).glob("checkpoint-*"):
        with suppress(OSError, ValueError):
            whole[json.loads((path / "trainer_state.json").read_text())["global_step"]] = str(path)
    return whole[max(whole)] if whole else None


set_seed(7)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                                   bos_token_id=0, eos_token_id=0))
trainer = Trainer(model=model, train_dataset=Tokens(), args=TrainingArguments(
    output_dir=args.out, max_steps=args.steps, save_steps=1, logging_steps=1, per_device_train_batch_size=4,
    learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, seed=7))
trainer.train(resume_from_checkpoint=newest_whole(args.out) if args.mended else get_last_checkpoint(args.out))
