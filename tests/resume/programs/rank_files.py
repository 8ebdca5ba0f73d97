"""DDP with a loader over a shard of each rank, whose state each rank keeps in a file of its own.

The shard of a rank is a share of the epoch's order; its state is the order and the position.
Without a bug another number of ranks joins all files, and splits the rest of the epoch anew.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

BUGS = (
    # https://github.com/PrimeIntellect-ai/prime-rl/pull/1092: where a rank's file is missing, as
    # the checkpoint is of fewer ranks, it takes rank 0's, and a warning is printed.
    "rank-0-for-missing",
    # https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5637: fewer ranks than have saved read
    # their own file, and the others' are dropped in silence; more ranks end with an error.
    "files-dropped",
    # https://github.com/bghira/SimpleTuner/pull/2986: only rank 0 saves its shard. On resume rank 0
    # goes on with it, and the others split anew with the seed of the launch.
    "rank-0-saves",
    # https://github.com/bghira/SimpleTuner/pull/2899: a rank looks for another name than it saved,
    # training_state-1 for training_state-rank1, and begins afresh in silence.
    "other-name",
    # https://github.com/NVIDIA/Megatron-LM/pull/7413: the file is named by the rank in the group of
    # replicas, which two ranks have in common: one overwrites the other's.
    "name-of-replica",
)


class Shard:
    """The batches of this rank: its share of an order, from a position."""

    def __init__(self, count: int, seed: int) -> None:
        self.data = common.Samples(count)
        self.epoch, self.seed = 0, seed
        self.split(common_order(count, seed, 0))

    def split(self, order: list[int]) -> None:
        self.order = order[dist.get_rank() :: dist.get_world_size()]
        self.position = 0

    def batches(self):
        size = GLOBAL_BATCH // dist.get_world_size()
        while True:
            while self.position < len(self.order):
                batch = self.order[self.position : self.position + size]
                self.position += size
                yield batch
            self.epoch += 1
            self.split(common_order(len(self.data), self.seed, self.epoch))

    def state_dict(self) -> dict[str, Any]:
        names = ("epoch", "seed", "order", "position")
        return {"ranks": dist.get_world_size(), **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("epoch", "seed", "order", "position"):
            setattr(self, name, state[name])

    def load_all(self, states: list[dict[str, Any]]) -> None:
        """Split what all ranks had left, in the order of the epoch."""
        rest = {index for state in states for index in state["order"][state["position"] :]}
        self.epoch, self.seed = states[0]["epoch"], states[0]["seed"]
        order = common_order(len(self.data), self.seed, self.epoch)
        self.split([index for index in order if index in rest])


def common_order(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def load(shard: Shard, path: Path) -> None:
    rank = dist.get_rank()
    name = path / f"loader-rank{rank}.pt"
    if wrong("rank-0-for-missing"):
        if not name.exists():
            warnings.warn("the loader's state is missing: that of rank 0 is taken", stacklevel=1)
            name = path / "loader-rank0.pt"
        shard.load_state_dict(torch.load(name))
    elif wrong("files-dropped"):
        shard.load_state_dict(torch.load(name))
    elif wrong("rank-0-saves"):
        if name.exists():
            shard.load_state_dict(torch.load(name))
    elif wrong("other-name"):
        name = path / (f"loader-{rank}.pt" if rank else "loader-rank0.pt")
        if name.exists():
            shard.load_state_dict(torch.load(name))
    elif wrong("name-of-replica"):
        shard.load_state_dict(torch.load(path / f"loader-rank{rank // 2}.pt"))
    else:
        files = sorted(path.glob("loader-rank*.pt"), key=lambda file: int(file.stem[11:]))
        states = [torch.load(file) for file in files]
        if states[0]["ranks"] == dist.get_world_size():
            shard.load_state_dict(states[rank])
        else:
            shard.load_all(states)


def main() -> None:
    options = common.options(*BUGS, samples=48)
    rank, _ = common.start()
    model = DistributedDataParallel(common.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    path = common.newest(options.checkpoint)
    # The launch has a seed of its own, which differs after a restart.
    shard = Shard(options.samples, 17 + bool(path and wrong("rank-0-saves")))
    step = 0
    if path:
        state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        load(shard, path)
    for x, y, index in DataLoader(shard.data, batch_sampler=shard.batches()):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if rank == 0:
                torch.save(state, path / "state.pt")
            if rank == 0 or not wrong("rank-0-saves"):
                number = rank // 2 if wrong("name-of-replica") else rank
                if wrong("name-of-replica"):  # the order of the writes is that of the ranks here
                    for turn in range(dist.get_world_size()):
                        if turn == rank:
                            torch.save(shard.state_dict(), path / f"loader-rank{number}.pt")
                        dist.barrier()
                else:
                    torch.save(shard.state_dict(), path / f"loader-rank{number}.pt")
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
