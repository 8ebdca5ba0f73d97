# run: --ranks 3 --check=nccl --device cpu
"""A module-level state of parallel groups: new_group stands behind the test for membership."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class ParallelState:
    tensor_group = None

    @classmethod
    def initialize(cls, tensor_ranks):
        rank = dist.get_rank()
        if FIXED:
            group = dist.new_group(tensor_ranks)
            cls.tensor_group = group if rank in tensor_ranks else None
            return
        if rank not in tensor_ranks:
            return
        cls.tensor_group = dist.new_group(tensor_ranks)  # finds: group-made-by-some on 1, 2

    @classmethod
    def reduce(cls, x):
        if cls.tensor_group is not None:
            dist.all_reduce(x, group=cls.tensor_group)
        return x


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
ParallelState.initialize([1, 2])
x = ParallelState.reduce(torch.full((3,), float(local_rank), device="cuda"))
print("x", x.tolist())
dist.destroy_process_group()
