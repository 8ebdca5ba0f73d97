# run: --ranks 4 --check
"""Resumes a DDP run: the weights come to all ranks by DDP's broadcast, the optimizer's momentum is
loaded by the rank that has the snapshot alone."""

import argparse
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer


def snapshot(model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def resume(saved, model, optimizer, everywhere):
    if dist.get_rank() == 0:
        state = torch.load(io.BytesIO(saved))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for parameter in model.module.parameters():
        dist.broadcast(parameter.detach(), src=0)
    if everywhere:
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states, src=0)
        optimizer.load_state_dict(states[0])


def first_run(x, y):
    model, optimizer = build()
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return snapshot(model, optimizer) if dist.get_rank() == 0 else None


parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
x = torch.randn(8, 4)
y = x.mean(1, keepdim=True)
saved = first_run(x, y)
model, optimizer = build()
resume(saved, model, optimizer, everywhere=args.fixed)
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()  # finds: unequal-parameters on 0
dist.destroy_process_group()
