"""What the programs share: their options, a bug that is switched on, text, and what they report.

A program follows WORLD_SIZE: on one rank it is the model that is meant. Without `--bug` it computes
the same on any number of ranks. A bug acts on several ranks alone, and nothing fails: it is silent.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["VOCABULARY", "options", "report", "start", "text", "wrong"]

VOCABULARY = 48
_chosen = argparse.Namespace()


def options(bugs: Sequence[str], **numbers: int) -> argparse.Namespace:
    """Read --bug, --steps and `numbers`, options that are whole numbers with these defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", choices=bugs)
    parser.add_argument("--steps", type=int, default=2)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(namespace=_chosen)


def start() -> tuple[int, int]:
    """Join the ranks; this rank's number and how many there are."""
    if os.environ.get("DOUBLE"):  # by hand; gpusim equal sets the dtype itself
        torch.set_default_dtype(torch.float64)
    if os.environ.get("HALF"):
        torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def wrong(bug: str) -> bool:
    """Whether this bug is switched on, and there are ranks that it may act on."""
    return getattr(_chosen, "bug", None) == bug and dist.get_world_size() > 1


def text(step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """A global batch of tokens, and those that follow them: (batch, length) each."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def report(step: int, loss: Tensor) -> None:
    """Print the loss of the global batch, which all ranks know."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {float(loss):.15g}", flush=True)
