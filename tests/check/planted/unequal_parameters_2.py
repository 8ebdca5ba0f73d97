# run: --ranks 3 --check=gloo
"""Hand-made data parallel whose settings are read by rank 0 and sent to the others; the weight
decay is not among what is sent, so that the others keep the default."""

import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass
class Settings:
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    steps: int = 3


def load_settings():
    return Settings(learning_rate=3e-3, weight_decay=0.1)


def share(settings, names):
    sent = [{name: asdict(settings)[name] for name in names} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    for name, value in sent[0].items():
        setattr(settings, name, value)


dist.init_process_group()
settings = load_settings() if dist.get_rank() == 0 else Settings()
names = ["learning_rate", "steps"]
if "--fixed" in sys.argv:
    names.append("weight_decay")
share(settings, names)

torch.manual_seed(5)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.AdamW(
    model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
)
torch.manual_seed(5 + dist.get_rank())
for _ in range(settings.steps):
    tokens = torch.randint(20, (16,))
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(-1))
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()  # finds: unequal-parameters on 0
dist.destroy_process_group()
