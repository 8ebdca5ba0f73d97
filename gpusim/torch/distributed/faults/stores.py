"""Faults of the store: a rank's wait that times out, as TCPStore's does.

A rank's waits are numbered from 1: its `get`, `multi_get`, `wait`, `barrier` and blocking
`queue_pop` of any store of the launch, torch's own among them, and each group of several ranks that
it makes, as ranks wait there for the addresses of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..calls.timeouts import milliseconds
from ..private import replace
from ..runners.child import ProcessStore
from ..runners.threads import Rank
from . import watching
from .happened import Happened
from .plans import Fault

__all__ = ["WAITING", "faulty_stores"]

WAITING = ("get", "multi_get", "queue_pop", "store_barrier", "wait")
"""The questions to a store that wait for another rank."""


@contextmanager
def faulty_stores(faults: Sequence[Fault], happened: Happened) -> Iterator[None]:
    """A block of the rank's program, in its process, in which waits are numbered and time out.

    **Arguments**: `faults` are the rank's, in this attempt; other kinds are left alone. `happened`
    is told when one comes.
    """
    mine = {fault.wait: fault for fault in faults if fault.kind == "store-timeout"}
    if not mine and not watching.is_asked():
        yield
        return
    with ExitStack() as stack:
        _Waits(mine, happened).install(stack)
        yield


# In the rank's process, in its main thread, which alone asks the store.
class _Waits:
    """The rank's waits for others by the store."""

    def __init__(self, faults: dict[int | None, Fault], happened: Happened) -> None:
        self.faults, self.happened = faults, happened
        self.count = 0

    def install(self, stack: ExitStack) -> None:
        """Be called for all waits until the stack ends."""
        ask, new_group = ProcessStore._ask, Rank.new_group

        @functools.wraps(ask)
        def asked(store: Any, method: str, *args: Any) -> Any:
            waits = method in WAITING and not (method == "queue_pop" and not args[1])
            if waits and self._is_lost(str(args[0])):
                raise timed_out(method, args[0], store.timeout if args[-1] is None else args[-1])
            return ask(store, method, *args)

        @functools.wraps(new_group)
        def made(
            rank: Any, name: str, ranks: Sequence[int], options: Any, timeout: Any = None
        ) -> Any:
            size = len(ranks) or rank.launch.size
            if size > 1 and self._is_lost(f"group {name}"):
                members = tuple(ranks) or range(size)
                other = next(place for place, each in enumerate(members) if each != rank.index)
                key = f"{'default_pg' if name == '0' else name}/0//cpu//0/{other}"
                raise timed_out("wait", key, timeout or default_pg_timeout)
            return new_group(rank, name, ranks, options, timeout)

        replace(stack, ProcessStore, "_ask", asked)
        replace(stack, Rank, "new_group", made)

    def _is_lost(self, key: str) -> bool:
        """Count a wait; whether it is to time out."""
        self.count += 1
        watching.saw_wait(key)
        fault = self.faults.get(self.count)
        if fault is None:
            return False
        self.happened.note(fault)
        watching.happened(fault)
        return True


def timed_out(method: str, keys: str | Sequence[str], limit: timedelta | float) -> Exception:
    """The exception of TCPStore for a wait whose limit has passed.

    >>> timed_out("get", "k", 2.0)
    DistStoreError('wait timeout after 2000ms, keys: /k')
    """
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    names = [keys] if isinstance(keys, str) else keys
    if method == "store_barrier":
        text = f"barrier timeout after {milliseconds(seconds)}ms, key: {names[0]}"
    else:
        shown = ", ".join(f"/{each}" for each in names)
        text = f"wait timeout after {milliseconds(seconds)}ms, keys: {shown}"
    return dist.DistStoreError(text)
