"""Runs of pytest inside of a test: a file of tests in, its outcomes out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
HEAD = """
    import os, sys, threading, time, warnings, unittest
    import pytest, torch
    import torch.distributed as dist
    import numpy as np
    import gpusim
    from gpusim import lax
    from gpusim.reduction import current
"""
OPTIONS = ("-p", "pytest_gpusim", "-n0", "--strict-markers", "-Wignore")


class Result:
    """An inner run: its output, and its outcomes by the names of tests."""

    def __init__(self, result: pytest.RunResult) -> None:
        self.result = result
        self.out = result.stdout.str()
        words = re.findall(
            r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) \S+?::(\S+)", self.out, re.M
        )
        self.outcomes = {name: word for word, name in words}

    def section(self, name: str) -> str:
        """The report of a test that failed."""
        found = re.search(
            rf"^_+ (?:ERROR at \w+ of )?{re.escape(name)} _+$(.*?)^[_=]{{5,}}",
            self.out,
            re.M | re.S,
        )
        assert found, self.out
        return found[1]


Run = Callable[..., Result]


def python(*arguments: str, folder: Path, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.stdout + done.stderr
