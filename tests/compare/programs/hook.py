"""DDP with a communication hook of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The gradients' mean over the ranks."""
    values = bucket.buffer() / dist.get_world_size()  # @divide
    work = dist.all_reduce(values, async_op=True)  # @sum
    return work.get_future().then(lambda done: done.value()[0])  # @back


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 30), nn.SiLU(), nn.Linear(30, 3)))
model.register_comm_hook(None, average)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
draws = torch.Generator().manual_seed(40 + rank)  # @seed
for _ in range(3):
    x = torch.randn(9, 10, generator=draws)
    optimizer.zero_grad()
    model(x).logsumexp(1).mean().backward()  # @backward
    optimizer.step()  # @update
    dist.barrier()  # @barrier
dist.destroy_process_group()
