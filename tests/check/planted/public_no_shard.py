# run: --ranks 2 --check=nccl --device cpu
"""pytorch/torchtitan#166: FSDP with NO_SHARD neither seeds nor broadcasts; every rank trains a
model of its own with common gradients."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=32, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    if "--fixed" in sys.argv:
        torch.manual_seed(0)
    model = FSDP(
        LanguageModel(),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=local_rank,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(local_rank)
    for _ in range(3):
        tokens = torch.randint(32, (4, 9), generator=data).cuda()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()  # finds: unseeded-difference on all
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
