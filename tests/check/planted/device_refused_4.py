# run: --ranks 2 --check=gloo --device cpu
"""A pipeline on GPUs sends its activations by gloo, which sends tensors of the host only."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def send_activation(x, dst):
    if FIXED:
        x = x.cpu()
    dist.send(x, dst)  # finds: device-refused on 0


def receive_activation(shape, src, device):
    x = torch.empty(shape, device="cpu" if FIXED else device)
    dist.recv(x, src)  # or here
    return x.to(device)


rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("gloo")
torch.manual_seed(rank)
stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(device)
with torch.no_grad():
    for step in range(2):
        if rank == 0:
            y = stage(torch.full((3, 6), 0.5 * step, device=device))
            send_activation(y, dst=1)
        else:
            y = stage(receive_activation((3, 6), 0, device))
        print(f"step {step}: mean {y.mean().item():.4f}")
dist.destroy_process_group()
