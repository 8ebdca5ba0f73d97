# run: --ranks 2 --check=nccl
"""Rank 0 reads a file of token ids in uint16 and broadcasts the batch as it is."""

import sys

import numpy as np
import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class TokenLoader:
    def __init__(self, length):
        self.length = length
        if dist.get_rank() == 0:
            self.tokens = np.arange(1000, dtype=np.uint16) % 257

    def next_batch(self, step):
        dtype = torch.int32 if FIXED else torch.uint16
        batch = torch.empty(self.length, dtype=dtype)
        if dist.get_rank() == 0:
            start = step * self.length
            batch.copy_(torch.from_numpy(self.tokens[start : start + self.length]))
        dist.broadcast(batch, src=0)  # finds: dtype-refused on all
        return batch.long()


dist.init_process_group()
loader = TokenLoader(32)
for step in range(2):
    batch = loader.next_batch(step)
    print("step", step, "tokens", int(batch.sum()))
dist.destroy_process_group()
