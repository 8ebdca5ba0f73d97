"""The ports of IPU programs in examples/ports run unmodified, and learn to the figures stated here.

They import PopTorch, PopXL and PopDist by their own names, and know nothing of gpusim.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
POPRUN = "gpusim.tools.launch"
SMALL_BERT = (
    "bert_pretraining --steps 8 --layers 1 --width 16 --micro-batch 1 --accumulation 5 "
    "--dropout 0.1 --optimizer LAMB --held-out 0"
)


RUN = (sys.executable, "-m", "gpusim", "run")


def run(command: str, under: Sequence[str] = RUN) -> str:
    """What a port prints, started by `gpusim run` or as another command says."""
    name, *arguments = command.split()
    done = subprocess.run(
        [*under, str(PORTS / f"{name}.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},  # small matrices
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shares(printed: str) -> list[float]:
    """The percentages in the last line."""
    return [float(x) for x in re.findall(r"([\d.]+)%", printed.splitlines()[-1])]


def test_ports_do_not_know_gpusim() -> None:
    for port in PORTS.glob("*.py"):
        _, docstring, program = port.read_text().split('"""', 2)
        assert "gpusim run" in docstring and "gpusim" not in program, port.name


def same(ours: Any, theirs: Any) -> bool:
    """Whether two checkpoints are equal, tensors to the bit."""
    import torch

    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_bert_goes_on_from_a_checkpoint_and_a_pipeline_does_not_change_it(tmp_path: Path) -> None:
    """With dropout, stochastic rounding, and a schedule in the middle of its decay."""
    import torch

    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    printed = run(f"{SMALL_BERT} --ipus 1 --checkpoint {whole}")
    run(f"{SMALL_BERT} --ipus 2 --checkpoint {parts} --stop-after 5")
    early = torch.load(parts)
    assert early["step"] == 5
    assert run(f"{SMALL_BERT} --ipus 2 --checkpoint {parts} --resume") == printed
    expected, found = torch.load(whole), torch.load(parts)
    assert same(expected, found)
    for name, weight in early["model"].items():
        assert weight.dtype == torch.float16
        assert not torch.equal(weight, expected["model"][name]), name


def test_cnn_validates_what_it_has_trained() -> None:
    printed = run("cnn --epochs 2 --width 4 --replicas 2").splitlines()
    epochs, (validation, on_cpu) = printed[:-1], shares(printed[-1])
    assert len({line.rpartition(" ")[2] for line in epochs}) == len(epochs) == 2
    assert validation == on_cpu > 30


@pytest.mark.parametrize("cell", ["LSTM", *slow("GRU")])
def test_rnn_learns(cell: str) -> None:
    assert shares(run(f"rnn --cell {cell} --epochs 2 --hidden 24"))[0] > 60


@pytest.mark.parametrize(
    "layout",
    [
        "--replicas 2 --micro-batch 8 --micro-batches 8",
        *slow(
            "--replicas 2 --micro-batch 16 --micro-batches 4",
            "--replicas 8 --micro-batch 8 --micro-batches 2",
        ),
    ],
)
def test_popxl_trains_alike_in_all_layouts(layout: str) -> None:
    usual, other = (run(f"popxl_digits --epochs 3 {own}") for own in ("", layout))
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", text)] for text in (usual, other)]
    assert losses[0] == pytest.approx(losses[1], abs=0.0015) and len(losses[0]) == 3
    assert shares(usual) == pytest.approx(shares(other), abs=0.3)


@pytest.mark.parametrize(
    ("command", "figure"),
    [
        ("popxl_digits", 97),
        *slow(("bert_pretraining", 97), ("cnn", 97), ("rnn", 93), ("rnn --cell GRU", 93)),
    ],
)
def test_learns_to_the_stated_figure(command: str, figure: float) -> None:
    found = shares(run(command))
    assert found and min(found) >= figure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "settings"),
    [("popxl_digits", "--num-replicas 4 --ipus-per-replica 2"), ("cnn", "--num-replicas 4")],
    ids=["popxl_digits", "cnn"],
)
def test_instances_learn_too(command: str, settings: str) -> None:
    poprun = [sys.executable, "-m", POPRUN, "--num-instances", "2", *settings.split()]
    assert min(shares(run(command, [*poprun, sys.executable]))) >= 97
