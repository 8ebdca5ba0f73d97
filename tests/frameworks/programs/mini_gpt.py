"""A trainer in the manner of minGPT-ddp: snapshots, resuming, bfloat16 autocast, evaluation."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import digest
import tiny
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, length: int, block_size: int) -> None:
        self.data = torch.randint(tiny.VOCABULARY, (length,))
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = self.data[at : at + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class Trainer:
    def __init__(self, batch_size: int, path: str, train: Any, test: Any) -> None:
        self.local_rank, self.global_rank = (int(os.environ[n]) for n in ("LOCAL_RANK", "RANK"))
        self.path, self.epochs_run = path, 0
        self.train_loader, self.test_loader = (
            DataLoader(each, batch_size, shuffle=False, sampler=DistributedSampler(each))
            for each in (train, test)
        )
        model = tiny.Decoder()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        if os.path.exists(path):
            snapshot = Snapshot(**torch.load(path, map_location="cpu", weights_only=True))
            model.load_state_dict(snapshot.model_state)
            self.optimizer.load_state_dict(snapshot.optimizer_state)
            self.epochs_run = snapshot.finished_epoch
        self.model = DDP(model)

    def batch(self, source: torch.Tensor, targets: torch.Tensor, train: bool) -> float:
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = tiny.loss(self.model(source), targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()

    def epoch(self, epoch: int, loader: DataLoader, train: bool) -> None:
        loader.sampler.set_epoch(epoch)
        self.model.train(train)
        losses = [self.batch(*pair, train) for pair in loader]
        digest.say("train" if train else "test", losses[-1])

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0:
                state = self.model.module.state_dict(), self.optimizer.state_dict()
                torch.save(asdict(Snapshot(*state, epoch + 1)), self.path)
            self.epoch(epoch, self.test_loader, train=False)
        torch.distributed.barrier()  # the snapshot is there


def main() -> None:
    digest.watch()
    init_process_group(backend="gloo")
    torch.manual_seed(3)
    train, test = random_split(Characters(300, 16), [0.9, 0.1])
    for epochs in (1, 2):  # the second trainer goes on from the first one's snapshot
        Trainer(8, "snapshot.pt", train, test).train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    main()
