# run: --ranks 4 --check=gloo
"""FSDP by hand with weights in float8: the quantized shards are gathered in their own dtype."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Float8Shard:
    def __init__(self, weight):
        world, rank = dist.get_world_size(), dist.get_rank()
        shard = weight.chunk(world)[rank].contiguous()
        self.scale = weight.abs().max() / 448.0
        self.data = (shard / self.scale).to(torch.float8_e4m3fn)

    def gather(self):
        world = dist.get_world_size()
        data = self.data.view(torch.uint8) if FIXED else self.data
        full = torch.empty(data.shape[0] * world, data.shape[1], dtype=data.dtype)
        dist.all_gather_into_tensor(full, data)  # finds: dtype-refused on all
        return full.view(torch.float8_e4m3fn).float() * self.scale


dist.init_process_group()
generator = torch.Generator().manual_seed(0)
weight = torch.randn(8, 4, generator=generator)
error = (Float8Shard(weight).gather() - weight).abs().max()
print("largest error", error.item())
dist.destroy_process_group()
