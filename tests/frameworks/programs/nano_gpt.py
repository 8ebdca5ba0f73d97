"""A training script in the manner of nanoGPT: DDP, no_sync, clipping, a schedule, evaluation."""

import contextlib
import math
import os

import digest
import numpy as np
import tiny
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 8
batch_size, block_size = 4, 16
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 3, 12
eval_interval, eval_iters = 6, 3
ddp = int(os.environ.get("RANK", -1)) != -1

digest.watch()
if ddp:
    init_process_group(backend="gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    gradient_accumulation_steps = max(1, gradient_accumulation_steps // ddp_world_size)
else:
    ddp_rank, ddp_world_size, master_process = 0, 1, True
torch.manual_seed(1337 + ddp_rank)
corpus = np.random.default_rng(0).integers(tiny.VOCABULARY, size=10_000).astype(np.uint16)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(corpus) - block_size, (batch_size,)).tolist()
    rows = [torch.from_numpy(corpus[at : at + block_size + 1].astype(np.int64)) for at in starts]
    batch = torch.stack(rows)
    return batch[:, :-1], batch[:, 1:]


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model: nn.Module = tiny.Decoder()
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)
raw_model = model.module if isinstance(model, DDP) else model


@torch.no_grad()
def estimate_loss() -> float:
    raw_model.eval()
    losses = [tiny.loss(model(x), y).item() for x, y in (get_batch() for _ in range(eval_iters))]
    raw_model.train()
    return sum(losses) / len(losses)


X, Y = get_batch()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0 and master_process:
        digest.say(f"loss at {it}", estimate_loss())
    for micro in range(gradient_accumulation_steps):
        wait = ddp and micro < gradient_accumulation_steps - 1
        with model.no_sync() if wait else contextlib.nullcontext():
            loss = tiny.loss(model(X), Y) / gradient_accumulation_steps
            X, Y = get_batch()
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
