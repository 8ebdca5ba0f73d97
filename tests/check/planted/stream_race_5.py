# run: --ranks 2 --check=nccl --device cpu
"""Checkpoints are staged to pinned host memory by an offload stream; the host reads the staging
buffers before the copies are done."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class CheckpointStager:
    def __init__(self, module, fixed):
        self.module = module
        self.fixed = fixed
        self.stream = torch.cuda.Stream()
        self.staging = {
            name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            for name, t in module.state_dict().items()
        }

    def stage(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for name, tensor in self.module.state_dict().items():
                self.staging[name].copy_(tensor, non_blocking=True)  # or here
        if self.fixed:
            self.stream.synchronize()

    def checksum(self):
        total = 0.0
        for buffer in self.staging.values():
            total += buffer.double().sum().item()  # finds: stream-race on all
        return total


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(6, 2).cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
stager = CheckpointStager(model.module, fixed="--fixed" in sys.argv)
for step in range(4):
    x = torch.full((3, 6), 0.1 * (step + local_rank), device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 1:
        stager.stage()
        print(f"step {step}: staged, sum {stager.checksum():.4f}")
        torch.cuda.synchronize()
dist.destroy_process_group()
