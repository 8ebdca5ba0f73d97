"""The cache of cast weights of autocast, which ranks share as threads, as if each had its own.

A weight that is used twice inside autocast is cast once, and its gradients are added in the low
precision, so the cache has a say in the bits. torch counts how deep a process is inside autocast,
over all threads, and clears the cache when it leaves. Ranks would find casts of weights as they
were before the last step, while other ranks wait inside.

So each rank is counted for itself, and the cache is cleared when no rank is inside. A rank whose
old casts are still there lets the others leave before it enters again. Where they wait for it, the
cache is cleared, which a warning says.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["casts_of_ranks"]

CLEARED = (
    "a rank entered torch.autocast again while others waited inside theirs, so the cast weights of "
    "all ranks were cleared. A weight that is used again there is cast again, and its gradient may "
    "differ in the last bits from that of processes; torch.autocast(..., cache_enabled=False) "
    "avoids it"
)


@contextmanager
def casts_of_ranks(give_way: Callable[[], object]) -> Iterator[None]:
    """A block in which no rank uses old casts, nor loses its own by what others do.

    **Arguments**: `give_way` lets the other ranks that can run do so.
    """
    module: Any = torch
    names = "autocast_increment_nesting", "autocast_decrement_nesting", "clear_autocast_cache"
    genuine = [getattr(module, name) for name in names]
    increment, decrement, clear_all = genuine
    depth: Counter[int] = Counter()  # of the threads that are inside
    stale: set[int] = set()  # threads that have left, and whose casts are still there

    def clear_now() -> None:
        stale.clear()
        clear_all()

    def enter() -> int:
        me, inside = threading.get_ident(), -1
        while me in stale and len(depth) != inside:
            inside = len(depth)
            give_way()
        if me in stale:
            warnings.warn(CLEARED, RuntimeWarning, stacklevel=3)
            clear_now()
        increment()
        depth[me] += 1
        return depth[me]

    def leave() -> int:
        me = threading.get_ident()
        decrement()
        depth[me] -= 1
        if depth[me]:
            return depth[me]
        del depth[me]
        return 0

    def clear() -> None:
        me = threading.get_ident()
        if me in depth or not depth:  # the program asks for it, or the last rank leaves
            clear_now()
        else:
            stale.add(me)

    for name, function in zip(names, (enter, leave, clear), strict=True):
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in zip(names, genuine, strict=True):
            setattr(module, name, function)
        clear_all()
