# run: --ranks 3 --check
"""A column-parallel projection drops out its features by a mask that is written by hand, before
the shards are gathered; the mask is the same on all ranks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


class ColumnParallelProjection(nn.Module):
    def __init__(self, inputs, outputs, p):
        super().__init__()
        self.keep = 1.0 - p
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
        self.register_buffer("weight", weight.chunk(dist.get_world_size())[dist.get_rank()])

    def drop(self, h):
        mask = torch.rand(h.shape) < self.keep  # finds: same-random-bits on all
        return h * mask / self.keep  # or here

    def forward(self, x):
        h = self.drop(x @ self.weight.t())  # or here
        shards = [torch.empty_like(h) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, h)
        return torch.cat(shards, dim=-1)


def monte_carlo(model, x, samples):
    """The mean and deviation of predictions under dropout."""
    predictions = torch.stack([model(x) for _ in range(samples)]).float()
    return predictions.mean(0), predictions.std(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(4, 10, dtype=torch.bfloat16)
    model = ColumnParallelProjection(10, 12, p=0.25)
    if args.fixed:
        torch.manual_seed(1000 + dist.get_rank())
    with torch.inference_mode():
        mean, deviation = monte_carlo(model, x, samples=5)
    print(f"mean {mean.mean().item():.4f}, deviation {deviation.mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
