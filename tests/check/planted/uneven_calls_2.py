# run: --ranks 3 --check=gloo
"""A solver stops on each rank as soon as its own residual is small."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Jacobi:
    def __init__(self, rank, tolerance):
        self.x = torch.full((4,), 10.0**rank, dtype=torch.float64)
        self.tolerance = tolerance

    def residual(self):
        return self.x.abs().max()

    def step(self, world):
        mean = self.x.clone()
        dist.all_reduce(mean)  # finds: uneven-calls on 1, 2
        self.x = 0.1 * self.x + 1e-6 * mean / world

    def converged(self):
        residual = self.residual()
        if FIXED:
            dist.all_reduce(residual, op=dist.ReduceOp.MAX)
        return residual.item() < self.tolerance


dist.init_process_group("gloo")
solver = Jacobi(dist.get_rank(), tolerance=0.05)
steps = 0
while not solver.converged():
    solver.step(dist.get_world_size())
    steps += 1
print("steps", steps, "residual", solver.residual().item())
dist.destroy_process_group()
