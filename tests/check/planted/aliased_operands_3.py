# run: --ranks 4 --check=nccl --device cpu
"""Each rank keeps its gradient shard in the front of the buffer that is being scattered."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class ShardedGradient:
    def __init__(self, size, device):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.buffer = torch.zeros(size, device=device)
        self.length = size // self.world

    def reduce(self):
        start = self.rank * self.length if FIXED else 0
        shard = self.buffer[start : start + self.length]
        dist.reduce_scatter_tensor(shard, self.buffer)  # finds: aliased-operands on 1, 2, 3
        return shard


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
gradient = ShardedGradient(16, torch.device("cuda", local_rank))
generator = torch.Generator().manual_seed(local_rank)
gradient.buffer.copy_(torch.randn(16, generator=generator))
print("shard", gradient.reduce().tolist())
dist.destroy_process_group()
