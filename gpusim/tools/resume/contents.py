"""The contents of a checkpoint: tensors outside of modules and optimizers, and own counters.

An average of weights in a plain dictionary, or the number of the epoch, is state too. It shows in
the checkpoints that the resumed run saves later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .samples import digest

__all__ = ["contents_of"]

COUNTERS = re.compile(r"(^|_)(epochs?|steps?|iterations?|iter|samples|tokens|batch(es)?)(_|$)")
"""Names of numbers that count how far a run is."""
DRAWN = re.compile(r"rng|random|seed|loader|sampler")
"""Names of what is compared as random states and as data, where it counts only if it is used."""
MOST = 20_000
"""Leaves of one object that are looked at."""


def contents_of(value: Any) -> dict[str, str]:
    """Names of the tensors of floats and of the counters in a nested object, with their values.

    >>> list(contents_of({"step": 3, "time": 0.5, "ema": [torch.zeros(2)]}))
    ['step', 'ema.0']
    """
    found: dict[str, str] = {}
    for n, (name, leaf) in enumerate(_leaves(value, "")):
        if n >= MOST:
            break
        if DRAWN.search(name.lower()):
            continue
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and leaf.layout is torch.strided and not leaf.is_meta:
                found[name] = digest(leaf)
        elif COUNTERS.search(name.rpartition(".")[2].lower()) and not isinstance(leaf, bool):
            if isinstance(leaf, int | float):
                found[name] = str(leaf)
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not str(key).startswith("_"):
                yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for n, each in enumerate(value):
            yield from _leaves(each, f"{name}.{n}" if name else str(n))
    else:
        yield name, value
