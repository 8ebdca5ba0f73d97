"""Which ranks must have equal parameters, from what all ranks have noted at optimizer steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .log import Log

__all__ = ["Optimizer", "Replicas", "optimizers"]

Rows = dict[int, dict[str, Any]]
"""The notes of each rank on one optimizer."""


@dataclass
class Replicas:
    """Ranks that must have equal parameters.

    **Attributes**: `places` are those of the parameters in the optimizer's list. `why` is "ddp",
    "dtensor" or "data": the latter ranks began with the same weights and have other data.
    """

    ranks: tuple[int, ...]
    places: list[int]
    why: str


def optimizers(logs: Sequence[Log]) -> Iterator[Rows]:
    """The notes of each optimizer that several ranks have, by the names of its parameters."""
    alike: dict[tuple[str, int], Rows] = defaultdict(dict)
    for log in logs:
        counts: Counter[str] = Counter()
        for about in (log.rows.get("replicas") or [{}])[1:]:
            if not about["steps"]:
                continue
            key = repr((about["kind"], about["names"], about["shapes"]))
            alike[key, counts[key]][log.rank] = about
            counts[key] += 1
    for rows in alike.values():
        if len(rows) > 1:
            yield rows


class Optimizer:
    """One optimizer on all ranks that have it."""

    def __init__(
        self, rows: Rows, heads: dict[int, dict[str, Any]], groups: dict[str, list[int]]
    ) -> None:
        self.rows, self.heads, self.groups = rows, heads, groups
        first = next(iter(rows.values()))
        self.names: list[str | None] = first["names"]
        self.kind: str = first["kind"]
        self.count = min(len(each["steps"]) for each in rows.values())

    def replicas(self) -> Iterator[Replicas]:
        ranks = tuple(sorted(self.rows))
        for why in ("ddp", "dtensor"):
            places: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank in ranks:
                for place, members in enumerate(self.rows[rank][why]):
                    own = tuple(each for each in members or () if each in self.rows)
                    if len(own) > 1 and place not in places[own]:
                        places[own].append(place)
            for own, found in places.items():
                if found:
                    yield Replicas(own, found, why)
        first = self.rows[ranks[0]]
        rest = [
            place
            for place, name in enumerate(self.names)
            if name is not None and not first["ddp"][place] and not first["dtensor"][place]
        ]
        if None in self.names or not rest:
            return
        if not self._are_linked(ranks):
            candidates = {ranks}
        else:
            candidates = {
                tuple(each)
                for each in map(sorted, self.groups.values())
                if len(each) > 1 and set(each) <= set(ranks) and not self._are_linked(each)
            }
        for own in sorted(candidates, key=lambda each: (-len(each), each)):
            if self._have_other_data(own):
                yield Replicas(own, rest, "data")

    def _are_linked(self, ranks: Sequence[int]) -> bool:
        """Whether ranks exchange activations: parts of one replica do, and not replicas."""
        inside = set(ranks)
        for rank in ranks:
            head = self.heads[rank]
            if inside & {*head["peers"]} - {rank}:
                return True
            if any(len(inside & {*self.groups.get(label, ())}) > 1 for label in head["links"]):
                return True
        return False

    def _have_other_data(self, ranks: Sequence[int]) -> bool:
        inputs = [self.rows[rank]["steps"][0]["inputs"] for rank in ranks]
        return "0" not in inputs and len(set(inputs)) == len(inputs)
