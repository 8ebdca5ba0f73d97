"""Calls on some of the instances, and barriers.

The participants are a set of instance numbers. Inside `execute_on_instances` they are the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import index as as_index
from typing import Any

import numpy as np

from gpusim.errors import CollectiveMismatchError
from gpusim.popdist.backend import engine_between, rank_and_size
from gpusim.popdist.subset import run_among
from gpusim.runtime import activity
from gpusim.runtime.engines import Engine

__all__ = ["execute_on_instances", "registerCommunicator", "synchronize"]

TAG = (1 << 22) - 1  # a World's collectives use those below
DIGEST_BYTES = 16

_within: ContextVar[tuple[int, ...] | None] = ContextVar("popdist participants", default=None)
_communicators: dict[str, tuple[int, ...]] = {}


def execute_on_instances(
    instances: Set[int], func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return `func(*args, **kwargs)` on these instances, and None at once on all others.

    Inside, `synchronize` waits for these instances only, and a World has only them: collectives
    span their replicas, numbered from 0.

    **Raises**: ValueError if `instances` is empty or names an unknown instance, or, inside another
    such call, an instance that does not take part in it.

    >>> execute_on_instances({0}, divmod, 7, 2)
    (3, 1)
    """
    chosen = checked("instances", instances)
    if rank_and_size()[0] not in chosen:
        return None
    token = _within.set(chosen)
    try:
        return run_among(chosen, partial(func, *args, **kwargs))
    finally:
        _within.reset(token)


def registerCommunicator(participants: Set[int], communicator_id: str = "") -> None:
    """Name a set of instances, for `synchronize(communicator_id)`.

    Without a name it only checks: `synchronize(participants=...)` needs no name.

    **Raises**: ValueError for unknown instances, and for a name that has other participants.
    """
    chosen = checked("participants", participants, within=all_instances())
    if not communicator_id:
        return
    before = _communicators.setdefault(communicator_id, chosen)
    if before != chosen:
        raise ValueError(
            f"communicator_id={communicator_id!r} is that of instances {listed(before)}; "
            f"got {listed(chosen)}"
        )


def synchronize(communicator_id: str = "", participants: Set[int] = frozenset()) -> None:
    """Return when all participants have called it; at once on every other instance.

    The participants are `participants`, else those of the communicator, else all instances (inside
    `execute_on_instances`: its instances).

    **Raises**

    - `ValueError`: for a name that is not registered, or that has other participants.
    - `CollectiveMismatchError`: if instances wait in different calls.
    - `GpusimError`: before `init`.
    - `InstanceError`: if a participant is gone.
    """
    chosen = participants_of(communicator_id, participants)
    instance, instances = rank_and_size()
    if instances == 1 or instance not in chosen:
        return
    engine = engine_between("synchronize")
    if engine is None or len(chosen) == 1:
        return
    called = f"popdist.synchronize of instances {listed(chosen)}"
    with noting(called + (f", communicator {communicator_id!r}" if communicator_id else "")):
        barrier(engine, chosen, digest_of(f"{communicator_id}\0{chosen}"), called)


# ---------------------------------------------------------------- participants


def all_instances() -> tuple[int, ...]:
    return tuple(range(rank_and_size()[1]))


def participants_of(communicator_id: str, participants: Set[int]) -> tuple[int, ...]:
    """The participants of a call of `synchronize`, ascending."""
    if participants:
        if communicator_id:
            registerCommunicator(participants, communicator_id)
        return checked("participants", participants)
    if not communicator_id:
        return all_instances() if (within := _within.get()) is None else within
    try:
        return checked("communicator_id", frozenset(_communicators[communicator_id]))
    except KeyError:
        known = ", ".join(map(repr, _communicators)) or "none"
        raise ValueError(
            f"communicator_id={communicator_id!r}: expected one that registerCommunicator has "
            f"named: {known}"
        ) from None


def checked(
    name: str, instances: Set[int], *, within: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """The instances, ascending; ValueError if some cannot take part."""
    possible = within or _within.get() or all_instances()
    try:
        chosen = tuple(sorted({as_index(instance) for instance in instances}))
    except TypeError:
        raise TypeError(f"{name}={instances!r}: expected a set of instance numbers") from None
    if not chosen or not set(chosen) <= set(possible):
        raise ValueError(
            f"{name}={instances!r}: expected some of the instances {listed(possible)}"
            + (", which take part in execute_on_instances" if _within.get() and not within else "")
        )
    return chosen


def listed(instances: tuple[int, ...]) -> str:
    """Numbers for a message, with ranges.

    >>> listed((0, 1, 2, 3, 7))
    '0 to 3, 7'
    """
    runs: list[list[int]] = []
    for instance in instances:
        if runs and instance == runs[-1][-1] + 1:
            runs[-1].append(instance)
        else:
            runs.append([instance])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


# ---------------------------------------------------------------- waiting


def digest_of(text: str) -> np.ndarray:
    raw = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
    return np.frombuffer(raw, np.uint8).copy()


def barrier(engine: Engine, chosen: tuple[int, ...], digest: np.ndarray, called: str) -> None:
    """Wait for all participants: a dissemination barrier.

    In round k each sends the digest of its call 2^k participants ahead, so that different calls
    are noticed.
    """
    rank, count = chosen.index(engine.instance), len(chosen)
    step = 1
    while step < count:
        after, before = chosen[(rank + step) % count], chosen[(rank - step) % count]
        received = np.zeros_like(digest)
        engine.exchange([(digest, after)], [(received, before)], TAG).wait()
        if not np.array_equal(received, digest):
            raise CollectiveMismatchError(
                f"instance {engine.instance} is in {called}, and instance {before} in a call of "
                "synchronize with other participants, or with another communicator_id"
            )
        step *= 2


@contextmanager
def noting(text: str) -> Iterator[None]:
    """Tell the launcher what this instance waits in."""
    activity.note(text)
    try:
        yield
    finally:
        activity.note(None)
