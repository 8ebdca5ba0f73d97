"""A mixture of experts: tokens go to their expert's rank and back by all_to_all."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(12)
router = nn.Linear(8, size, bias=False)
torch.manual_seed(120 + rank)
expert = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.1)
for step in range(3):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(2 * step * size + rank))  # @data
    weight, choice = router(x).softmax(1).max(1)  # @choice
    order = choice.argsort(stable=True)
    counts = torch.bincount(choice, minlength=size)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)  # @counts
    sent, received = counts.tolist(), incoming.tolist()
    tokens = torch.empty(sum(received), 8)
    tokens = across.all_to_all_single(tokens, x[order], received, sent)  # @dispatch
    done = expert(tokens)  # @expert
    back = across.all_to_all_single(torch.empty(12, 8), done, sent, received)  # @combine
    loss = (back * weight[order, None] - x[order].roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # @backward
    dist.all_reduce(router.weight.grad, op=dist.ReduceOp.SUM)  # @router
    optimizer.step()  # @update
dist.destroy_process_group()
