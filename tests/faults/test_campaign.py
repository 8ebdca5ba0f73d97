"""Campaigns of faults: scripts that survive, and scripts that do not, in each of the ways."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from gpusim.tools import torchrun
from gpusim.tools.cli import main
from gpusim.tools.faults.campaign import Campaign, FailedError, run_plans
from gpusim.tools.faults.running import Runner
from gpusim.torch.distributed.faults.plans import parse
from tests.oracles.machine_time import PATIENCE

HEAD = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def train(step):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
"""

#: Saves weights and momentum, whole and atomically, and goes on from there.
SURVIVES = """
saved, start = folder / "saved.pt", 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
for step in range(start, 3):
    train(step)
    if rank == 0:
        part = folder / "saved.part"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "step": step + 1}, part)
        part.rename(saved)
    dist.barrier()
print("end of", rank)
"""

FORGETS = SURVIVES.replace('optimizer.load_state_dict(state["optimizer"])', "pass")

#: The step is in a file of its own: one of the two may be that of another step.
TWO_FILES = """
saved, count, start = folder / "saved.pt", folder / "step.txt", 0
if saved.exists() and count.exists():
    model.load_state_dict(torch.load(saved)["model"])
    start = int(count.read_text() or 0)
for step in range(start, 3):
    optimizer.state.clear()
    train(step)
    if rank == 0:
        torch.save({"model": model.state_dict()}, saved)
        count.write_text(str(step + 1))
    dist.barrier()
"""

#: Takes the error of a rank that is gone for one of its own.
HIDES = """
try:
    for step in range(3):
        train(step)
except RuntimeError:
    raise KeyError("batch") from None
"""

#: A call that no other rank waits for.
ALONE = """
alone = dist.new_group([1])
train(0)
if rank == 1:
    dist.all_reduce(torch.ones(1), group=alone)
"""

CHECKED = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

Judge = Callable[..., Campaign]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def run(script: str, plans: Sequence[str], *words: str, ranks: int = 2) -> Campaign:
        path = tmp_path / "train.py"
        path.write_text(dedent(HEAD + script))
        given = ["--nproc-per-node", str(ranks), *words, str(path), "{folder}"]
        options = torchrun.options_of(given)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        runner = Runner(options, torchrun.run, ranks, scratch, 2)
        try:
            drawn = [parse(plan) for plan in plans]
            return run_plans(runner, lambda seen: drawn, options.check is not None)
        finally:
            runner.close()

    return run


def names(found: Campaign) -> list[str]:
    return [each.verdict.name for each in found.judged]


def test_a_script_that_survives(judge: Judge) -> None:
    plans = ["kill rank=1 call=7", "torn rank=0 write=2", "missing rank=0 write=1"]
    plans += ["exit rank=0 call=4 code=3", "raise rank=1 call=9", "store-timeout rank=1 wait=1"]
    plans += ["late rank=1 call=5 seconds=20", "kill rank=1 call=99"]
    found = judge(SURVIVES, plans, "--max-restarts", "1")
    assert names(found) == ["recovered"] * 7 + ["no effect"], found.judged
    assert found.smallest is None and not found.worst
    assert found.judged[1].site.endswith("saved.part")


def test_without_restarts_faults_are_named(judge: Judge) -> None:
    plans = ["kill rank=1 call=7", "torn rank=0 write=2", "hang rank=1 call=4"]
    plans += ["late rank=0 call=3 seconds=7200", "nan rank=1 call=2"]
    found = judge(SURVIVES, plans)
    assert names(found) == ["named"] * 4 + ["different"], found.judged
    assert "rank 1 was ended by SIGKILL" in found.judged[0].verdict.why


def test_a_script_that_forgets_the_optimizer(judge: Judge) -> None:
    found = judge(FORGETS, ["kill rank=1 call=7", "kill rank=1 call=1"], "--max-restarts", "1")
    assert names(found) == ["different", "recovered"], found.judged
    assert "the weights of rank" in found.judged[0].verdict.why
    # Before the first checkpoint there is nothing to forget.
    assert found.smallest is not None
    smallest = found.smallest.plan
    assert len(smallest) == 1 and smallest[0].kind == "kill" and (smallest[0].call or 0) > 2


