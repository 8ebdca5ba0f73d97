"""transformers' Trainer on a tiny Llama, by DDP, FSDP2 or tensor parallelism."""

import argparse
import os
from typing import Any

import digest
import numpy as np
import torch
from accelerate.utils import DistributedType
from torch.utils.data import Dataset
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
WRAPPED = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
FSDP2: dict[str, Any] = {"fsdp": True, "fsdp_config": WRAPPED}


class Tokens(Dataset):
    """Sequences that count on from a random token."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(64, (length, 1), generator=generator)
        self.ids = (start + torch.arange(9)) % 64

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    hits = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
    return {"accuracy": float(np.mean(hits)), "sequences": float(len(hits))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "fsdp2", "tp"], default="ddp")
    mode = parser.parse_args().mode
    digest.watch()
    torch.manual_seed(5)
    model = LlamaForCausalLM(TINY)
    if mode == "tp":
        folder = f"model-{os.environ['RANK']}"
        model.save_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(FSDP2 if mode == "fsdp2" else {}),
    )
    if mode != "ddp":  # on CPUs Accelerate would use DDP
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    train, held_out = Tokens(200, 1), Tokens(37, 2)
    trainer = Trainer(model, arguments, None, train, held_out, compute_metrics=accuracy)
    trainer.train()
    for entry in trainer.state.log_history:
        kept = [name for name in entry if not name.endswith(("runtime", "second"))]
        digest.say("log", {name: entry[name] for name in kept})


if __name__ == "__main__":
    main()
