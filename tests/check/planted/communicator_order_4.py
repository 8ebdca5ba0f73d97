# run: --ranks 2 --check=nccl --device cpu
"""Gradients are reduced by hooks, dense and expert ones on two groups, in two orders."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
SUM = dist.ReduceOp.SUM


class Block(nn.Module):
    def __init__(self, dense_group, expert_group, expert_first):
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        self.expert = nn.Linear(4, 4, bias=False)
        self.expert_first = expert_first
        self.works = []
        self.reduce_with(self.dense.weight, dense_group)
        self.reduce_with(self.expert.weight, expert_group)

    def reduce_with(self, parameter, group):
        def hook(p):
            gradient = p.grad.div_(group.size())
            work = dist.all_reduce(gradient, SUM, group, True)  # finds: communicator-order on all
            self.works.append(work)

        parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, x):
        if self.expert_first:
            expert = self.expert(x)
            return self.dense(x) + expert
        dense = self.dense(x)
        return dense + self.expert(x)

    def finish(self):
        while self.works:
            self.works.pop().wait()


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
expert_group = dist.new_group([0, 1])
torch.manual_seed(0)
block = Block(dist.group.WORLD, expert_group, expert_first=local_rank == 1 and not FIXED).cuda()
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
x = torch.randn(5, 4, generator=torch.Generator().manual_seed(local_rank)).cuda()
block(x).square().mean().backward()
block.finish()
optimizer.step()
print("weights", block.dense.weight.norm().item(), block.expert.weight.norm().item())
dist.destroy_process_group()
