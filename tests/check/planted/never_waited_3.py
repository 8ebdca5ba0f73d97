# run: --ranks 2 --check
"""A timing helper starts a barrier with async_op=True and takes it for one that has returned."""

import sys
import time

import torch
import torch.distributed as dist


def timed(function, *arguments):
    barrier = dist.barrier(async_op=True)  # finds: never-waited on all
    if "--fixed" in sys.argv:
        barrier.wait()
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


dist.init_process_group(backend="gloo")
torch.manual_seed(dist.get_rank())
q, k, v = torch.randn(3, 1, 2, 16, 8)
for _ in range(2):
    result, seconds = timed(attention, q, k, v)
    print("attention", result.sum().item(), seconds < 60)
dist.destroy_process_group()
