# run: --ranks 4 --check=gloo
"""Embedding and head share a weight, whose gradient is summed twice, in two calls at once."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class TinyLM(nn.Module):
    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixer = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mixer(self.embedding(tokens))))


def all_reduce_gradients(model):
    parameters = []
    for module in (model.embedding, model.mixer, model.head):
        parameters += module.parameters()
    if FIXED:
        parameters = dict.fromkeys(parameters)
    works = []
    for p in parameters:
        works.append(dist.all_reduce(p.grad, async_op=True))  # finds: overlapping-buffers on all
    for work in works:
        work.wait()


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(1)
model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(2):
    tokens = torch.randint(0, 11, (4, 7), generator=data)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    optimizer.zero_grad()
    (loss / world).backward()
    all_reduce_gradients(model)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
