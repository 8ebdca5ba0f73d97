"""The options of `gpusim torchrun` about the check, and its runs in other orders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpusim.tools.cli import main
from gpusim.tools.forked import run_in_fork
from tests.check.small import needs_linux
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE, until
from tests.tools.equal_runs import environment
from tests.tools.test_torchrun import assert_no_process

pytestmark = needs_linux

HEAD = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(4.0) + rank
"""
RIGHT = "dist.all_reduce(x)\nprint('sum', x.sum().item())"
WRONG = "work = dist.all_reduce(x, async_op=True)\nprint(x.sum().item())\nwork.wait()"
FAILS = f"{WRONG}\nif rank: raise SystemExit(7)"
ANYBODY = """
if rank:
    dist.send(x, 0)
else:
    came = []
    for _ in range(size - 1):
        dist.recv(x)
        came.append(x[0].item())
    print('came', came)
"""


@dataclass
class Said:
    code: int
    text: str
    report: list[dict[str, Any]] | None

    @property
    def kinds(self) -> list[str]:
        assert self.report is not None, self.text
        return [each["kind"] for each in self.report]


class Command:
    """`gpusim torchrun` in a folder, on two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, lines: str, *words: str, ranks: int = 2, report: bool = True) -> Said:
        script, output, file = (self.folder / n for n in ("train.py", "output", "found.json"))
        script.write_text(HEAD + dedent(lines))
        own = ["--check-report", str(file)] if report else []
        command = ["torchrun", "--ranks", str(ranks), *own, *words, str(script)]
        code = run_in_fork(lambda: main(command), output)
        found = json.loads(file.read_text()) if file.exists() else None
        file.unlink(missing_ok=True)
        return Said(code, output.read_text(errors="replace"), found)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


# ---------------------------------------------------------------- --check


def test_a_right_script_ends_with_0(command: Command) -> None:
    said = command(RIGHT, "--check")
    assert (said.code, said.report) == (0, [])
    assert "check: no findings\n" in said.text and "[rank0]: sum 16.0" in said.text


def test_a_wrong_script_ends_with_1(command: Command) -> None:
    for mode in ([], ["--threads"]):
        said = command(WRONG, "--check", *mode)
        assert (said.code, said.kinds) == (1, ["read-before-wait"])
        assert "gpusim torchrun: check: 1 finding\nread-before-wait at " in said.text
        assert "[rank0]: nan" in said.text
    [found] = said.report or []
    assert found["ranks"] == [0, 1] and found["site"].endswith("train.py:8")


def test_without_the_option_nothing_is_checked(command: Command) -> None:
    said = command(WRONG, report=False)
    assert said.code == 0 and "check" not in said.text


def test_the_engine_is_a_part_of_the_option(command: Command) -> None:
    lines = "x = x.view(2, 2).t()\ndist.all_reduce(x)\nprint(x)"
    assert command(lines, "--check").kinds == command(lines, "--check=gloo").kinds == []
    said = command(lines, "--check=nccl")
    assert said.kinds == ["not-contiguous"] and "by the rules of nccl" in said.text
    said = command(lines, "--check", "nccl", report=False)
    assert said.code == 2 and "nccl" in said.text  # the script's name


def test_other_engines_are_refused(command: Command) -> None:
    for word in ("--check=mpi", "--check="):
        said = command(RIGHT, word)
        assert said.code == 2 and "--check" in said.text and said.report is None
    said = command(RIGHT, "--check", "--check=nccl")
    assert said.code == 2 and "not allowed with" in said.text


def test_a_report_switches_the_check_on(command: Command) -> None:
    assert command(WRONG).kinds == ["read-before-wait"]


def test_a_report_on_standard_output(command: Command) -> None:
    said = command(WRONG, "--check-report", "-", "--quiet", report=False)
    assert said.code == 1
    lines = [each for each in said.text.splitlines() if not each.startswith("[rank")]
    begin = lines.index("[")
    found = json.loads("\n".join(lines[begin : lines.index("]") + 1]))
    assert [each["kind"] for each in found] == ["read-before-wait"]


def test_quiet_shows_findings_alone(command: Command) -> None:
    assert "check" not in command(RIGHT, "--check", "--quiet").text
    assert "read-before-wait at" in command(WRONG, "--check", "--quiet").text


def test_a_report_that_cannot_be_written_ends_the_command_first(
    command: Command, tmp_path: Path
) -> None:
    for path in (tmp_path, tmp_path / "gone" / "found.json", tmp_path / "train.py" / "found.json"):
        said = command(RIGHT, "--check-report", str(path), report=False)
        assert said.code == 2 and "--check-report" in said.text, said.text
        assert "[rank" not in said.text


def test_a_report_takes_the_place_of_an_older_one(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text("old")
    assert command(RIGHT).report == []


def test_a_script_that_fails_is_checked_up_to_there(command: Command) -> None:
    said = command(FAILS, "--check")
    assert (said.code, said.kinds) == (1, ["read-before-wait"])
    assert "rank 1 ended with exit code 7" in said.text


def test_ranks_that_wait_in_vain_are_checked(command: Command) -> None:
    said = command("if rank: dist.all_reduce(x)\nprint(x)", "--check")
    assert said.code == 1 and "uneven-calls" in said.kinds


def test_the_check_is_for_one_instance(command: Command) -> None:
    for words in (["--check"], ["--orders", "2"], ["--check-order", "2"]):
        said = command(RIGHT, *words, "--instances", "2", report=False)
        assert said.code == 2 and "leave out --instances" in said.text


def test_a_wrong_script_is_no_finding(command: Command) -> None:
    said = command("def", "--check", report=False)
    assert said.code == 1 and "SyntaxError" in said.text
    said = Said(
        run_in_fork(lambda: main(["torchrun", "--check", "gone.py"]), Path("/dev/null")), "", None
    )
    assert said.code == 2


def test_another_engine_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["torchrun", "--check=mpi", "train.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--check=mpi: expected --check, --check=nccl or --check=gloo" in said


def test_help_has_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["torchrun", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in ("--check ", "--check=nccl", "--check=gloo", "--check-report FILE", "--orders N"):
        assert option in text
    assert "--check-order K" in text and "--check-values" not in text


def test_ranks_are_free_under_the_check(command: Command) -> None:
    assert command(RIGHT, "--schedule", "free").report == []


# ---------------------------------------------------------------- --orders


def test_a_right_script_has_the_same_result_in_all_orders(command: Command) -> None:
    said = command(RIGHT, "--orders", "3", ranks=3)
    assert (said.code, said.report) == (0, [])
    assert "gpusim torchrun: check: 3 other orders have the same result" in said.text
    assert said.text.count("[rank0]: sum") == 1


def test_the_first_order_that_differs_is_named_and_repeats(command: Command) -> None:
    said = command(ANYBODY, "--orders", "8", ranks=4)
    assert said.code == 1 and "result-differs" in said.kinds
    [found] = [each for each in said.report or [] if each["kind"] == "result-differs"]
    assert found["ranks"] == [0] and "prints 'came" in found["text"]
    usual = "[1.0, 2.0, 3.0]"
    assert f"not 'came {usual}'" in found["text"]
    number = found["text"].partition("--check-order ")[2].split()[0]
    for _ in range(2):
        again = command(ANYBODY, "--check-order", number, ranks=4)
        line = next(each for each in again.text.splitlines() if "came" in each)
        assert line.partition(": ")[2] in found["text"]
    for before in range(int(number)):
        assert usual in command(ANYBODY, "--check-order", str(before), ranks=4).text


def test_values_of_calls_are_compared(command: Command) -> None:
    """Of a program that prints nothing; the line is the call's."""
    lines = ANYBODY.replace("print('came', came)", "x[0] = came[0]") + "dist.all_reduce(x)\nx.sum()"
    said = command(lines, "--orders", "8", ranks=4)
    [found] = [each for each in said.report or [] if each["kind"] == "result-differs"]
    assert found["ranks"] == [0] and "is posted with other values" in found["text"]
    line = (HEAD + dedent(lines)).splitlines().index("dist.all_reduce(x)") + 1
    assert found["site"].endswith(f"train.py:{line}")


