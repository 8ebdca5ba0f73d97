"""Modules that were documented under another name are found there for one version."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import gpusim
from gpusim.deprecated import MOVED
from tests.oracles.machine_time import PATIENCE


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always::DeprecationWarning", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_old_names_are_the_new_modules_and_warn() -> None:
    lines = []
    for old in MOVED:
        package, _, name = old.rpartition(".")
        lines.append(f"from {package} import {name}; print({name}.__name__, {name}.__spec__.name)")
    done = python("-c", "\n".join(lines))
    assert done.stdout == "".join(f"{new} {new}\n" for new in MOVED.values()), done.stderr
    for number, (old, new) in enumerate(MOVED.items(), 1):
        assert f"<string>:{number}: DeprecationWarning: {old} is now {new};" in done.stderr
    assert done.stderr.count("DeprecationWarning") == len(MOVED)


def test_old_names_are_attributes_and_have_the_same_submodules() -> None:
    program = """
import gpusim
print(gpusim.environment.__name__)
import gpusim.engines.mpi, gpusim.runtime.engines.mpi
assert gpusim.engines.mpi is gpusim.runtime.engines.mpi
import gpusim.engines.nothing
"""
    done = python("-c", program)
    assert done.stdout == "gpusim.runtime.environment\n"
    assert "<string>:3: DeprecationWarning: gpusim.environment is now" in done.stderr
    assert "<string>:4: DeprecationWarning: gpusim.engines is now" in done.stderr
    assert "ModuleNotFoundError: No module named 'gpusim.engines.nothing'" in done.stderr


def test_the_old_launcher_runs() -> None:
    done = python("-m", "gpusim.launch", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: poprun")
    assert "gpusim.launch is now gpusim.tools.launch" in done.stderr
    assert python("-c", "import sys; from gpusim.launch import main; main").returncode == 0


def test_other_attributes_are_still_errors() -> None:
    with pytest.raises(AttributeError, match="module 'gpusim' has no attribute 'nothing'"):
        getattr(gpusim, "noth" + "ing")


def test_handlers_of_the_old_logger_get_records(caplog: pytest.LogCaptureFixture) -> None:
    old, records = logging.getLogger("gpusim.mapping"), []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    old.addHandler(handler)
    try:
        logging.getLogger("gpusim.maps").warning("a record")
    finally:
        old.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["a record"]
    assert "a record" in caplog.text
