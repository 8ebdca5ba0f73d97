"""Which outcomes of real ranks and of simulated ones count as the same.

Chance decides in real runs which of several ranks is first. So an outcome has a class, and the
classes that chance can exchange stand in one set.
"""

from __future__ import annotations

import re
from typing import Any

from .cases import Case

__all__ = ["class_of", "differences"]

TEXTS = {
    "gone": (
        r"builtins\.RuntimeError: \[gloo/transport/tcp/pair\.cc:N\] (Connection closed by peer "
        r"\[ADDRESS\]\. This is typically caused by a remote worker crashing\.|Read error "
        r"\[ADDRESS\]: Connection reset by peer\. This is typically caused by a remote worker "
        r"hanging or bugs in the application\.) Check the logs of the remote worker before "
        r"reporting an error\. GLHF! \U0001f3d6\ufe0f"
    ),
    "timed out": (
        r"builtins\.RuntimeError: \[gloo/transport/tcp/unbound_buffer\.cc:N\] Timed out waiting "
        r"\d+ms for (send|recv) operation to complete"
    ),
    "closed": r"builtins\.RuntimeError: Application timeout caused pair closure",
    "planned": (
        r"builtins\.RuntimeError: (the fault|a fault that gpusim was asked for: raise [a-z0-9= ]+)"
    ),
}
"""Texts by class, as `cases.outcome` gives them: gloo's, and those of ranks that a plan lets raise,
`cases.die`'s and gpusim's."""

MONITORED = (
    r"builtins\.RuntimeError: Rank \d+ successfully reached monitoredBarrier, but received errors "
    r"while waiting for send/recv from rank 0\. Please check rank 0 logs for faulty rank\.\n "
    r"Original exception: \n(?P<inner>.*)"
)

MONITOR = r"(\[Rank 0\]: Rank .*Timed out waiting )\d+(ms for recv operation to complete)"
"""The error of monitored_barrier on its root; the limit named there is what gloo has left."""

ERRORS = {"gone", "timed out", "closed"}
"""Errors of a group after its first one: chance decides which a call meets."""

FIRST = ("call", "wait", "posted")
"""Labels of a case's first call."""


def class_of(seen: str) -> str:
    """The class of an outcome; an outcome without one is its own."""
    inner = re.fullmatch(MONITORED, seen, re.DOTALL)
    if inner:
        return "monitored"
    for name, text in TEXTS.items():
        if re.fullmatch(text, seen):
            return name
    return re.sub(MONITOR, r"\1\2", seen, flags=re.DOTALL)


def alike(case: Case, label: str, real: str, simulated: str) -> bool:
    """Whether two outcomes are the same, or exchanged by chance."""
    classes = class_of(real), class_of(simulated)
    if classes[0] == classes[1]:
        return True
    # Whether gloo has noticed the end of monitored_barrier's root as the call is posted: then its
    # words for ranks that have reached the barrier are left out.
    if "monitored" in case.kind and case.dead == 0 and {*classes} == {"monitored", "gone"}:
        return True
    # A rank whose limit expires closes its connections: a rank whose own limit expires then sees
    # the one or the other.
    if label in FIRST and case.how != "hang":
        return False
    if label == "is_completed" or label == "is_success":
        return False
    return set(classes) <= ERRORS


def differences(case: Case, real: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    """In words: by rank what a real rank saw, and a simulated one did not."""
    found = []
    for rank in range(case.ranks):
        if rank == case.dead:
            continue
        told, heard = real["seen"][str(rank)], simulated["seen"][str(rank)]
        for label, seen in told.items():
            if label not in heard:
                # The agent ends ranks that wait when one has failed; these real ranks have none.
                if not simulated["by_agent"][rank]:
                    found.append(f"rank {rank} {label}: real {seen!r}, simulated nothing")
            elif not alike(case, label, seen, heard[label]):
                found.append(f"rank {rank} {label}: real {seen!r}, simulated {heard[label]!r}")
        if not simulated["by_agent"][rank] and real["codes"][rank] != simulated["codes"][rank]:
            codes = real["codes"][rank], simulated["codes"][rank]
            found.append(f"rank {rank}: exit codes {codes[0]} and {codes[1]}")
    if case.how != "hang" and real["codes"][case.dead] != simulated["codes"][case.dead]:
        codes = real["codes"][case.dead], simulated["codes"][case.dead]
        found.append(f"rank {case.dead}, which dies: exit codes {codes[0]} and {codes[1]}")
    return found
