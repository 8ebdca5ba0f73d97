# run: --check
"""A model looks for values that are not finite, and shows the ones that it finds."""

import sys

import poptorch
import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("limit", torch.tensor(1e3))
        self.levels = [0.25, 0.5]

    def check(self, x):
        if (x.abs() > self.limit).any():  # finds: host-read-in-forward on 0, 1
            largest = x.abs().max()
            print(f"too large: {largest:.1f}")  # or here
        return x

    def forward(self, x):
        steps = torch.tensor(self.levels).cumsum(0)
        scale = self.scale * float(steps[-1])
        x = x * scale
        if FIXED:
            return x, (x.abs() > self.limit).any()
        return self.check(x), None


inference = poptorch.inferenceModel(Guarded(), poptorch.Options().replicationFactor(2))
x = torch.ones(4, 2)
x[2, 1] = 1e6
y, large = inference(x)
if FIXED and bool(large.any()):
    print(f"too large: {y.abs().max():.1f}")
print(y.tolist())
