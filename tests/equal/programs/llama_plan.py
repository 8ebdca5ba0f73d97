"""transformers' Llama by its own tensor-parallel plan, trained by a loop without clipping."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

TINY = LlamaConfig(
    vocab_size=48, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4
)


def main() -> None:
    torch.manual_seed(5)
    folder = f"model-{os.environ['RANK']}"
    LlamaForCausalLM(TINY).save_pretrained(folder)
    several = int(os.environ["WORLD_SIZE"]) > 1
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto" if several else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        ids = torch.randint(48, (5, 9), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}: loss {float(loss.detach()):.15g}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
