"""A command that needs a package that is not installed ends with 2, and says how to install it.

Everything runs in an environment that lacks the extras: nothing is hidden or mocked.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gpusim.tools import cli
from gpusim.tools.options import WRONG
from tests.oracles.bare_python import bare_python
from tests.oracles.machine_time import PATIENCE

RUNS_WITHOUT = {
    "info": ["info"],
    "run": ["run", "x.py"],
    "study": ["study", "--input", "normal", "--elements", "8", "--ranks", "2", "--seeds", "0"],
    "compare": ["compare", "record", "record"],
    "twin check --list": ["twin", "check", "--list"],
    "twin infer": ["twin", "infer", "sums.npz"],
    "reveal --write": ["reveal", "--write", "reveal_order.py"],
}
"""Commands that need no extra, with an exit code of 0."""

NEEDS = {
    "demo": (["demo"], "scikit-learn, matplotlib, rich", "study"),
    "schedule": (["schedule", "--stages", "2"], "matplotlib", "study"),
    "study --picture": (
        ["study", "--input", "normal", "--elements", "8", "--picture", "x.png"],
        "matplotlib",
        "study",
    ),
    "study gradients": (["study", "--input", "gradients", "--ranks", "2"], "scikit-learn", "study"),
    "study train": (["study", "train", "--epochs", "1"], "scikit-learn", "study"),
    "torchrun": (["torchrun", "x.py"], "PyTorch", "torch"),
    "torchrun --check": (["torchrun", "--check", "x.py"], "PyTorch", "torch"),
    "torchrun --orders": (["torchrun", "--orders", "2", "x.py"], "PyTorch", "torch"),
    "torchrun --faults": (["torchrun", "--faults", "seed=1", "x.py"], "PyTorch", "torch"),
    "torchrun --device cuda": (["torchrun", "--device", "cuda", "x.py"], "PyTorch", "torch"),
    "jaxrun": (["jaxrun", "x.py"], "JAX", "jax"),
    "equal": (["equal", "--ranks", "2", "x.py"], "PyTorch", "torch"),
    "invariant": (["invariant", "x.py"], "PyTorch", "torch"),
    "resume": (
        ["resume", "--save-ranks", "1", "--load-ranks", "1", "x.py", "{checkpoint}"],
        "PyTorch",
        "torch",
    ),
    "compare --picture": (["compare", "--picture", "x.png", "record", "record"], "matplotlib",
                          "study"),
    "reveal --engine gloo": (["reveal", "--engine", "gloo"], "--engine gloo", "torch"),
    "reveal --engine xla": (["reveal", "--engine", "xla"], "--engine xla", "jax"),
    "reveal --engine openmpi": (
        ["reveal", "--engine", "openmpi", "--dtype", "float32"], "--engine openmpi", "mpi",
    ),
    "twin check": (["twin", "check"], "gloo did not run here: gloo-ring", "torch"),
    "twin check xla-cpu": (["twin", "check", "xla-cpu"], "xla did not run here: xla-cpu", "jax"),
}  # fmt: skip
"""Commands that need an extra: the arguments, the package as it is named, the extra."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program, a record and an array, of the Python without extras."""
    place = tmp_path_factory.mktemp("work")
    (place / "x.py").write_text("print('was run')\n")
    code = (
        "import gpusim, numpy as np\n"
        "x = np.ones((3, 4), np.float32)\n"
        "with gpusim.record('record'):\n"
        "    gpusim.vmap(lambda v: gpusim.lax.psum(v, 'i'), axis_name='i')(x)\n"
        "np.savez('sums.npz', inputs=x, sum=x.sum(0))\n"
    )
    subprocess.run([python, "-c", code], cwd=place, check=True)
    return place


def gpusim(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = f"{python.parent}:/usr/bin:/bin"  # no mpirun of another environment
    return subprocess.run(
        [python, "-m", "gpusim", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
    )


def test_every_command_is_here() -> None:
    given = [" ".join(words) for words in RUNS_WITHOUT.values()]
    given += [" ".join(words) for words, _, _ in NEEDS.values()]
    parser = cli.command_line()
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    assert commands
    for command in commands:
        assert any(line.startswith(command) for line in given), command


@pytest.mark.parametrize("name", RUNS_WITHOUT)
def test_what_needs_no_extra_runs(name: str, python: Path, folder: Path) -> None:
    done = gpusim(python, folder, *RUNS_WITHOUT[name])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_ends_with_2_and_is_named(name: str, python: Path, folder: Path) -> None:
    words, package, extra = NEEDS[name]
    done = gpusim(python, folder, *words)
    said = done.stderr + done.stdout
    assert done.returncode == WRONG, said
    assert f"pip install 'gpusim[{extra}]'" in said and package in said
    assert "was run" not in said and "Traceback" not in said
    command = words[0]
    assert f"gpusim {command}: gpusim {command}" not in said


def test_twin_check_names_what_installs_each_engine(python: Path, folder: Path) -> None:
    done = gpusim(python, folder, "twin", "check")
    lines = done.stdout.splitlines()
    assert lines[-1] == "Nothing was compared." and "0 of 0" not in done.stdout
    assert "--python PATH" in next(line for line in lines if "mpich" in line)
    assert next(line for line in lines if "nccl-ring" in line).startswith("Not compared, as this")
    found = json.loads(gpusim(python, folder, "twin", "check", "--json").stdout)
    assert found["install"].keys() == {"xla", "openmpi", "mpich", "gloo"}
    assert found["rows"] == [] and "gloo-ring" in found["not asked"]


def test_poprun_without_mpirun_ends_with_2(python: Path, folder: Path) -> None:
    environ = {"PATH": str(python.parent)}
    code = "import sys; from gpusim.tools.launch.command import main; sys.exit(main())"
    done = subprocess.run(
        [python, "-c", code, str(python), "x.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == WRONG, done.stderr
    assert "pip install 'gpusim[mpi]'" in done.stderr and "was run" not in done.stdout
