"""Which tensor of the candidate's ranks belongs to which of the reference's: by names.

Names are the same but for three things. An outermost module may be a part of the reference's (a
pipeline's stage). Its layers and experts may be numbered from 0 on each rank. A parameter may have
two names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .relations import Array, Near, contains
from .traces import Event, RankTrace, Trace

__all__ = ["Matching", "match"]

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
SAME = Near(1e-12)


@dataclass
class Matching:
    """Names of the candidate's, as the reference has them.

    **Attributes**: `roots`, of each rank and tag: the reference's tag; `numbers`, of each rank, tag
    and prefix: what its numbers are in the reference; `said`, sentences about it.
    """

    roots: dict[tuple[int, str], str] = field(default_factory=dict)
    numbers: dict[tuple[int, str, str], dict[int, int]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def key(self, event: Event) -> tuple[str, str]:
        """The tag and the name that an event of the candidate's has in the reference."""
        rank = event.rank.rank
        return self.roots.get((rank, event.root), event.root), self.name(
            rank, event.root, event.name
        )

    def name(self, rank: int, root: str, name: str) -> str:
        if not self.numbers:
            return name
        parts = name.split(".")
        for n, part in enumerate(parts):
            if part.isdigit():
                own = self.numbers.get((rank, root, ".".join(name.split(".")[:n])))
                if own is not None:
                    parts[n] = str(own.get(int(part), int(part)))
        return ".".join(parts)


def match(reference: Trace, candidate: Trace) -> Matching:
    """Find which names belong together."""
    found = Matching()
    whole = weights_of(reference.by_rank[0])
    for other in reference.by_rank[1:]:
        whole = {**weights_of(other), **whole}
    tags = list(dict.fromkeys(tag for tag, _ in whole)) or [
        *dict.fromkeys(event.root for event in reference.by_rank[0].events)
    ]
    known = {event.root for rank in reference.by_rank for event in rank.events}
    for rank in candidate.by_rank:
        for root in dict.fromkeys(event.root for event in rank.events):
            base = root.partition("#")[0]
            has_weights = any(tag == root for tag, _ in weights_of(rank))
            if root in known:
                target = root
            elif base in known:
                target = base
            else:
                target = tags[0] if has_weights and tags else root
            if target != root:
                found.roots[rank.rank, root] = target
    _number(found, whole, candidate)
    return found


def weights_of(rank: RankTrace) -> dict[tuple[str, str], Event]:
    """The first weights of a rank: by tag and name."""
    found: dict[tuple[str, str], Event] = {}
    for event in rank.events:
        if event.kind == "weight" and event.step == 0:
            found.setdefault((event.root, event.name), event)
    return found


def prefixes(names: Sequence[str]) -> dict[str, set[int]]:
    """Of each prefix before a number: the numbers.

    >>> prefixes(["a.0.w", "a.1.w", "b"])
    {'a': {0, 1}}
    """
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        for n, part in enumerate(parts):
            if part.isdigit():
                found[".".join(parts[:n])].add(int(part))
    return dict(found)


def _number(found: Matching, whole: Mapping[tuple[str, str], Event], candidate: Trace) -> None:
    """Find what numbers stand for, from the outermost prefix on."""
    names = [name for _, name in whole]
    for depth in range(4):
        wanted = {
            prefix: numbers
            for prefix, numbers in prefixes(names).items()
            if len(NUMBER.findall(prefix)) == depth
        }
        if not wanted:
            continue
        held: dict[str, dict[tuple[int, str, str], set[int]]] = defaultdict(dict)
        for rank in candidate.by_rank:
            own: dict[str, list[str]] = defaultdict(list)
            for tag, name in weights_of(rank):
                own[tag].append(name)
            for tag, mine in own.items():
                for prefix, numbers in prefixes(mine).items():
                    target = found.name(rank.rank, tag, prefix)
                    if target in wanted and len(NUMBER.findall(prefix)) == depth:
                        held[target][rank.rank, tag, prefix] = numbers
        for target, owners in held.items():
            if set().union(*owners.values()) >= wanted[target]:
                continue
            numbers_of = _by_elements(found, whole, candidate, target, owners, wanted[target])
            if numbers_of is None:
                numbers_of = _by_stages(candidate, owners, wanted[target])
            if numbers_of is None:
                continue
            found.numbers |= {key: own for key, own in numbers_of.items() if _moves(own)}
            said = ", ".join(
                f"{_span(own.values())} on rank {key[0]}" for key, own in numbers_of.items()
            )
            found.said.append(f"{target} numbers from 0 on each rank: {said}")