def test_two_files_of_different_steps(judge: Judge) -> None:
    # A torn count is read as no step at all, though the weights are those of the second.
    plans = ["torn rank=0 write=4 bytes=0", "missing rank=0 write=4", "torn rank=0 write=3"]
    found = judge(TWO_FILES, plans, "--max-restarts", "1")
    assert names(found) == ["different", "recovered", "named"], found.judged
    assert "zip archive" in found.judged[2].verdict.why


def test_an_error_that_names_nothing(judge: Judge) -> None:
    found = judge(HIDES, ["hang rank=1 call=4"])
    assert names(found) == ["unnamed"], found.judged
    assert "KeyError" in found.judged[0].verdict.why


def test_a_hang_that_no_limit_ends(judge: Judge) -> None:
    found = judge(ALONE, ["hang rank=1 call=3"])
    assert names(found) == ["hung"], found.judged


def test_the_check_finds_a_flip_in_a_replica(judge: Judge) -> None:
    plans = ["flip-result rank=1 call=7 bit=28", "kill rank=1 call=5"]
    found = judge(CHECKED, plans, "--check")
    assert found.judged[0].verdict.name == "named", found.judged
    assert "found by --check" in found.judged[0].verdict.why
    assert found.judged[1].verdict.name == "named"
    assert names(judge(CHECKED, plans[:1])) == ["different"]


def test_a_script_that_fails_by_itself(judge: Judge) -> None:
    with pytest.raises(FailedError, match=r"(?s)fails without faults:.*ZeroDivisionError"):
        judge("1 / 0\n", ["kill rank=0 call=1"])


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # It writes to its working folder, of which each run has a copy.
    (folder / "train.py").write_text(dedent(HEAD + FORGETS).replace("sys.argv[1]", "'.'"))
    words = ["torchrun", "-q", "--nproc-per-node", "2", "--max-restarts", "1"]
    plans = ["--faults", "seed=11 kinds=kill,torn", "--runs", "6"]
    runs = []
    for number in range(2):
        to = tmp_path / f"{number}.json"
        page = tmp_path / "page.html"
        assert main([*words, *plans, "--json", str(to), "--page", str(page), "train.py"]) == 1
        made = json.loads(to.read_text())
        runs.append((made["plans"], made["smallest"]))
        out = capsys.readouterr().out
    assert runs[0] == runs[1]
    assert made["verdicts"]["different"] and "different" in page.read_text()
    assert made["calls"] == [9, 9] and made["writes"] == [3, 0]
    assert [each.name for each in folder.iterdir()] == ["train.py"]
    assert re.search(r"^all|^kill|^torn", out, re.M)
    # The command that is printed gives the same verdict.
    again = made["smallest"]["command"]
    assert again in out
    assert main(shlex.split(again)[1:]) == 1
    assert f"different:\n  {made['smallest']['plan']}" in capsys.readouterr().out


def test_a_plan_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(HEAD + SURVIVES))
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--faults", "kill rank=1 call=7"]
    assert main(["torchrun", "-q", *words, "--runs", "3", str(script), "{folder}"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^kill +3 +3$", out, re.M), out
    assert "No plan ends silently different" in out


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    script, here, never = tmp_path / "waits_here.py", tmp_path / "here", tmp_path / "never"
    for each in (here, never):
        os.mkfifo(each)
    # The second run of the ranks stands in C code for ever.
    script.write_text(
        dedent(HEAD)
        + dedent(
            f"""
            dist.barrier()
            if rank == 0 and os.path.exists({str(tmp_path / "once")!r}):
                open({str(here)!r}, "w").close()
                open({str(never)!r}).read()
            if rank == 0:
                open({str(tmp_path / "once")!r}, "w").close()
            """
        )
    )
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "gpusim.tools.cli", "torchrun", "--nproc-per-node", "2"]
    command += ["--faults", "seed=1", "--runs", "4", str(script), "{folder}"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with open(here) as file:
        file.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert list((tmp_path / "temporary").iterdir()) == []
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "waits_here.py" not in left
