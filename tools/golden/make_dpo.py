#!/usr/bin/env python3
"""Writes the golden case of DPO: TRL's loss, figures and gradients on three pairs of answers.

Needs Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0, trl 1.16.0 and safetensors:

    oracle/bin/python tools/golden/make_dpo.py tests/golden/base tests/golden/dpo.safetensors

The model is that of the first folder, a golden case of `make_golden.py`, and the reference the same
with every parameter times SCALE. TRL's own DPOTrainer computes the loss. The file holds
    prompt_ids.I, chosen_ids.I, rejected_ids.I   of pair I
    loss []                                      and TRL's figures rewards/.. and logps/.. []
    grad.NAME                                    d loss / d NAME for each parameter
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, ZayaForCausalLM
from trl import DPOConfig, DPOTrainer

SCALE = 0.95
BETA = 0.5
LENGTHS = ((5, 7, 4), (9, 3, 8), (2, 6, 6))  # of each pair: prompt, chosen, rejected


class Tokenized(DPOTrainer):
    """Takes ids as they are."""

    def _prepare_dataset(self, dataset, *rest):
        return dataset


def load(folder: Path, scale: float) -> ZayaForCausalLM:
    """The model, with the balancing biases that its file has: `from_pretrained` resets some."""
    model = ZayaForCausalLM.from_pretrained(folder).float()
    saved = load_file(folder / "model.safetensors")
    buffers = {name for name, _ in model.named_buffers() if name.endswith("balancing_biases")}
    model.load_state_dict({name: saved[name] for name in buffers}, strict=False)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model.eval()


def main() -> None:
    """Computes the loss of one batch and writes the case."""
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("model", type=Path)
    args.add_argument("out", type=Path)
    a = args.parse_args()

    model, reference = load(a.model, 1.0), load(a.model, SCALE)
    generator = torch.Generator().manual_seed(0)
    names, pairs = ("prompt_ids", "chosen_ids", "rejected_ids"), []
    for lengths in LENGTHS:
        ids = [
            torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist()
            for n in lengths
        ]
        pairs.append(dict(zip(names, ids, strict=True)))
    words = {"<pad>": 0, "<eos>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<eos>")), pad_token="<pad>", eos_token="<eos>"
    )
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(folder, beta=BETA, bf16=False, use_cpu=True)
        trainer = Tokenized(
            model,
            reference,
            config,
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
        )
        batch = trainer.data_collator(pairs)
        loss = trainer.compute_loss(model, batch)
    loss.backward()
    # of a model without dropout, which is not set to train
    figures = {name: x[0] for name, x in trainer._metrics["eval"].items()}
    case = {
        f"{name}.{i}": torch.tensor(pair[name]) for i, pair in enumerate(pairs) for name in names
    }
    case |= {"loss": loss.detach()}
    case |= {k: torch.tensor(x) for k, x in figures.items() if k.startswith(("rewards/", "logps/"))}
    case |= {f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    save_file({name: x.clone().contiguous() for name, x in case.items()}, a.out)
    print({name: round(float(x), 6) for name, x in case.items() if not x.shape})


if __name__ == "__main__":
    main()
