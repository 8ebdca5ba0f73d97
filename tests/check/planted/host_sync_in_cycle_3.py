# run: --ranks 4 --check=nccl --device cpu
"""A 2 x 2 grid scales by row maxima and column maxima, diagonal ranks rows first, others not."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv
MAX = dist.ReduceOp.MAX


def make_groups(rank):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


def maximum(block, group, stream):
    with torch.cuda.stream(stream):
        largest = block.abs().max()
        dist.all_reduce(largest, MAX, group)  # finds: host-sync-in-cycle on all
    stream.synchronize()
    return float(largest)


rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
row, column = make_groups(rank)
stream = torch.cuda.Stream()
block = torch.randn(3, 3, generator=torch.Generator().manual_seed(rank)).cuda()
torch.cuda.synchronize()
if rank in (0, 3) or FIXED:
    scales = [maximum(block, group, stream) for group in (row, column)]
else:
    scales = [maximum(block, group, stream) for group in (column, row)][::-1]
print("row", scales[0], "column", scales[1])
dist.destroy_process_group()
