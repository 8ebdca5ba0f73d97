# run: --ranks 3 --check --device cpu
"""Sharded linear layers whose weights are gathered ahead of time: the gather is waited for on the
prefetch stream alone, and the weight is used on the default stream."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

FIXED = "--fixed" in sys.argv


class ShardedLinear(nn.Module):
    def __init__(self, features, world):
        super().__init__()
        self.shard = nn.Parameter(torch.randn(features // world, features, device="cuda") / 4)
        self.full = None

    def prefetch(self, stream):
        rows, features = self.shard.shape
        self.full = self.shard.new_empty(rows * dist.get_world_size(), features)
        work = dist.all_gather_into_tensor(self.full, self.shard.data, async_op=True)  # or here
        with torch.cuda.stream(stream):
            work.wait()

    def forward(self, x, stream):
        if FIXED:
            torch.cuda.current_stream().wait_stream(stream)
        return x @ self.full.t()  # finds: stream-race on all

    def reshard(self):
        self.full = None


@torch.inference_mode()
def generate(layers, x, stream):
    layers[0].prefetch(stream)
    for i, layer in enumerate(layers):
        if i + 1 < len(layers):
            layers[i + 1].prefetch(stream)
        x = torch.tanh(layer(x, stream))
        layer.reshard()
    return x


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layers = nn.ModuleList(ShardedLinear(12, dist.get_world_size()) for _ in range(3))
    stream = torch.cuda.Stream()
    y = generate(layers, torch.ones(2, 12, device="cuda"), stream)
    print(f"rank {dist.get_rank()}: {y.abs().mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
