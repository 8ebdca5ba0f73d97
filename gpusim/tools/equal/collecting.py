"""Brings together what both programs' traces have of one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .items import OF_WEIGHTS, Item, one_array, one_of, unsliced, unsliced_parts
from .matching import Matching
from .relations import Partition, Parts, partitions
from .traces import Event, Trace

__all__ = ["Collector"]

Key = tuple[str, str, str, str, int, bool]


class Collector:
    """Brings together the events of both traces that are of one tensor."""

    def __init__(
        self,
        reference: Trace,
        candidate: Trace,
        matching: Matching,
        skipped: dict[str, list[str]],
    ) -> None:
        self.reference, self.candidate = reference, candidate
        self.matching, self.skipped = matching, skipped
        self.aliases: dict[str, str] = {}
        for own in reference.ends("aliases"):
            self.aliases |= own or {}

    def items(self) -> list[Item]:
        """The tensors of the reference in the order of their computation."""
        whole = self._by_key(self.reference, lambda event: (event.root, event.name))
        parts = self._by_key(self.candidate, self.matching.key)
        for alias, name in self.aliases.items():
            root, _, other = alias.partition("/")
            for key in [key for key in whole if key[1:3] == (root, name) and key[0] in OF_WEIGHTS]:
                copy = (key[0], root, other, *key[3:])
                if copy in parts:
                    whole.setdefault(copy, whole[key])
        found: list[Item] = []
        for key, own in whole.items():
            theirs = parts.get(key)
            kind, root, name, _, _, evaluated = key
            label = f"{kind} of {name or root}"
            if theirs is None:
                why = "evaluation" if evaluated else "no rank of the candidate has it"
                self._skip(why, label)
                continue
            if evaluated and self._trained:
                self._skip("computed without gradients, as in an evaluation", label)
                continue
            found += self._of_key(key, own, theirs)
        for key in parts.keys() - whole.keys():
            if not (key[5] and self._trained):
                self._skip("the reference lacks it", f"{key[0]} of {key[2] or key[1]}")
        found.sort(key=lambda item: (item.step, item.order))
        return found

    @property
    def _trained(self) -> bool:
        return any(self.reference.ends("trained"))

    def _skip(self, why: str, label: str) -> None:
        if label not in self.skipped[why]:
            self.skipped[why].append(label)

    def _by_key(
        self, trace: Trace, name: Callable[[Event], tuple[str, str]]
    ) -> dict[Key, dict[int, list[Event]]]:
        steps = self.steps
        found: dict[Key, dict[int, list[Event]]] = {}
        for rank in trace.by_rank:
            # A later stage of a pipeline receives activations, and not the model's input.
            messages = rank.end.get("messages") or [("", 0)]
            later = messages[0][0] == "recv"
            for event in rank.events:
                if later and event.kind == "input":
                    continue
                if event.step > steps or (event.step == steps and event.kind != "weight"):
                    continue
                root, own = name(event)
                key = (event.kind, root, own, event.leaf, event.step, event.evaluated)
                found.setdefault(key, {}).setdefault(rank.rank, []).append(event)
        return found

    @property
    def steps(self) -> int:
        """Steps that all ranks of both have made; at least 1, for programs that make none."""
        counts = [*self.reference.ends("steps"), *self.candidate.ends("steps")]
        return max(1, min((count for count in counts if count is not None), default=1))

    def _of_key(
        self, key: Key, whole: dict[int, list[Event]], parts: dict[int, list[Event]]
    ) -> Iterator[Item]:
        kind, root, name, leaf, step, _ = key
        for own in (*whole.values(), *parts.values()):
            own.sort(key=lambda event: event.count)
        first = min((own[0] for own in whole.values()), key=lambda event: event.order)
        order = first.order
        ranks = tuple(sorted(parts))
        narrow = next(
            (
                event.dtype
                for own in (*whole.values(), *parts.values())
                for event in own
                if event.dtype == "float32"
            ),
            "",
        )
        sliced = any(event.slice for own in (*whole.values(), *parts.values()) for event in own)

        def item(
            count: int, order: int, whole: Callable[..., Any], parts: Callable[..., Parts]
        ) -> Item:
            return Item(
                kind, root, name, leaf, step, count, order, whole, parts, ranks, narrow=narrow
            )

        if sliced:
            made = item(
                0,
                order,
                lambda how=0: unsliced(whole)[0],
                lambda how=0: unsliced_parts(parts, self.meshes),
            )
            made.added = first.added
            yield made
            return

        def of_calls(n: int, rounds: int) -> Item:
            here = {rank: own[n::rounds] for rank, own in whole.items()}
            there = {rank: own[n::rounds] for rank, own in parts.items()}
            pool = common_pool(
                [event for own in (here, there) for e in own.values() for event in e]
            )
            made = item(
                n if rounds > 1 else 0,
                min(own[0].order for own in here.values()),
                lambda how=0: one_of(here, how, pool),
                lambda how=0: {rank: one_array(own, how, pool) for rank, own in there.items()},
            )
            made.calls = max(len(own) for own in (*here.values(), *there.values()))
            made.added = first.added
            made.bits = {rank: own[0].bits for rank, own in there.items() if own[0].bits}
            made.claims = {rank: own[0].claim for rank, own in there.items() if own[0].claim}
            return made

        counts = {len(own) for own in (*whole.values(), *parts.values())}
        rounds = min(counts) if len(counts) == 1 else common(counts)
        together = of_calls(0, 1) if rounds > 1 else None
        for n in range(rounds):
            made = of_calls(n, rounds)
            made.together = together
            yield made

    @functools.cached_property
    def meshes(self) -> list[Partition]:
        groups = [group for own in self.candidate.ends("groups") for group in own or ()]
        return partitions(self.candidate.ranks, groups)


def common_pool(events: Sequence[Event]) -> tuple[int, ...]:
    """The blocks in which all events are added; empty if none is large."""
    pools = [event.pool for event in events if event.pool]
    if not pools:
        return ()
    return tuple(max(sizes) for sizes in zip(*pools, strict=False))


def common(counts: set[int]) -> int:
    """Calls of a module in one microbatch, if the others have several microbatches."""
    least = min(counts)
    return least if all(count % least == 0 for count in counts) else 1
