# run: --ranks 3 --check
"""bigscience-workshop/Megatron-DeepSpeed#276: the first tensor-parallel rank alone has a
DataLoader, whose iterator draws a seed from the generator that dropout uses."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn as nn
from torch.utils.data import DataLoader


class ParallelLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        up, down = torch.randn(3 * width, width) / 4, torch.randn(width, 3 * width) / 4
        self.up = nn.Parameter(up.chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())
        self.hidden_dropout = nn.Dropout(0.3)

    def forward(self, x):
        y = distnn.all_reduce(torch.relu(x @ self.up.t()) @ self.down.t())
        return x + self.hidden_dropout(y)  # finds: other-random-bits on 0


def batches(steps, generator):
    iterator = None
    if dist.get_rank() == 0:
        data = torch.randn(4 * steps, 6, generator=torch.Generator().manual_seed(1))
        iterator = iter(DataLoader(data, batch_size=4, generator=generator))
    for _ in range(steps):
        batch = next(iterator) if iterator is not None else torch.empty(4, 6)
        dist.broadcast(batch, src=0)
        yield batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    layer = ParallelLayer(6)
    for batch in batches(2, torch.Generator() if args.fixed else None):
        y = layer(batch)
        y.square().mean().backward()
        print(f"norm {y.norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
