"""`gpusim resume` on a small script: the table, its marks and exit codes, JSON, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpusim.tools import cli

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, words = Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step, path = 0, folder / "state.pt"
if path.exists() and "anew" not in words:
    state = torch.load(path)
    model.module.load_state_dict(state["model"])
    step = state["step"] + ("skips" in words)
    if "forgets" not in words:
        optimizer.load_state_dict(state["optimizer"])
    if "refuses" in words and ranks != state["ranks"]:
        raise RuntimeError(f"saved by {state['ranks']} ranks")
if "fails" in words:
    raise ValueError("a mistake")
samples = torch.arange(12 * 6 * 3.0).reshape(6, 12, 3).sin()
while step < 6:
    x = samples[step].tensor_split(ranks)[rank]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 2 == 0 and rank == 0 and "unsaved" not in words:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step, "ranks": ranks}, path)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: Any) -> Path:
    """The script, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def resume(*words: str) -> int:
    return cli.main(["resume", "--quiet", *words])


def test_a_script_that_resumes(script: Path, capsys: Any) -> None:
    """On three ranks too; the report's files have the same."""
    files = ["--json", "found.json", "--html", "found.html", "--keep", "kept"]
    sizes = ["--save-ranks", "2,3", "--load-ranks", "1,3"]
    assert resume(*sizes, *files, "train.py", "{checkpoint}") == 0
    said = capsys.readouterr().out
    assert said.startswith("4 of 4 pairs: the resumed run is the one that was never interrupted\n")
    assert "2 ranks" in said and "same  same" in said
    found = json.loads(Path("found.json").read_text())
    assert found["same"] and found["save_ranks"] == [2, 3] and found["load_ranks"] == [1, 3]
    assert [(pair["save"], pair["load"], pair["step"]) for pair in found["pairs"]] == [
        (2, 1, 2),
        (2, 3, 2),
        (3, 1, 2),
        (3, 3, 2),
    ]
    assert "4 of 4 pairs" in Path("found.html").read_text()
    assert Path("kept", "saved-2", "state.pt").exists()


def test_an_optimizer_that_is_forgotten(script: Path, capsys: Any) -> None:
    words = ["--save-ranks", "2", "--load-ranks", "2,1", "--load-args", "forgets"]
    assert resume(*words, "--stop-after", "3", "--json", "-", "train.py", "{checkpoint}") == 1
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert [pair["verdict"] for pair in pairs] == ["different", "different"]
    for pair in pairs:
        assert pair["step"] == 4 and pair["first"]["state"] == "optimizer"
        assert pair["first"]["name"] == "momentum_buffer of Linear.weight"
        assert "it is not there; 2 of 2 such tensors" in pair["first"]["text"]


def test_samples_that_are_skipped(script: Path, capsys: Any) -> None:
    """The script has no DataLoader: samples are known by their elements."""
    assert resume("--save-ranks", "2", "--load-args", "skips", "train.py", "{checkpoint}") == 1
    said = capsys.readouterr().out
    assert "saved on 2, resumed on 2: data: samples, step 2, rank 0" in said
    assert "other states that differ: steps" in said


def test_a_script_that_refuses(script: Path, capsys: Any) -> None:
    words = ["--save-ranks", "2", "--load-ranks", "2,1", "--load-args", "refuses"]
    assert resume(*words, "train.py", "{checkpoint}") == 1
    said = capsys.readouterr().out
    assert "1 of 2 pairs" in said and "; 1 refused" in said
    assert "saved on 2, resumed on 1: refused: RuntimeError: saved by 2 ranks" in said


def test_steps_end_the_runs(script: Path, capsys: Any) -> None:
    words = ["--save-ranks", "2", "--steps", "4", "--load-args", "forgets"]
    assert resume(*words, "train.py", "{checkpoint}") == 1
    assert "states that differ" not in capsys.readouterr().out  # not the number of steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save-args", "unsaved"], "the script saved nothing to {checkpoint} from step 1 on"),
        (["--load-args", "anew"], "no run read anything from {checkpoint}: all began anew"),
        (["--save-args", "fails"], "ValueError: a mistake"),
        (["--stop-after", "6"], "the only checkpoint on 2 ranks is the last"),
    ],
)
def test_no_answer(script: Path, capsys: Any, words: list[str], message: str) -> None:
    assert resume("--save-ranks", "2", *words, "train.py", "{checkpoint}") == 2
    assert message in capsys.readouterr().err
