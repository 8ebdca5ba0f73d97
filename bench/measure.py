"""Measures cases: everybody prepares, shows a correct result, and then runs in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench import machine
from bench.cases import Case
from bench.peers import Peer, Unserved
from bench.peers.inputs import forget
from bench.peers.limit import Limit
from bench.results import LIMIT, OURS, Entry, Outcome
from bench.timing import Timing, interleave

MEMORY_SHARE = 0.85  # of the free memory, for one peer
#: A copy takes part in a case that moves at least this share of its bytes. In smaller ones it would
#: empty the caches between the others' turns.
COPY_SHARE = 1 / 16


def measure(case: Case, peers: Sequence[Peer], budget: float) -> Outcome:
    """One case. Whatever goes wrong with a peer is its entry's problem; Ctrl-C comes through."""
    load = machine.load()
    ready: dict[str, Peer] = {}
    entries: dict[str, Entry] = {}
    ours: NDArray[np.float64] | None = None
    try:
        for peer in peers:
            if isinstance(peer, Limit):
                peer.prepare(case)
                continue
            entries[peer.name], samples = _prepare(peer, case, ours)
            if entries[peer.name].problem is None:
                ready[peer.name] = peer
            ours = samples if peer.name == OURS else ours
        limit = next((peer for peer in peers if isinstance(peer, Limit)), None)
        runners: dict[str, Peer] = dict(ready)
        if limit is not None and _copies(limit, case):
            runners[LIMIT] = limit
        found = interleave(runners, budget, (Unserved,))
        if limit is not None:
            entries[LIMIT] = _limit(limit, case, found.pop(LIMIT, None))
        for name, timing in found.items():
            entries[name] = _with(entries[name], timing)
    finally:
        for peer in ready.values():
            _release(peer)
        forget()
        case.forget()
    return Outcome(case, entries, load, kernels=machine.kernel_set())


def _prepare(
    peer: Peer, case: Case, ours: NDArray[np.float64] | None
) -> tuple[Entry, NDArray[np.float64] | None]:
    """Get a peer ready and look at its result; its entry has a problem where that failed."""
    free, need = machine.available_bytes(), peer.needs_bytes(case)
    if free is not None and need > MEMORY_SHARE * free:
        gib = 2**30
        reason = f"would need {need / gib:.1f} GiB of the {free / gib:.1f} GiB that are free"
        return Entry(peer.name, problem=reason), None
    try:
        peer.prepare(case)
        replicas, positions = case.sample()
        samples = peer.sample(replicas, positions)
        found = np.array([samples[replica] for replica in replicas])
    except Unserved as reason:
        _release(peer)
        return Entry(peer.name, problem=str(reason)), None
    except Exception as error:  # a peer's failure is its own
        _release(peer)
        return Entry(peer.name, problem=f"{type(error).__name__}: {error}"), None
    right, agreement = compare(case, found, ours)
    if not right:
        _release(peer)
        return Entry(peer.name, problem=f"wrong result: {agreement}"), None
    return Entry(peer.name, agreement=agreement), found


def compare(
    case: Case, found: NDArray[np.float64], ours: NDArray[np.float64] | None
) -> tuple[bool, str]:
    """Whether a result is right, and how close: to gpusim's bits, or to the exact values."""
    expected = case.expected()
    if found.shape != expected.shape:
        return False, f"shape {found.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(expected), initial=0.0)) or 1.0
        error = float(np.max(np.abs(found - expected), initial=0.0)) / largest
    right = math.isfinite(error) and error <= case.tolerance()
    if ours is not None and np.array_equal(found, ours):
        return right, "equal"
    return right, "exact" if error == 0 else f"within {error:.0e} of the exact result"


def _release(peer: Peer) -> None:
    try:
        peer.release()
    except Unserved:
        peer.close()


def _copies(limit: Limit, case: Case) -> bool:
    return case.moved_bytes >= COPY_SHARE * 2 * limit.copy_bytes


def _limit(limit: Limit, case: Case, copied: Timing | str | None) -> Entry:
    """The seconds in which the case's bytes are copied: at the run's best speed, and at the median
    one of this case's turns."""
    least = case.moved_bytes / limit.bandwidth
    if not isinstance(copied, Timing):
        return Entry(LIMIT, Timing(least, least, 0))
    share = case.moved_bytes / (2 * limit.copy_bytes)
    return Entry(LIMIT, Timing(least, copied.median * share, copied.runs))


def with_bandwidth(outcome: Outcome, bandwidth: float) -> Outcome:
    """The outcome with the limit that a faster copy, later in the run, has shown."""
    entry = outcome.entries.get(LIMIT)
    if entry is None or entry.timing is None:
        return outcome
    least = min(entry.timing.min, outcome.case.moved_bytes / bandwidth)
    timing = replace(entry.timing, min=least)
    return replace(outcome, entries=outcome.entries | {LIMIT: replace(entry, timing=timing)})


def _with(entry: Entry, timing: Timing | str) -> Entry:
    if isinstance(timing, str):
        return Entry(entry.name, problem=timing)
    return Entry(entry.name, timing, agreement=entry.agreement)
