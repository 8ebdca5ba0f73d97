# run: --check
"""An activation is clipped at a percentile that NumPy computes, in a layer inside of a model."""

import sys

import numpy as np
import poptorch
import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class ClippedActivation(nn.Module):
    def __init__(self, percent=90.0):
        super().__init__()
        self.percent = percent

    def forward(self, x):
        if FIXED:
            ordered = x.detach().flatten().sort().values
            bound = ordered[int(self.percent / 100 * (ordered.numel() - 1))]
            return torch.minimum(torch.relu(x), torch.relu(bound))
        values = np.asarray(x.detach())  # finds: host-read-in-forward on 0, 1
        bound = float(np.percentile(values, self.percent))
        return x.clamp(0.0, max(bound, 0.0))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.clip, self.last = nn.Linear(3, 6), ClippedActivation(), nn.Linear(6, 1)

    def forward(self, x, y):
        prediction = self.last(self.clip(self.first(x)))
        return prediction, nn.functional.mse_loss(prediction, y)


torch.manual_seed(3)
options = poptorch.Options().replicationFactor(2)
options.Training.gradientAccumulation(2)
model = Regressor()
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
training = poptorch.trainingModel(model, options, optimizer)
x = torch.randn(16, 3)
for _ in range(2):
    prediction, loss = training(x, x.sum(1, keepdim=True))
print(np.asarray(prediction.detach()).shape, float(loss.mean()))
