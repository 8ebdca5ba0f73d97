# run: --ranks 3 --check=nccl --device cpu
"""A contrastive model is wrapped in DDP, and its loss is a method that the training loop calls on
the module inside of DDP."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(10, 4)
        self.image = nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def contrastive_loss(self, text, image):
        text = F.normalize(self.text(text), dim=-1)
        image = F.normalize(self.image(image), dim=-1)
        logits = self.scale.exp() * text @ image.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    def forward(self, text, image):
        return self.contrastive_loss(text, image)


local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
model = DDP(TwoTowers().to(device), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    text = torch.randn(5, 10, device=device)
    image = torch.randn(5, 12, device=device)
    optimizer.zero_grad(set_to_none=True)
    if "--fixed" in sys.argv:
        loss = model(text, image)
    else:
        loss = model.module.contrastive_loss(text, image)
    loss.backward()
    optimizer.step()  # finds: gradient-not-reduced on all
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
