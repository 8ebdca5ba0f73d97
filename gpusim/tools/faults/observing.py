"""Observes one rank, in its process: all that a fault could disturb, and the bits at its end."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpusim.files import replace_text
from gpusim.torch.distributed.checks.digests import local_part
from gpusim.torch.distributed.faults import watching
from gpusim.torch.distributed.memory import bits_of

__all__ = ["digest_of", "observed"]

DEEPEST = 8
"""How deep states of optimizers are looked into."""


@contextmanager
def observed(folder: str, rank: int) -> Iterator[None]:
    """A block around a rank's program; if it ends well, `rank-N.json` is written to the folder.

    The file has digests of the weights and states of all optimizers that the program has made. A
    start of the ranks that comes later overwrites it.
    """
    from torch.optim import Optimizer

    optimizers: list[Optimizer] = []
    make = Optimizer.__init__

    @functools.wraps(make)
    def made(optimizer: Optimizer, *args: Any, **named: Any) -> None:
        make(optimizer, *args, **named)
        # Also one that makes no step, as all were made before a restart. For itself, and not a weak
        # reference: the program's own may be gone at its end.
        optimizers.append(optimizer)

    setattr(Optimizer, "__init__", made)  # noqa: B010  # mypy refuses to assign a method
    before = set(sys.modules)
    # torch takes the stack for each fake tensor mode, DTensor makes one for each new shape, and
    # each looks at the dates of all files of the stack. They do not change in a run.
    linecache.checkcache = lambda filename=None: None
    try:
        yield
    finally:
        setattr(Optimizer, "__init__", make)  # noqa: B010  # mypy refuses to assign a method
    left: dict[str, Any] = {}
    if optimizers:
        left = {"weights": _weights(optimizers), "states": _states(optimizers)}
    own = watching.seen()
    if own is not None:
        left["seen"] = {"calls": own.calls, "writes": own.writes, "waits": own.waits}
        left["modules"] = sorted(set(sys.modules) - before)
        left["sources"] = sorted(linecache.cache)
    replace_text(Path(folder, f"rank-{rank}.json"), json.dumps(left))


def _weights(optimizers: list[Any]) -> str:
    groups = [each.param_groups for each in optimizers]
    return digest_of([[group["params"] for group in own] for own in groups])


def _states(optimizers: list[Any]) -> str:
    found: list[Any] = []
    for each in optimizers:
        for group in each.param_groups:
            found.append({key: value for key, value in group.items() if key != "params"})
            found += [each.state.get(weight) for weight in group["params"]]
    return digest_of(found)


def digest_of(value: Any) -> str:
    """A digest of the bits of all tensors and numbers in lists, tuples and dicts.

    >>> import torch
    >>> one, other = torch.tensor([0.0]), torch.tensor([-0.0])
    >>> digest_of([one, {"lr": 0.1}]) == digest_of([other, {"lr": 0.1}])
    False
    """
    found = hashlib.sha256()
    _add(found, value, DEEPEST)
    return found.hexdigest()[:32]


def _add(found: Any, value: Any, depth: int) -> None:
    from torch import Tensor

    if isinstance(value, Tensor):
        part = local_part(value)
        found.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        if part is not None:
            found.update(memoryview(_bytes(part)))
    elif isinstance(value, dict) and depth:
        for key in sorted(value, key=str):
            found.update(f"key {key} ".encode())
            _add(found, value[key], depth - 1)
    elif isinstance(value, list | tuple) and depth:
        found.update(f"list {len(value)} ".encode())
        for each in value:
            _add(found, each, depth - 1)
    elif value is None or isinstance(value, bool | int | float | str):
        found.update(f"{value!r} ".encode())
    else:  # an object's text may name its address
        found.update(type(value).__name__.encode())


def _bytes(part: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(bits_of(part, "faults")).reshape(-1).view(np.uint8)
