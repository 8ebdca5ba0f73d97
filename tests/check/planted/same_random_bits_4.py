# run: --ranks 4 --check=gloo
"""A tracker keeps one generator for tensor-parallel regions; its seed is made with the rank in the
data-parallel group in place of that in the tensor-parallel one."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn as nn


class RandomStates:
    def __init__(self):
        self.states = {}

    def add(self, name, seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.states[name] = torch.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name="tensor-parallel"):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


RANDOM = RandomStates()


def seed_all(seed, tp_rank, dp_rank, fixed):
    torch.manual_seed(seed + dp_rank)
    RANDOM.add("tensor-parallel", seed + 2718 + (tp_rank if fixed else dp_rank))


class ParallelMLP(nn.Module):
    def __init__(self, width, group):
        super().__init__()
        self.group = group
        size = dist.get_world_size(group)
        with RANDOM.fork("weights"):
            self.up = nn.Linear(width, 4 * width // size)
            self.down = nn.Linear(4 * width // size, width, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        h = torch.relu(self.up(x))
        with RANDOM.fork():
            h = self.dropout(h)  # finds: same-random-bits on all
        return x + distnn.all_reduce(self.down(h), group=self.group)


dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
tp_rank, dp_rank = rank % 2, rank // 2
RANDOM.add("weights", 10 + tp_rank)
seed_all(1, tp_rank, dp_rank, fixed="--fixed" in sys.argv)
model = ParallelMLP(8, groups[dp_rank])
x = torch.randn(6, 8)
model(x).square().mean().backward()
dist.destroy_process_group()
