# run: --ranks 2 --check
"""A language model under DDP, with padded sequences: each rank's loss is the mean over its own
tokens, of which ranks have different numbers."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

IGNORED = -100


def collate(sequences):
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(
        [s.roll(-1) for s in sequences], batch_first=True, padding_value=IGNORED
    )
    return tokens, labels


def batches(rank, steps):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths = torch.randint(3, 12, (4,), generator=generator).tolist()
        yield collate([torch.randint(1, 30, (n,), generator=generator) for n in lengths])


def language_model_loss(logits, labels, fixed):
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if not fixed:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED)  # or here
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total * dist.get_world_size() / count


dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens, labels in batches(dist.get_rank(), 3):
    loss = language_model_loss(model(tokens), labels, fixed="--fixed" in sys.argv)
    optimizer.zero_grad()
    loss.backward()  # finds: mean-of-means on all
    optimizer.step()
dist.destroy_process_group()
