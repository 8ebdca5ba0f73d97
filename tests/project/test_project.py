"""What a new user meets first: make, its messages, and a changelog of the current version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gpusim
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
# Tests may themselves run under make, whose flags and variables would reach the one started here.
OF_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "ARGS", "AREA", "SEED"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_MAKE}


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_make_alone_lists_the_targets() -> None:
    answer = make()
    assert answer.returncode == 0
    listed = re.findall(r"^  make ([\w-]+)  +\S", answer.stdout, re.MULTILINE)
    expected = ["help", "demo", "test", "test-all", "test-newest", "test-machines", "frameworks"]
    expected += ["lint", "docs", "bench", "gpu", "gpu-wheels", "gpu-kernels", "gpu-env", "clean"]
    assert listed == expected


def test_without_a_python_make_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    answer = make("-f", str(ROOT / "Makefile"), "PYTHON=no-such-python", "test", cwd=tmp_path)
    assert answer.returncode != 0
    assert "gpusim needs Python 3.11 or later" in answer.stderr
    assert "tried: no-such-python" in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_ci_runs_make_test_and_make_runs_a_lane() -> None:
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert last.partition(" #")[0].split() == ["make", "test", "ARGS=--disable-warnings"]
    for target, words in (
        (["test"], ""),
        (["test-all", "AREA=torch"], "--lane all --area torch"),
        (["test", "ARGS=-k name"], "-k name"),
    ):
        command = make("-n", *target).stdout.splitlines()[-1].split()
        assert command[1:] == ["-m", "tests", *words.split()]


def test_the_newest_lane_says_which_versions_it_tries(tmp_path: Path) -> None:
    """With an interpreter that prints its arguments, and runs no tests."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    python = tmp_path / ".venv-newest" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    (python.parents[1] / ".python").touch()
    answer = make("test-newest", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    install, upgrade, versions, tests = answer.stdout.splitlines()[-4:]
    assert "--editable .[checks]" in install and upgrade.endswith("--upgrade torch jax")
    assert versions == "-m tests.machines.newest .venv/bin/python"
    assert tests.startswith("-m tests --lane area tests/collectives tests/jax")


@pytest.mark.parametrize(
    ("tests", "selection", "slow"),
    [
        ("", "test_examples.py", False),
        ("all", "test_examples.py", True),
        ("", "test_examples.py::test_runs_as_a_script[poptorch_digits]", True),
    ],
    ids=["by default", "in full", "by id"],
)
def test_slow_tests_run_in_full_runs_and_when_they_are_selected(
    tests: str, selection: str, slow: bool
) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", selection],
        cwd=ROOT / "tests" / "project",
        env=os.environ | {"GPUSIM_TESTS": tests},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert found.returncode == 0, found.stdout
    assert ("[poptorch_digits]" in found.stdout) == slow


def test_changelog_has_the_version() -> None:
    assert f"\n## {gpusim.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_extra_that_is_offered_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("gpusim/**/*.py")]
    text = "\n".join(page.read_text() for page in pages)
    offered = set(re.findall(r"'(?:gpusim|\.)\[(\w+)\]'", text))
    offered |= set(re.findall(r'install\("(\w+)"\)', text))
    assert "study" in offered
    assert offered <= set(project["optional-dependencies"])
