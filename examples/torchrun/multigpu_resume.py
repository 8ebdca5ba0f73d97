"""A Trainer with snapshots: training that is interrupted goes on where it was.

torchrun --standalone --nproc-per-node 4 multigpu_resume.py 10 --snapshot snapshot.pt
gpusim torchrun --nproc-per-node 64 multigpu_resume.py 10 --snapshot snapshot.pt
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    """Samples of a sum of two waves, whose frequencies and phases are to be found."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.truth = torch.rand(size, 4, generator=generator)
        self.times = torch.linspace(0, 1, 24)

    def __len__(self) -> int:
        return len(self.truth)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        f, p, g, q = self.truth[index]
        wave = torch.sin(6 * (1 + f) * self.times + p) + torch.sin(12 * (1 + g) * self.times + q)
        return wave, self.truth[index]


class Trainer:
    """Trains a model on all ranks, and writes and reads its snapshots."""

    def __init__(
        self,
        model: nn.Module,
        data: DataLoader,
        optimizer: torch.optim.Optimizer,
        save_every: int,
        snapshot: str,
    ) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.device = torch.device("cpu")
        if torch.accelerator.is_available():
            self.device = torch.device(
                torch.accelerator.current_accelerator().type, self.local_rank
            )
        self.model = model.to(self.device)
        self.data, self.optimizer, self.save_every = data, optimizer, save_every
        self.snapshot = snapshot
        self.losses: list[float] = []
        if os.path.exists(snapshot):
            self.load()
        self.model = DDP(self.model)

    def load(self) -> None:
        state = torch.load(self.snapshot, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]
        if self.global_rank == 0:
            print(f"resuming at epoch {len(self.losses)}", flush=True)

    def save(self) -> None:
        if self.global_rank == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "losses": self.losses,
            }
            torch.save(state, self.snapshot + ".new")
            os.replace(self.snapshot + ".new", self.snapshot)
        barrier()

    def run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch: int) -> None:
        self.data.sampler.set_epoch(epoch)
        mean = 0.0
        for source, targets in self.data:
            mean += self.run_batch(source.to(self.device), targets.to(self.device))
        self.losses.append(mean / len(self.data))
        if self.global_rank == 0:
            size = self.data.batch_size
            print(f"epoch {epoch} | batch {size} | loss {self.losses[-1]:.6f}", flush=True)

    def train(self, epochs: int) -> None:
        for epoch in range(len(self.losses), epochs):
            self.run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == epochs:
                self.save()


def main(epochs: int, save_every: int, batch_size: int, size: int, snapshot: str) -> None:
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        init_process_group()
    else:
        init_process_group("gloo")
    torch.manual_seed(0)
    data = Waves(size)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 24)),
        nn.Conv1d(1, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(192, 64),
        nn.GELU(),
        nn.Linear(64, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler: DistributedSampler = DistributedSampler(data)
    loader: DataLoader = DataLoader(data, batch_size=batch_size, shuffle=False, sampler=sampler)
    Trainer(model, loader, optimizer, save_every, snapshot).train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="training with snapshots")
    parser.add_argument("total_epochs", type=int, help="epochs in all, with those of a snapshot")
    parser.add_argument("--save-every", type=int, default=2, help="epochs between two snapshots")
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank")
    parser.add_argument("--size", type=int, default=1024, help="samples")
    parser.add_argument("--snapshot", default="snapshot.pt")
    args = parser.parse_args()
    main(args.total_epochs, args.save_every, args.batch_size, args.size, args.snapshot)