def _moves(numbers: Mapping[int, int]) -> bool:
    return any(one != other for one, other in numbers.items())


def _span(numbers: Iterable[int]) -> str:
    own = sorted(numbers)
    return f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}"


Owners = Mapping[tuple[int, str, str], set[int]]


def _by_elements(
    found: Matching,
    whole: Mapping[tuple[str, str], Event],
    candidate: Trace,
    target: str,
    owners: Owners,
    wanted: set[int],
) -> dict[tuple[int, str, str], dict[int, int]] | None:
    """By weights that are parts of the reference's. None if they are not found."""
    result = {}
    for (rank, tag, prefix), numbers in owners.items():
        own: dict[int, int] = {}
        mine = {name: e for (t, name), e in weights_of(candidate.by_rank[rank]).items() if t == tag}
        for number in sorted(numbers):
            start = f"{prefix}.{number}."
            tests = [(name, e) for name, e in mine.items() if name.startswith(start)]
            tests = [(name, e) for name, e in tests if _telling(e.array)]
            place = next(
                (
                    other
                    for other in [number, *sorted(wanted - {number})]
                    if _same(found, whole, rank, tag, tests, start, f"{target}.{other}.")
                ),
                None,
            )
            if place is None:
                return None
            own[number] = place
        result[rank, tag, prefix] = own
    return result


def _telling(array: Array) -> bool:
    return bool(array.size > 1 and (array != array.reshape(-1)[0]).any())


def _same(
    found: Matching,
    whole: Mapping[tuple[str, str], Event],
    rank: int,
    tag: str,
    tests: Sequence[tuple[str, Event]],
    start: str,
    other: str,
) -> bool:
    target = found.roots.get((rank, tag), tag)
    for name, event in tests[:4]:
        there = whole.get((target, other + name[len(start) :]))
        if there is not None and contains(there.array, event.array, SAME):
            return True
    return False


def _by_stages(
    candidate: Trace, owners: Owners, wanted: set[int]
) -> dict[tuple[int, str, str], dict[int, int]] | None:
    """In the order of a pipeline's stages: those of each rank's first chunk, then the second's."""
    stages = stages_of(candidate)
    chunks: dict[int, list[tuple[int, str, str]]] = defaultdict(list)
    for key in owners:
        chunks[key[0]].append(key)
    result: dict[tuple[int, str, str], dict[int, int]] = {}
    most = max(map(len, chunks.values()))
    for ranks in stages:
        at = 0
        for chunk in range(most):
            for rank in ranks:
                if chunk < len(chunks.get(rank, ())):
                    key = chunks[rank][chunk]
                    own = sorted(owners[key])
                    result[key] = {n: at + k for k, n in enumerate(own)}
                    at += len(own)
        if at != len(wanted):
            return None
    return result if len(result) == len(owners) else None


def stages_of(candidate: Trace) -> list[list[int]]:
    """Ranks in the order in which activations pass: from the first messages of each rank."""
    first: dict[int, tuple[str, int]] = {}
    sends: dict[int, int] = {}
    for rank in candidate.by_rank:
        messages = rank.end.get("messages") or []
        if messages:
            first[rank.rank] = tuple(messages[0])
            sent = [peer for kind, peer in messages if kind == "send"]
            if sent:
                sends[rank.rank] = sent[0]
    found = []
    for start, (kind, _) in sorted(first.items()):
        if kind == "send":
            stages = [start]
            while (following := sends.get(stages[-1])) is not None and following not in stages:
                if first.get(following, ("",))[0] != "recv":
                    break
                stages.append(following)
            found.append(stages)
    return found
