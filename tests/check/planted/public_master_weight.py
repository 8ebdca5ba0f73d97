# run: --ranks 2 --check=nccl
"""facebookresearch/fairscale#1173: the whole weight of a column-parallel layer is gathered from
transposed shards, which are not contiguous."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


def gather_last_dimension(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)  # finds: not-contiguous on all
    return torch.cat(parts, dim=-1)


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, fixed):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs // dist.get_world_size(), inputs))
        self.fixed = fixed

    def forward(self, x):
        return gather_last_dimension(x @ self.weight.detach().t())

    def master_weight(self):
        shard = self.weight.detach().t()
        if self.fixed:
            shard = shard.contiguous()
        return gather_last_dimension(shard).t()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    layer = ColumnParallelLinear(5, 8, args.fixed)
    x = torch.ones(3, 5)
    error = (layer(x) - x @ layer.master_weight().t()).abs().max()
    if dist.get_rank() == 0:
        print(f"largest difference {error.item():.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
