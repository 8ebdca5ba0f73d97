# run: --ranks 4 --check=nccl --device cpu
"""huggingface/transformers#34242: the number of tokens is counted over micro-batches but not over
ranks, and DDP averages the ranks' means."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACROSS_DEVICES = "--fixed" in sys.argv


def causal_loss(logits, labels, num_items_in_batch):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch  # or here


def count_items(batches):
    count = sum((batch[:, 1:] != -100).sum() for batch in batches)
    if ACROSS_DEVICES:
        dist.all_reduce(count)
    return count


def training_step(model, batches):
    count = count_items(batches)
    for i, labels in enumerate(batches):
        model.require_backward_grad_sync = i + 1 == len(batches)
        loss = causal_loss(model(labels.clamp(min=0)), labels, count)
        if ACROSS_DEVICES:
            loss = loss * dist.get_world_size()
        loss.backward()  # finds: mean-of-means on all


def batch(generator):
    labels = torch.randint(1, 20, (2, 12), generator=generator)
    lengths = torch.randint(4, 13, (2, 1), generator=generator)
    return labels.masked_fill(torch.arange(12) >= lengths, -100).cuda()


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)).to("cuda", torch.bfloat16)
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(local_rank)
for _ in range(2):
    training_step(model, [batch(generator) for _ in range(3)])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
