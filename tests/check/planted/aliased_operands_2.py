# run: --ranks 4 --check=nccl --device cpu
"""Mixture of experts: tokens are exchanged in place to save memory."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class ExpertParallel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.expert = nn.Linear(width, width, bias=False)

    def exchange(self, tokens):
        target = torch.empty_like(tokens) if FIXED else tokens
        dist.all_to_all_single(target, tokens)  # finds: aliased-operands on all
        return target

    @torch.no_grad()
    def forward(self, tokens):
        routed = self.exchange(tokens)
        return self.exchange(torch.relu(self.expert(routed)))


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(dist.get_rank())
layer = ExpertParallel(6).to(device=device, dtype=torch.bfloat16)
tokens = torch.randn(8, 6).to(device=device, dtype=torch.bfloat16)
print("combined", layer(tokens).float().norm().item())
dist.destroy_process_group()
