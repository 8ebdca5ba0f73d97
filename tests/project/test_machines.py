"""`make test-machines` takes all that belongs to the checkout to the other machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import __main__ as machines


def test_another_machine_gets_a_checkout_that_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With gpusim/fallback, which is a link."""
    monkeypatch.setattr(machines, "WORK", tmp_path)
    tree = machines.checkout()
    where = "import gpusim; print(gpusim.__file__, gpusim.fallback.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", where], cwd=tree, capture_output=True, text=True, check=True
    )
    package = tree / "gpusim"
    assert done.stdout.split() == [
        str(package / "__init__.py"), str(package / "fallback" / "__init__.py")
    ]  # fmt: skip