def test_a_read_that_is_too_early_differs_in_order_0(command: Command) -> None:
    """Which completes calls as soon as they can be."""
    lines = "dist.barrier()\nwork = dist.all_reduce(x, async_op=True)\n"
    lines += "dist.barrier()\nprint(x.sum().item())\nwork.wait()"
    said = command(lines, "--orders", "1")
    assert {*said.kinds} == {"read-before-wait", "result-differs"} and said.code == 1
    assert "in order 0 rank 0 prints '16.0', not 'nan'" in said.text


def test_a_script_that_fails_is_not_run_again(command: Command, tmp_path: Path) -> None:
    said = command(f"open('{tmp_path}/ran', 'a').write('x')\n{FAILS}", "--orders", "3")
    assert said.code == 1 and "read-before-wait" in said.kinds
    assert (tmp_path / "ran").read_text() == "xx"


def test_a_script_that_fails_in_another_order_is_named(command: Command) -> None:
    lines = ANYBODY.replace("print('came', came)", "assert came[0] == 1, came")
    said = command(lines, "--orders", "8", ranks=4)
    [found] = [each for each in said.report or [] if each["kind"] == "result-differs"]
    assert said.code == 1 and "the program fails in order" in found["text"]


def test_a_script_that_differs_by_itself_is_not_compared(command: Command) -> None:
    said = command("print(time.time_ns(), os.getpid())", "--orders", "5")
    assert (said.code, said.report) == (0, [])
    assert "orders are not compared: the program has another result in each run" in said.text


