"""Ranks in threads and in processes, for the tests of turns and of time-outs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.torch.children import needs_linux

SECOND = timedelta(seconds=1)
THREADS: dict[str, Any] = {}
PROCESSES: dict[str, Any] = {"processes": True}
both = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(THREADS, id="threads"),
        pytest.param(PROCESSES, id="processes", marks=needs_linux),
    ],
)


def store() -> Any:
    """The store of the ranks' group."""
    dist.init_process_group("gloo")
    found = dist.distributed_c10d._get_default_store()
    return found


def said(call: Callable[[], object]) -> str:
    """The exception of a call, as type and text."""
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
