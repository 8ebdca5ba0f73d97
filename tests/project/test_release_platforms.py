"""gpusim on Windows's and macOS's standard library, which `tests.machines.elsewhere` plays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
SYSTEMS = ("windows", "macos")
LIGHT = """
import os, sys
import numpy as np
import gpusim
from gpusim import P, lax
x = np.arange(4.0)
total = lambda x: lax.psum(x, "i")
assert gpusim.vmap(total, axis_name="i")(x).tolist() == [6.0] * 4
assert gpusim.pmap(total, axis_name="i")(x).tolist() == [6.0] * 4
mesh = gpusim.Mesh((4,), ("i",))
assert gpusim.shard_map(total, mesh=mesh, in_specs=P("i"), out_specs=P())(x).tolist() == [6.0]
import gpusim.study
assert gpusim.study.sweep("lognormal", elements=64, replicas=[4]) is not None
hidden = {"windows": ("fork", "getuid", "O_NONBLOCK"), "macos": ("sched_getaffinity",)}
assert not any(hasattr(os, name) for name in hidden[os.environ["SYSTEM"]])
print("light parts work on", sys.platform)
"""
MODULES = """
import importlib, pkgutil
import gpusim
failed = []
for found in pkgutil.walk_packages(gpusim.__path__, "gpusim.", onerror=lambda name: None):
    if found.name.rpartition(".")[2] in ("__main__", "shim", "gloo", "mpi", "xla", "recording"):
        continue  # programs
    try:
        importlib.import_module(found.name)
    except Exception as error:
        failed.append(f"{found.name}: {type(error).__name__}: {error}")
print(failed)
"""
COMMAND = "import sys\nfrom gpusim.tools.cli import main\nsys.exit(main(sys.argv[1:]))\n"
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(2) * (1 + dist.get_rank())
dist.all_reduce(total)
print("sum", total.tolist())
"""


def play(
    system: str, program: str, folder: Path, *words: str, packages: str = ""
) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "tests.machines.elsewhere", system + packages, str(path), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SYSTEM": system, "PYTHONUTF8": "0"},
        capture_output=True,
        encoding="cp1252" if system == "windows" else "utf-8",
        errors="replace",
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_maps_collectives_and_studies_work(system: str, tmp_path: Path) -> None:
    done = play(system, LIGHT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"light parts work on {'win32' if system == 'windows' else 'darwin'}" in done.stdout


def test_what_is_hidden_is_hidden(tmp_path: Path) -> None:
    """A module that uses fork at its import fails there."""
    program = "import os\nos.register_at_fork(after_in_child=print)\n"
    assert "no attribute 'register_at_fork'" in play("windows", program, tmp_path).stderr
    assert play("macos", program, tmp_path).returncode == 0
    for system in SYSTEMS:
        assert "No such file" in play(system, "open('/proc/cpuinfo')", tmp_path).stderr
    assert "No module named 'fcntl'" in play("windows", "import fcntl", tmp_path).stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_is_imported(system: str, tmp_path: Path) -> None:
    done = play(system, MODULES, tmp_path, packages="+torch")
    assert done.returncode == 0, done.stderr
    failed = [
        each for each in eval(done.stdout.splitlines()[-1]) if "needs CuPy" not in each and
        # Windows's own, which torch and the standard library ask for where the platform says so
        not any(name in each for name in ("msvcrt", "winreg", "_winapi", "_scproxy", "WinDLL"))
    ]  # fmt: skip
    assert failed == []


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--help", "usage: gpusim"),
        ("info", "NumPy"),
        ("study --input lognormal --elements 64 --replicas 4,8 --store x.store", "ring"),
        ("compare a b", "The runs are equal: 1 call has the same bits."),
    ],
)
def test_light_commands_work(system: str, words: str, said: str, tmp_path: Path) -> None:
    if words.startswith("compare"):
        for name in "ab":
            program = (
                "import gpusim, numpy as np\n"
                f"with gpusim.record({name!r}):\n"
                "    gpusim.vmap(lambda x: gpusim.lax.psum(x, 'i'), axis_name='i')(np.ones(4))\n"
            )
            assert play(system, program, tmp_path).returncode == 0
    done = play(system, COMMAND, tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_two_studies_of_one_store_exclude_each_other_on_windows(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from gpusim.tools.study.store import Store
with Store({"a": 1}, Path("x.store")):
    try:
        Store({"a": 1}, Path("x.store"), resume=True)
    except BlockingIOError as error:
        print(error)
Store({"a": 1}, Path("x.store"), resume=True).close()
print("free again")
"""
    done = play("windows", program, tmp_path)
    assert done.stdout.splitlines() == [
        "x.store is in use: another sweep writes it",
        "free again",
    ], done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_torchrun_runs_threads(system: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("torchrun", "--nproc-per-node", "2", "train.py")
    done = play(system, COMMAND, tmp_path, *words, packages="+torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [3.0, 3.0]") == 2


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("torchrun --processes train.py", "processes=True needs Linux"),
        ("equal --ranks 2 train.py", "gpusim equal runs ranks as processes, which need Linux"),
        ("resume --save-ranks 1 --load-ranks 1 train.py", "processes, which need Linux"),
        ("torchrun --faults seed=1 --runs 2 train.py", "processes, which need Linux"),
    ],
)
def test_what_needs_linux_says_so(system: str, words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = play(system, COMMAND, tmp_path, *words.split(), packages="+torch")
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_poprun_and_devices_say_what_windows_lacks(tmp_path: Path) -> None:
    program = "from gpusim.tools.launch import main\nmain(['--num-instances', '2', 'x'])"
    done = play("windows", program, tmp_path)
    assert "poprun: instances need mpirun and FIFOs, which" in done.stderr
    program = "from gpusim.devices import attach, select_by_id\nattach(select_by_id(0, replicas=1))"
    done = play("windows", program, tmp_path)
    assert "locks on simulated IPUs need pwrite, which" in done.stderr, done.stderr


@pytest.mark.parametrize("words", [("--help",), ("torchrun", "--help"), ("study", "--help")])
def test_help_prints_on_a_console_without_unicode(words: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def test_text_files_have_an_encoding() -> None:
    """Without one a file's text would be in the machine's: cp1252 on Windows."""
    command = ["ruff", "check", "--isolated", "--preview", "--select", "PLW1514", "--no-cache"]
    sources = ("gpusim", "fallback", "pytest_gpusim.py")
    done = subprocess.run(
        [sys.executable, "-m", *command, *sources], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