def test_findings_of_the_first_run_come_once(command: Command) -> None:
    lines = "work = dist.all_reduce(x, async_op=True)\nx.sum()\nwork.wait()\nprint(x)"
    said = command(lines, "--orders", "2")
    assert (said.code, said.kinds) == (1, ["read-before-wait"])
    assert said.text.count("read-before-wait at") == 1


@pytest.mark.parametrize("mode", [["--threads"], *slow(["--processes"])], ids=str)
def test_orders_of_threads(command: Command, mode: list[str]) -> None:
    assert "result-differs" in command(ANYBODY, "--orders", "8", *mode, ranks=4).kinds
    assert command(RIGHT, "--orders", "2", *mode).report == []


def test_options_that_orders_do_not_take(command: Command) -> None:
    for words in (["--orders", "2"], ["--check-order", "0"]):
        said = command(RIGHT, *words, "--schedule", "free", report=False)
        assert said.code == 2 and "leave out --schedule free" in said.text
    for words in (["--orders", "0"], ["--orders", "x"], ["--check-order", "-1"]):
        said = command(RIGHT, *words, report=False)
        assert said.code == 2 and words[0] in said.text and "[rank" not in said.text


@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGTERM)], ids=str)
@pytest.mark.parametrize("run", ["first", *slow("later")])
def test_signals_end_all_runs(tmp_path: Path, number: int, run: str) -> None:
    """As Ctrl-C does: the whole group of processes gets it."""
    seen = tmp_path / "seen"
    waits = f"open('{seen}', 'a').write('x')\n"
    least = 1 if run == "first" else 3
    waits += f"if len(open('{seen}').read()) >= {least}: time.sleep({PATIENCE})\n"
    (tmp_path / "train.py").write_text(HEAD + waits + RIGHT)
    words = ["torchrun", "--ranks", "2", "--orders", "4", "train.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gpusim", *words],
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert until(lambda: seen.exists() and len(seen.read_text()) >= least)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 143), errors
    assert "Traceback" not in errors
    assert_no_process(process.pid)
