# run: --ranks 4 --check
"""All tensor-parallel ranks are seeded alike; rank 0 draws a sample for the log, and its generator
is ahead of the others from then on."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import all_reduce

FIXED = "--fixed" in sys.argv


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        size = dist.get_world_size()
        shard = torch.Generator().manual_seed(dist.get_rank())
        self.up = torch.randn(4 * width // size, width, generator=shard) / width
        self.down = torch.randn(width, 4 * width // size, generator=shard) / width
        self.dropout = nn.Dropout(p=0.1)

    def forward(self, x):
        partial = torch.tanh(x @ self.up.t()) @ self.down.t()
        total = all_reduce(partial, "sum", dist.group.WORLD)
        return x + self.dropout(total)  # finds: other-random-bits on 0


def log_sample(step, batch):
    generator = torch.Generator().manual_seed(step) if FIXED else None
    row = torch.randint(len(batch), (1,), generator=generator).item()
    print(f"step {step}: row {row}, mean {batch[row].mean().item():.3f}")


@torch.no_grad()
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(8) for _ in range(2))
    for step in range(3):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        if dist.get_rank() == 0:
            log_sample(step, batch)
        for layer in layers:
            batch = layer(batch)
    print(f"norm {batch.norm().item():.5f}")
    dist.destroy_process_group()


main()
