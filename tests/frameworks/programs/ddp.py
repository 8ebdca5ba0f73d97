"""Plain DistributedDataParallel of a model with batch normalisation."""

import digest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    digest.watch()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(17, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)),
    )
    inputs = torch.randn(40 * dist.get_world_size(), 17)
    data = TensorDataset(inputs, inputs.sum(1).gt(0).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    digest.say("loss", total / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
