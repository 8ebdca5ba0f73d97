# run: --ranks 3 --check=nccl --device cpu
"""pytorch/pytorch#136009: gradients that DDP has reduced are unscaled by the rank's own GradScaler,
whose scale is another after a rank has resumed."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make_scaler(saved, everywhere):
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1000)
    if dist.get_rank() == 0 or everywhere:
        scaler.load_state_dict(saved)
    return scaler


def train(model, scaler, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x = torch.randn(6, 8, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # finds: unequal-parameters on 0
        scaler.update()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    saved = torch.amp.GradScaler("cuda", init_scale=2.0**9).state_dict()
    train(model, make_scaler(saved, everywhere=args.fixed), steps=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
