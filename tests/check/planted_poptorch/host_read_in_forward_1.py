# run: --check
"""A classifier keeps a running average of its loss for a log, as a Python number."""

import sys

import poptorch
import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.loss = nn.CrossEntropyLoss()
        self.seen = {"average": 0.0}

    def forward(self, x, labels):
        logits = self.layers(x)
        loss = self.loss(logits, labels)
        if not FIXED:
            latest = loss.item()  # finds: host-read-in-forward on 0, 1
            self.seen["average"] = 0.9 * self.seen["average"] + 0.1 * latest
        return logits, loss


torch.manual_seed(0)
options = poptorch.Options().replicationFactor(2)
model = Classifier()
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
training = poptorch.trainingModel(model, options, optimizer)
x, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))
for step in range(3):
    _, loss = training(x, labels)
    if FIXED:
        latest = loss.mean().item()
        model.seen["average"] = 0.9 * model.seen["average"] + 0.1 * latest
    print(step, loss.tolist())
