"""Groups that some of the ranks make."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, NamedTuple

from ..private import c10d, c10d_logger
from ..private_groups import GROUP_MAKER
from .findings import Finding, ranks_in_words
from .here import replace
from .log import Log

__all__ = ["analyse", "install"]


MAKERS = ("new_group", GROUP_MAKER[1])
WAYS = ("gpusim.torch", c10d.__name__, c10d_logger.__name__)
"""The modules through which a program's call of new_group goes."""


class Made(NamedTuple):
    """A group that a rank makes: the number of the call, and what it is given."""

    number: int
    ranks: tuple[int, ...]
    local: bool
    site: str


def install(stack: ExitStack) -> None:
    """Note the groups that the program makes."""
    replace(stack, *GROUP_MAKER, _make)


def _make(watch: Any, real: Any, /, ranks: Any = None, *args: Any, **named: Any) -> Any:
    local = named.get("use_local_synchronization", args[4] if len(args) > 4 else False)
    if _is_programs(sys._getframe(1)):
        world = range(watch.rank.launch.size)
        watch.note("made", list(world if ranks is None else ranks), bool(local), watch.site())
    return real(ranks, *args, **named)


def _is_programs(frame: FrameType | None) -> bool:
    """Whether the program calls new_group, and not a function of torch's own.

    Those know which ranks need a group: DeviceMesh, new_subgroups.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        name = frame.f_code.co_name
        if not module.startswith(WAYS) or (module == c10d.__name__ and name not in MAKERS):
            return not module.startswith("torch.")
        frame = frame.f_back
    return True


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """Groups that ranks make and others do not, and groups in differing orders."""
    # By rank: the groups that all ranks have to make, in order.
    whole = {log.rank: [each for each in _made(log) if not each.local] for log in logs}
    # A rank that an error has ended may have come to the call later.
    over = {log.rank for log in logs if not log.ended}
    makers: dict[tuple[tuple[int, ...], bool, int], dict[int, Made]] = {}
    for log in logs:
        counts: dict[tuple[tuple[int, ...], bool], int] = {}
        for each in _made(log):
            key = each.ranks, each.local
            counts[key] = counts.get(key, -1) + 1
            makers.setdefault((*key, counts[key]), {})[log.rank] = each
    found = []
    for (ranks, local, _), own in makers.items():
        missing = []
        for rank in ranks if local else whole:
            if rank in own or rank not in whole:
                continue
            if local:
                is_missing = rank in over
            else:
                others = _others(whole, rank, own)
                is_missing = bool(others) or rank in over
                is_missing &= not any(_are_apart(ranks, other) for other in others)
            if is_missing:
                missing.append(rank)
        if missing:
            found.append(_finding(ranks, local, own, missing))
    return found or _order(whole)


def _others(whole: dict[int, list[Made]], rank: int, own: dict[int, Made]) -> list[Made]:
    """The groups that a rank makes where the makers of one make it."""
    places = {whole[maker].index(each) for maker, each in own.items()}
    return [whole[rank][place] for place in places if place < len(whole[rank])]


def _are_apart(ranks: tuple[int, ...], other: Made) -> bool:
    """Whether two groups may be made in one place: they share no rank, and one has one rank.

    Ranks that each make a group of their own count the groups alike, and do not meet there.
    """
    return 1 in (len(ranks), len(other.ranks)) and not {*ranks} & {*other.ranks}


def _finding(
    ranks: tuple[int, ...], local: bool, own: dict[int, Made], missing: list[int]
) -> Finding:
    who, others = ranks_in_words(sorted(own)), ranks_in_words(missing)
    call = f"new_group({list(ranks)})"
    one = len(missing) == 1
    verb = "calls" if len(own) == 1 else "call"
    if local:
        rest = f"{others} {'is a member and does' if one else 'are members and do'} not"
    else:
        rest = f"{others} {'does' if one else 'do'} not"
    site = own[min(own)].site
    text = f"{who} {verb} {call}, {rest}"
    return Finding("group-made-by-some", site, sorted(own), text, "new_group")


def _order(whole: dict[int, list[Made]]) -> list[Finding]:
    """Groups that all ranks make, in differing orders."""
    first = min(whole, default=0)
    for rank, events in whole.items():
        for one, other in zip(whole[first], events, strict=False):
            if one.ranks != other.ranks and not _are_apart(one.ranks, other):
                text = (
                    f"rank {first} makes the group {list(one.ranks)} at {one.site} where rank "
                    f"{rank} makes {list(other.ranks)}"
                )
                related = [f"{one.site}: new_group"] if one.site != other.site else []
                ranks = sorted([first, rank])
                return [
                    Finding("group-made-by-some", other.site, ranks, text, "new_group", 1, related)
                ]
    return []


def _made(log: Log) -> list[Made]:
    events = [event for event in log.events if event[0] == "made"]
    return [Made(place, tuple(sorted(e[1])), e[2], e[3]) for place, e in enumerate(events)]
