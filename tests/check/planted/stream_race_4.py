# run: --ranks 4 --check=nccl --device cpu
"""A mixture of experts runs its shared expert on a side stream beside the all-to-all. The event
that the main stream waits for is recorded before the shared expert's output."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class MixtureOfExperts(nn.Module):
    def __init__(self, width, fixed):
        super().__init__()
        self.expert = nn.Linear(width, width, device="cuda")
        self.shared = nn.Sequential(nn.Linear(width, width), nn.GELU()).cuda()
        self.side = torch.cuda.Stream()
        self.ready = torch.cuda.Event()
        self.fixed = fixed

    def forward(self, tokens):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            if not self.fixed:
                self.ready.record()
            shared = self.shared(tokens)  # or here
            if self.fixed:
                self.ready.record()
        tokens.record_stream(self.side)
        dispatched = torch.empty_like(tokens)
        dist.all_to_all_single(dispatched, tokens)
        combined = torch.empty_like(tokens)
        dist.all_to_all_single(combined, self.expert(dispatched))
        main.wait_event(self.ready)
        shared.record_stream(main)
        return tokens + combined + shared  # finds: stream-race on all


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    layer = MixtureOfExperts(8, fixed="--fixed" in sys.argv)
    with torch.no_grad():
        hidden = torch.randn(16, 8, device="cuda", dtype=torch.float32)
        for _ in range(2):
            hidden = layer(hidden)
    norm = hidden.norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"largest norm {norm.item():.3f}")
    dist.destroy_process_group()


main()
