"""What the programs share: options, the start, data, a small model, random states, a trace.

A program keeps checkpoints in the folder `--checkpoint`: a folder `step-N` for each, and a file
`latest` which rank 0 writes last. It resumes from the newest, or begins afresh in an empty folder.
The global batch is the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

WIDTH, CLASSES = 8, 4
GLOBAL_BATCH = 8
_chosen = argparse.Namespace()


def options(*bugs: str, **numbers: float) -> argparse.Namespace:
    """Read the options of all programs, and `numbers`, options with these defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--bug", choices=bugs)
    for name, default in {"steps": 8, "save_every": 4, **numbers}.items():
        name = name.replace("_", "-")
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(namespace=_chosen)


def wrong(bug: str) -> bool:
    """Whether this bug is switched on."""
    return getattr(_chosen, "bug", None) == bug


def start(seed: int = 0) -> tuple[int, int]:
    """Join the ranks; this rank's number and how many there are."""
    dist.init_process_group("gloo")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


class Samples(Dataset):
    """Samples with a class each; a sample says its index."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = (self.x.sum(1) > 0).long() + 2 * (self.x[:, 0] > 0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Consumed(Sampler[list[int]]):
    """The batches of a rank after `consumed` samples of all ranks, for ever (as Megatron's)."""

    def __init__(self, count: int, consumed: int, rank: int, ranks: int) -> None:
        self.count, self.consumed, self.rank, self.ranks = count, consumed, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.count // GLOBAL_BATCH
        number = self.consumed // GLOBAL_BATCH
        while True:
            epoch, batch = divmod(number, per_epoch)
            generator = torch.Generator().manual_seed(100 + epoch)
            order = torch.randperm(self.count, generator=generator).tolist()
            here = order[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
            yield here[self.rank :: self.ranks]
            number += 1


def consumed_loader(count: int, consumed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The batches of this rank after `consumed` samples."""
    sampler = Consumed(count, consumed, dist.get_rank(), dist.get_world_size())
    return iter(DataLoader(Samples(count), batch_sampler=sampler))


def network(dropout: float = 0.0) -> nn.Sequential:
    """A small classifier."""
    layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, CLASSES))


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder, if there is one."""
    latest = folder / "latest"
    return folder / latest.read_text() if latest.exists() else None


def begin(folder: Path, step: int) -> Path:
    """The folder of a new checkpoint, which exists on return."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def finish(path: Path) -> None:
    """Make a checkpoint the newest, when all ranks have written theirs."""
    dist.barrier()
    if dist.get_rank() == 0:
        (path.parent / "latest").write_text(path.name)
    dist.barrier()


def random_states() -> dict[str, Any]:
    """The states of the generators of Python, NumPy and torch."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    numpy = [name, torch.from_numpy(keys.astype(np.int64)), *rest]
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def set_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what `random_states` gave."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def report(step: int, indices: Sequence[int] | Tensor, loss: Tensor, **more: Any) -> None:
    """Print the loss; with TRACE set, write a line of JSON for real.py, which may end the run."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {float(loss.detach()):.9g}", flush=True)
    if folder := os.environ.get("TRACE"):
        line = {"step": step, "indices": [int(index) for index in indices]}
        line |= {"loss": float(loss.detach()).hex(), **more}
        with open(Path(folder) / f"{dist.get_rank()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        if step >= int(os.environ.get("STOP_AFTER", step + 1)):
            dist.barrier()
            raise SystemExit(0)
