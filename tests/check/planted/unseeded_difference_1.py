# run: --ranks 4 --check
"""Hand-made data parallel without a seed: each rank makes weights of its own, gradients are
averaged."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, kernel_size=3)
        self.fc = nn.Linear(3 * 4 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return torch.log_softmax(self.fc(x.flatten(1)), dim=1)


def run():
    model = Net()
    if "--fixed" in sys.argv:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(2):
        epoch_loss = 0.0
        for _ in range(2):
            data, target = torch.randn(8, 1, 6, 6), torch.randint(5, (8,))
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(data), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()  # finds: unseeded-difference on all
        print("Rank", dist.get_rank(), "epoch", epoch, f"{epoch_loss / 2:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
