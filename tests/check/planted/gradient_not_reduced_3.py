# run: --ranks 4 --check
"""Hand-made data parallel whose optimizer has a group with weight decay and one without; the
gradients of the first group alone are reduced."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.outer(torch.relu(self.inner(x))))


def parameter_groups(model, weight_decay):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def synchronize(groups):
    flat = torch.cat([p.grad.flatten() for group in groups for p in group["params"]])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for group in groups:
        for p in group["params"]:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = Encoder()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-3)
    torch.manual_seed(11 + dist.get_rank())
    for _ in range(2):
        x = torch.randn(6, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.flip(-1)).backward()
        synchronize(optimizer.param_groups if "--fixed" in sys.argv else optimizer.param_groups[:1])
        optimizer.step()  # finds: gradient-not-reduced on all
    dist.destroy_process_group()


main()
