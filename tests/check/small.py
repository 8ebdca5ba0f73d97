"""Small programs on ranks: what the check finds in them, and what it leaves as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import Check, Finding
from tests.check.cases import MARKER
from tests.torch.children import needs_linux

__all__ = [
    "BOTH",
    "Program",
    "assert_as_without",
    "assert_named",
    "bits",
    "checked",
    "expected",
    "needs_linux",
    "places",
    "started",
]

BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])

Program = Callable[[int], Any]

Place = tuple[str, str, tuple[int, ...]]
"""The kind, site and ranks of a finding."""


def bits(value: Any) -> Any:
    """A result in terms of bits; of tensors also what else can differ."""
    if isinstance(value, Tensor):
        held = value.detach()
        raw = torch.empty(0) if held.is_sparse else held.resolve_conj().contiguous().reshape(-1)
        data = bytes(raw.view(torch.uint8).tolist()) if raw.numel() else b""
        return held.dtype, tuple(held.shape), held.stride(), value.requires_grad, data
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return value


def started(program: Program, backend: str | None) -> Program:
    """The program between the beginning and the end of its group; it returns bits."""

    def run(rank: int) -> Any:
        dist.init_process_group(backend)
        found = bits(program(rank))
        dist.destroy_process_group()
        return repr(found)

    return run


def checked(
    program: Program, ranks: int = 2, engine: str = "", backend: str | None = None, **more: Any
) -> tuple[list[Finding], list[Any]]:
    """The findings of a program, and the bits of what its ranks return."""
    check = Check(engine)
    found = launch(started(program, backend), ranks, check=check, **more)
    assert not check.gave_up, check.gave_up
    return check.findings, found


def places(findings: list[Finding]) -> set[Place]:
    return {(each.kind, each.site, tuple(each.ranks)) for each in findings}


def expected(program: Callable[..., Any], ranks: int) -> set[Place]:
    """The findings that the comments of the program's lines say: `# finds: KIND on RANKS`."""
    lines, first = inspect.getsourcelines(program)
    path = inspect.getsourcefile(program)
    found = set()
    for number, line in enumerate(lines, first):
        for kind, on in MARKER.findall(line):
            named = range(ranks) if on.strip() == "all" else map(int, on.split(","))
            found.add((kind, f"{path}:{number}", tuple(named)))
    return found


def assert_named(program: Program, ranks: int = 2, **more: Any) -> list[Finding]:
    """The program has the findings that its comments say, and no others."""
    findings, _ = checked(program, ranks, **more)
    wanted = expected(program, ranks)
    assert wanted, "the program has no comment '# finds:'"
    assert places(findings) == wanted, [each.text for each in findings]
    return findings


def assert_as_without(
    program: Program, ranks: int = 2, backend: str | None = None, engine: str = "", **more: Any
) -> None:
    """The program has no finding, and its ranks return what they return without the check."""
    plain = launch(started(program, backend), ranks, **more)
    findings, found = checked(program, ranks, engine, backend, **more)
    assert not findings, [each.lines() for each in findings]
    assert found == plain
