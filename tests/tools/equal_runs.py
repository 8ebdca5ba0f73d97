"""Runs of `gpusim equal` on small scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
HEAD = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from gpusim.equal import watch

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
bug = "--bug" in sys.argv and ranks > 1
torch.manual_seed(0)

def whole(step):
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(step))

def batch(step):
    return whole(step).tensor_split(ranks)[rank]

def network(hidden=7):
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))

def reduce(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks

def train(model, data=batch, steps=3, reduced=()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        reduce(reduced)
        optimizer.step()
"""
DATA_PARALLEL = "train(DistributedDataParallel(network()))"


@dataclass(frozen=True)
class Said:
    """What the command said."""

    code: int
    out: str
    error: str

    @property
    def record(self) -> dict[str, Any]:
        """What it wrote as JSON to its output."""
        assert self.out, self.error
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def first(self) -> tuple[str, str, int]:
        """Kind, name and step of the first tensor that differs."""
        first = self.record["first"]
        return first["what"], first["name"], first["step"]


def write(folder: Path, text: str, name: str = "train.py") -> None:
    (folder / name).write_text(HEAD + dedent(text))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gpusim", "equal", *words]


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own}


def equal(folder: Path, *words: str) -> Said:
    """Run the command in a folder."""
    done = subprocess.run(
        command(*words),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def of(folder: Path, text: str, *words: str, ranks: int = 2) -> Said:
    """What the command says of a script, as JSON. Options of its own come before --."""
    write(folder, text)
    at = words.index("--") if "--" in words else len(words)
    options, arguments = words[:at], words[at + 1 :]
    return equal(folder, "--ranks", str(ranks), *options, "--json", "--", "train.py", *arguments)


def assert_equal(said: Said) -> None:
    found = said.record
    assert (said.code, found["failure"], found["first"]) == (0, None, None)
    assert found["equal"] is True
    assert found["tensors"] == found["related"] > 0
