"""`gpusim torchrun` on processes: what it prints, and its exit code, are those of threads."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from gpusim.tools.cli import main
from tests.tools.test_torchrun import script
from tests.worlds.test_world import start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")

BEGIN = """
    import logging, os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    rank = dist.get_rank()
"""


@pytest.fixture(autouse=True)
def path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (
            """
            logging.basicConfig(level="INFO")
            x = torch.full((3,), 0.1 * rank)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            print("sum", x.sum().item().hex(), sys.argv, __name__)
            logging.info("from %d", rank)
            print("no end", end="")
            """,
            0,
            "[rank1]: sum",
        ),
        ("sys.exit(3 if rank == 1 else 0)", 1, "rank 1 ended with exit code 3"),
        (
            """
            def fail():
                raise KeyError("weights")
            if rank == 1:
                fail()
            dist.barrier()
            """,
            1,
            "[rank1]: KeyError: 'weights'",
        ),
        ("dist.all_reduce(torch.ones(2 + rank))", 1, "differ in tensors"),
    ],
    ids=["runs", "exits", "raises", "differs"],
)
def test_output_is_that_of_threads(
    text: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, dedent(BEGIN) + dedent(text))
    found = []
    for more in (["--threads"], []):
        options = ["--nproc-per-node", "2", "--summary", *more]
        assert main(["torchrun", *options, path, "--x"]) == code
        found.append(capsys.readouterr())
    assert found[0] == found[1]
    assert said in found[1].out + found[1].err


def test_a_killed_process_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, dedent(BEGIN) + "dist.barrier()\nif rank: os.kill(os.getpid(), 9)\n")
    assert main(["torchrun", "--nproc-per-node", "2", "--processes", path]) == 1
    error = capsys.readouterr().err
    assert re.search(r"the process of rank 1 was killed by SIGKILL.*train.py:\d+", error)


def test_state_of_modules_belongs_to_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module in the manner of Megatron's parallel_state."""
    (tmp_path / "parallel_state.py").write_text(
        "import torch.distributed as dist\n"
        "_GROUP = None\n"
        "def initialize(size):\n"
        "    global _GROUP\n"
        "    assert _GROUP is None\n"
        "    for first in range(0, dist.get_world_size(), size):\n"
        "        ranks = list(range(first, first + size))\n"
        "        group = dist.new_group(ranks)\n"
        "        if dist.get_rank() in ranks:\n"
        "            _GROUP = group\n"
    )
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        import parallel_state
        dist.init_process_group("nccl")
        parallel_state.initialize(2)
        x = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(x, group=parallel_state._GROUP)
        print(x.item())
        """,
    )
    assert main(["torchrun", "--nproc-per-node", "4", "--processes", "--only-rank", "3", path]) == 0
    assert capsys.readouterr().out == "1100.0\n"
    assert main(["torchrun", "--nproc-per-node", "4", "--threads", path]) == 1  # share the module


def test_instances_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "")
    assert main(["torchrun", "--instances", "3", "--nproc-per-node", "4", path]) == 2
    said = "--instances 3: this command runs as 1 instance; start it by mpirun -n 3 gpusim"
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "code"), [("", 0), ("raise", 1), ("kill", 1)])
def test_output_of_instances_is_that_of_processes(
    argument: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under mpirun, with 5 ranks on 2 instances."""
    path = script(
        tmp_path,
        dedent(BEGIN)
        + dedent(
            """
            x = torch.full((3,), 0.1 * rank)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            print("sum", x.sum().item().hex(), sys.argv)
            dist.barrier()
            if rank == 4 and "raise" in sys.argv:
                raise KeyError("weights")
            if rank == 4 and "kill" in sys.argv:
                os.kill(os.getppid(), 9)
            dist.barrier()
            """
        ),
    )
    if argument != "kill":
        options = ["--nproc-per-node", "5", "--summary", "--processes"]
        assert main(["torchrun", *options, path, argument]) == code
        expected = capfd.readouterr()
    options = ["--nproc-per-node", "5", "--summary", "--instances", "2"]
    found = start(2, "-m", "gpusim", "torchrun", *options, path, argument)
    if argument == "kill":
        assert found.returncode
        # By the launch, or by a call that finds it first.
        assert re.search(r"instance 1 \((ranks|replicas) 3 to 4\) is gone", found.stderr)
        return
    assert found.returncode == code
    assert found.stdout == expected.out
    for line in expected.err.splitlines():
        assert line in found.stderr


@pytest.mark.parametrize(("options", "times"), [([], 3), (["--preload", "large"], 1)])
def test_a_preloaded_module_is_imported_once(
    options: list[str], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the GPUs that ranks have, and what a rank changes in it is the rank's."""
    monkeypatch.delitem(sys.modules, "large", raising=False)
    note = "import os, torch\nopen('imports', 'a').write(f'{torch.cuda.device_count()} ')\nx = []\n"
    (tmp_path / "large.py").write_text(note)
    program = "import large\nlarge.x.append(rank)\ndist.barrier()\nassert large.x == [rank]\n"
    path = script(tmp_path, dedent(BEGIN) + program)
    monkeypatch.chdir(tmp_path)
    count = ["--nproc-per-node", "3", "--device", "cpu"]
    assert main(["torchrun", "--processes", *count, *options, path]) == 0
    assert (tmp_path / "imports").read_text() == "3 " * times


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("absent", "preload absent: ModuleNotFoundError: No module named 'absent'"),
        ("failing", r"preload failing: ZeroDivisionError: division by zero at .*failing.py:2"),
        ("leaving", "preload leaving: SystemExit: 0"),
        ("threaded", r"preload threaded: its import starts threads \(beside\)"),
    ],
)
def test_a_module_that_cannot_be_preloaded(
    module: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "failing.py").write_text("\n1 / 0\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "threaded.py").write_text(
        "import threading\nend = threading.Event()\n"
        "threading.Thread(target=end.wait, name='beside', daemon=True).start()\n"
    )
    path = script(tmp_path, "print('runs')\n")
    options = ["--processes", "--nproc-per-node", "2", "--preload", module]
    assert main(["torchrun", *options, path]) == 1
    if module in sys.modules and module == "threaded":
        sys.modules[module].end.set()
    output = capsys.readouterr()
    assert re.search(said, output.err) and "runs" not in output.out


def test_a_preloaded_module_draws_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its draws are the same on all ranks, and those of a rank are as without it."""
    (tmp_path / "drawing.py").write_text("import torch\nx = torch.rand(()).item()\n")
    program = "import drawing\nprint(drawing.x, torch.rand(()).item())\n"
    path = script(tmp_path, dedent(BEGIN) + program)
    found = []
    for seed in ("1", "1", "2"):
        monkeypatch.delitem(sys.modules, "drawing", raising=False)
        options = ["--processes", "--nproc-per-node", "2", "--preload", "drawing", "--seed", seed]
        assert main(["torchrun", *options, path]) == 0
        found.append(sorted(capsys.readouterr().out.splitlines()))
    assert found[0] == found[1] != found[2]
    (_, mine, first), (_, theirs, second) = (line.split() for line in found[0])
    assert mine == theirs and first != second


def test_instances_preload_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "print('runs')\n")
    assert main(["torchrun", "--instances", "2", "--preload", "large", path]) == 2
    assert "--preload is for the processes of one instance" in capsys.readouterr().err


def test_threads_preload_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "print('runs')\n")
    assert main(["torchrun", "--threads", "--preload", "large", path]) == 2
    assert "--preload is for ranks as processes" in capsys.readouterr().err
