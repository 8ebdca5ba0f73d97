"""A script for torchrun: two layers, the second spread over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parallel import Columns


def main() -> None:
    """Train for a few steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), Columns(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(16, 6), torch.randn(16, 4)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
