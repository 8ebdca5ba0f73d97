"""A file of a user's, beside a script, hides no module that gpusim imports.

Python looks for a script's imports in its folder first, so gpusim must import no module of its own
by a bare name. Only names of the standard library and of its dependencies are left, which hide
these from every program.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
PACKAGES = ("gpusim", "fallback")
COMMON = (
    "arrays", "axes", "bench", "checks", "cli", "command", "common", "config", "data", "devices",
    "errors", "examples", "fallback", "figures", "files", "formats", "groups", "helpers", "hub",
    "launch", "libraries", "main", "metrics", "model", "optional", "options", "orders", "plan",
    "program", "ranks", "records", "report", "rounding", "run", "settings", "startup", "study",
    "table", "testing", "tests", "tools", "torch_hook", "tracing", "train", "trainer", "tree",
    "trees", "twins", "utils", "version", "wires", "words", "workers",
)  # fmt: skip
SCRIPT = """
import os
import gpusim, numpy as np
import gpusim.study, gpusim.tools.cli, gpusim.collectives, gpusim.lax, gpusim.popxl
x = np.arange(6, dtype=np.float32).reshape(3, 2)
total = gpusim.vmap(lambda v: gpusim.lax.psum(v, "i"), axis_name="i", out_axes=None)(x)
assert total.tolist() == [6, 9], total
if "RANK" in os.environ:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
print("imported")
"""


def names() -> list[str]:
    """Every name that a module of gpusim has, and those that users' files often have.

    Without those of the standard library and of installed packages, such as NVIDIA's `cuda`.
    """
    found = {*COMMON}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found.add(path.parent.name if path.stem.startswith("__") else path.stem)
    installed = {*metadata.packages_distributions()} - {*PACKAGES, "tests", "bench", "examples"}
    free = found - sys.stdlib_module_names - installed - {"gpusim", "sitecustomize"}
    return sorted(name for name in free if name.isidentifier() and not name.startswith("__"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shadows")
    for name in names():
        (place / f"{name}.py").write_text(f"raise SystemExit('hidden by {name}.py')\n")
    (place / "the_script.py").write_text(SCRIPT)
    return place


def test_there_are_names_to_hide() -> None:
    found = names()
    assert {"fallback", "bench", "errors", "figures", "tools", "tests", "words"} <= {*found}
    assert len(found) > 300


@pytest.mark.parametrize(
    "words",
    [
        ["the_script.py"],
        ["-m", "gpusim", "run", "the_script.py"],
        ["-m", "gpusim", "torchrun", "--ranks", "2", "the_script.py"],
        ["-m", "gpusim", "torchrun", "--ranks", "2", "--threads", "the_script.py"],
        ["-m", "gpusim", "torchrun", "--ranks", "2", "--check", "the_script.py"],
        ["-m", "gpusim", "jaxrun", "--devices", "2", "the_script.py"],
        ["-m", "gpusim", "info"],
    ],
    ids=" ".join,
)
def test_files_beside_a_script_hide_nothing(words: list[str], folder: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and "hidden by" not in done.stdout + done.stderr, done.stderr
    assert "imported" in done.stdout or words[-1] == "info"


def imported(tree: ast.AST) -> set[str]:
    """The first names of the absolute imports of a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


BESIDE = {
    "gpusim_ranks": "beside sitecustomize.py, which runs before a script's folder is looked in",
}
"""Modules of gpusim that are imported by a bare name, and why none hides them."""


def test_gpusim_imports_none_of_its_modules_by_a_bare_name() -> None:
    own = {*names()}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            bare = imported(ast.parse(path.read_text())) & own
            assert bare <= {*BESIDE}, f"{path.relative_to(ROOT)} imports {bare}"


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.slow
def test_packages_install_no_other_top_level_name(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    if kind == "wheel":
        tops = {name.partition("/")[0] for name in zipfile.ZipFile(path).namelist()}
        assert {top for top in tops if ".dist-info" not in top} == {"gpusim", "pytest_gpusim.py"}
        return
    with tarfile.open(path) as archive:  # a wheel is built of it, in a folder of its own
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "w")]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "w").iterdir()
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in files if ".dist-info" not in name} == {
        "gpusim",
        "pytest_gpusim.py",
    }
    assert "gpusim/fallback/fold.py" in files and "gpusim/words.py" in files
