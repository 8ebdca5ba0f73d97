# run: --ranks 5 --check=nccl --device cpu
"""Timings measured on the host are reduced over a sub-group of NCCL, asynchronously."""

import os
import sys
import time

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Stopwatch:
    def __init__(self, group):
        self.group = group
        self.seconds = []

    def measure(self, function):
        start = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        return result

    def slowest(self):
        seconds = torch.tensor(self.seconds)
        if FIXED:
            seconds = seconds.cuda(non_blocking=True)
        options = {"op": dist.ReduceOp.MAX, "group": self.group, "async_op": True}
        work = dist.all_reduce(seconds, **options)  # finds: device-refused on 1, 2, 3, 4
        work.wait()
        return seconds.max().item()


rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
workers = dist.new_group([1, 2, 3, 4], backend="nccl")
if rank > 0:
    watch = Stopwatch(workers)
    x = torch.full((16, 16), 0.1, device="cuda")
    for _ in range(3):
        x = watch.measure(lambda: torch.tanh(x @ x))  # noqa: B023
    print("fast enough", watch.slowest() < 60, x.sum().item())
dist.destroy_process_group()
