"""Replicas that must be equal and are not, from what all ranks have noted at optimizer steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from .findings import Finding, ranks_in_words
from .log import Log
from .ranks import Optimizer, Replicas, optimizers

__all__ = ["analyse"]

AHEAD = 3
"""How many steps a rank may have left out, to be recognised by the gradients of later ones."""


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """The kinds unequal-parameters, gradient-not-reduced and unseeded-difference."""
    heads = {log.rank: log.rows["replicas"][0] for log in logs if log.rows.get("replicas")}
    groups: dict[str, list[int]] = {}
    for log in logs:
        groups.update(log.groups)
    found: list[Finding] = []
    for rows in optimizers(logs):
        drift = _Drift(rows, heads, groups)
        for replicas in drift.replicas():
            finding = drift.judge(replicas)
            if finding is not None:
                found.append(finding)
                if replicas.why == "data":
                    break
    return found


class _Drift(Optimizer):
    """One optimizer on all ranks that have it, and what is wrong with it."""

    def judge(self, replicas: Replicas) -> Finding | None:
        ranks, places = replicas.ranks, replicas.places
        different = [place for place in places if not self._equal(0, "before", place, ranks)]
        if different:
            finding = self._unseeded(replicas, different)
            if finding is not None or replicas.why == "data":
                return finding or self._of_equal_part(replicas)
            if replicas.why == "dtensor":
                places = [place for place in places if place not in different]
        return self._unequal(ranks, places, replicas.why)

    def _of_equal_part(self, replicas: Replicas) -> Finding | None:
        """The same for ranks that began alike, where others began differently."""
        parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank in replicas.ranks:
            before = self.rows[rank]["steps"][0]["before"]
            parts[tuple(before[place] for place in replicas.places)].append(rank)
        for own in parts.values():
            if len(own) > 1:
                finding = self._unequal(tuple(own), replicas.places, replicas.why)
                if finding is not None:
                    return finding
        return None

    def _unseeded(self, replicas: Replicas, different: list[int]) -> Finding | None:
        """Weights that differ at the start, of ranks whose gradients are reduced."""
        ranks = replicas.ranks
        if not self._reduced(0, replicas.places, ranks):
            return None
        if all(self._is_constant(place, ranks) for place in different):
            return None
        if all(self._is_close(place, ranks) for place in different):
            return None  # of one seed, and changed since: by what rounding has left of a detour
        name = self.names[different[0]]
        more = f" and {len(different) - 1} others" if len(different) > 1 else ""
        return self._finding(
            "unseeded-difference",
            0,
            ranks,
            f"before the first step of {self.kind}, parameter {name!r}{more} differ"
            f"{'s' if not more else ''} between {ranks_in_words(ranks)}, whose gradients are equal:"
            " they were reduced, and the weights were neither made from one seed nor broadcast",
        )

    def _is_close(self, place: int, ranks: tuple[int, ...]) -> bool:
        """Whether elements of a parameter differ by rounding at most between the ranks."""
        rows = [self.rows[rank]["samples"][place] for rank in ranks]
        return bool(rows[0]) and all(
            math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)
            for row in rows
            for one, other in zip(rows[0], row, strict=True)
        )

    def _unequal(self, ranks: tuple[int, ...], places: list[int], why: str) -> Finding | None:
        """The first step after which the parameters are not equal."""
        if why == "data" and all(self._is_constant(place, ranks) for place in places):
            return None
        for k in range(self._common(ranks)):
            bad = [place for place in places if not self._equal(k, "after", place, ranks)]
            if bad:
                break
        else:
            return None
        if self._become_equal(k, bad, ranks):
            return None
        unequal = [place for place in bad if not self._equal(k, "grads", place, ranks)]
        deviating = self._left_out(k, places, ranks) if unequal else []
        if deviating:
            text = (
                f"after {self._step(k)}, parameter {self.names[bad[0]]!r} is not equal on "
                f"{ranks_in_words(ranks)}: {ranks_in_words(deviating)} left out a step"
            )
            return self._finding("unequal-parameters", k, deviating, text)
        if unequal and not self._was_reduced(k, unequal, ranks, why):
            if why == "data" and not self._is_data_parallel(k, places, ranks):
                return None
            return self._not_reduced(k, unequal, ranks)
        if why == "data" and not unequal and not self._reduced(k, places, ranks):
            return None
        return self._drifted(k, bad, unequal, ranks)

    def _not_reduced(self, k: int, unequal: list[int], ranks: tuple[int, ...]) -> Finding:
        row = self._row(ranks[0], k)
        late = row["late"].get(str(unequal[0]))
        last = (
            f"its last collective, {late}, came before the backward pass"
            if late
            else "no collective has contained it since the backward pass"
        )
        if not late and unequal[0] in row["sent"]:
            last = "it was reduced over some of the ranks"
        more = f" and {len(unequal) - 1} others" if len(unequal) > 1 else ""
        text = (
            f"{self._step(k)} steps parameter {self.names[unequal[0]]!r}{more} with a gradient "
            f"that is not equal on {ranks_in_words(ranks)}: {last}"
        )
        return self._finding("gradient-not-reduced", k, ranks, text)

    def _drifted(
        self, k: int, bad: list[int], unequal: list[int], ranks: tuple[int, ...]
    ) -> Finding:
        place = (unequal or bad)[0]
        values = Counter(self._row(rank, k)["after"][place] for rank in ranks)
        value, most = values.most_common(1)[0]
        deviating = list(ranks)
        if 2 * most > len(ranks):
            deviating = [rank for rank in ranks if self._row(rank, k)["after"][place] != value]
        because = "though their gradients are"
        if unequal:
            because = "as their gradients were changed on each rank after they had been reduced"
        elif k and not self._equal(k, "before", place, ranks):
            because = "as they were changed on some ranks since the last step"
        settings = "" if unequal else self._other_settings(k, ranks)
        text = (
            f"after {self._step(k)}, parameter {self.names[place]!r} is not equal on "
            f"{ranks_in_words(ranks)}, {because}{settings}"
        )
        return self._finding("unequal-parameters", k, deviating, text)

    def _other_settings(self, k: int, ranks: tuple[int, ...]) -> str:
        """Settings of the optimizer that differ between the ranks, in words."""
        now: dict[int, Any] = {}
        for rank in ranks:
            for row in self.rows[rank]["steps"][: k + 1]:
                now[rank] = row.get("settings", now.get(rank))
        first = now[ranks[0]] or []
        for rank in ranks[1:]:
            for own, other in zip(first, now[rank] or [], strict=False):
                for name in own:
                    if own[name] != other.get(name):
                        return (
                            f": {name} is {own[name]} on rank {ranks[0]} and {other.get(name)} "
                            f"on rank {rank}"
                        )
        return ""

    # Questions

    def _common(self, ranks: Sequence[int]) -> int:
        return min(len(self.rows[rank]["steps"]) for rank in ranks)

    def _row(self, rank: int, k: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[rank]["steps"][k]
        return row

    def _equal(self, k: int, what: str, place: int, ranks: Sequence[int]) -> bool:
        return len({self._row(rank, k)[what][place] for rank in ranks}) == 1

    def _is_constant(self, place: int, ranks: Sequence[int]) -> bool:
        return all(self.rows[rank]["constant"][place] for rank in ranks)

    def _is_nonzero(self, k: int, place: int, rank: int) -> bool:
        row = self._row(rank, k)
        return bool(row["grads"][place]) and any(row["samples"][place])

    def _reduced(self, k: int, places: Sequence[int], ranks: Sequence[int]) -> bool:
        """Whether the gradients of all parameters are equal, and not all zero."""
        return all(self._equal(k, "grads", place, ranks) for place in places) and any(
            self._is_nonzero(k, place, ranks[0]) for place in places
        )

    def _was_reduced(self, k: int, unequal: list[int], ranks: Sequence[int], why: str) -> bool:
        """Whether gradients that are unequal had been reduced, and were changed since."""
        if why == "ddp" and all(self._row(rank, k)["by_torch"] for rank in ranks):
            return True
        if self._are_scaled(k, unequal, ranks):
            return True
        needed = set(ranks)
        for rank in ranks:
            labels = self._row(rank, k)["labels"].get(str(unequal[0]), ())
            whole = any(needed <= {*self.groups.get(label, ())} for label in labels)
            if not (whole or len(labels) > 1):
                return False
        return True

    def _are_scaled(self, k: int, unequal: list[int], ranks: Sequence[int]) -> bool:
        """Whether the ranks' gradients differ by one factor for each rank alone."""
        first = [each for place in unequal for each in self._row(ranks[0], k)["samples"][place]]
        if len(set(first)) < 3:
            return False
        scaled = False
        for rank in ranks[1:]:
            own = [each for place in unequal for each in self._row(rank, k)["samples"][place]]
            factors = [y / x for x, y in zip(first, own, strict=False) if x]
            if len(own) != len(first) or not factors:
                return False
            if any(abs(each - factors[0]) > 1e-4 * abs(factors[0]) for each in factors):
                return False
            scaled = scaled or abs(factors[0] - 1) > 1e-6
        return scaled

    def _left_out(self, k: int, places: list[int], ranks: Sequence[int]) -> list[int]:
        """Ranks whose gradients are those of a later step of the others: they left steps out."""

        def picked(row: Any) -> list[str]:
            return [row["grads"][place] for place in places]

        found = []
        for rank in ranks:
            if not any(self._is_nonzero(k, place, rank) for place in places):
                continue
            own = tuple(picked(self._row(rank, k)))
            others = [other for other in ranks if other != rank]
            for other in others:
                later = self.rows[other]["steps"][k + 1 : k + 1 + AHEAD]
                if any(tuple(picked(row)) == own for row in later):
                    found.append(rank)
                    break
        return found

    def _become_equal(self, k: int, bad: list[int], ranks: Sequence[int]) -> bool:
        """Whether the parameters are equal again later, or averaged, as in local SGD."""
        for later in range(k + 1, self._common(ranks)):
            if all(self._equal(later, "before", place, ranks) for place in bad):
                return True
        ends = [self.rows[rank].get("end") or [] for rank in ranks]
        if all(ends) and all(len({end[place] for end in ends}) == 1 for place in bad):
            return True
        return all(self.rows[rank]["averaged"] >= self._row(rank, k)["at"] for rank in ranks)

    def _is_data_parallel(self, k: int, places: list[int], ranks: tuple[int, ...]) -> bool:
        """Whether something says that the gradients of these ranks are to be reduced."""
        for place in places:  # others of the same step are
            if self._equal(k, "grads", place, ranks) and self._is_nonzero(k, place, ranks[0]):
                return True
        needed = set(ranks)

        def covered(labels: Sequence[str]) -> bool:
            return any(needed <= {*self.groups.get(label, ())} for label in labels)

        rows = [self._row(rank, k) for rank in ranks]
        heads = [self.heads[rank] for rank in ranks]
        if all(row["sent"] or row["touched"] or row["late"] for row in rows) and all(
            covered(head["tied"]) for head in heads
        ):
            return True
        if any(self.rows[rank]["given"] >= self._row(rank, k)["at"] for rank in ranks):
            return False
        return (
            all(covered(self.rows[rank]["spread"]) for rank in ranks)
            or all(covered(head["losses"]) for head in heads)
            or all(any(size >= len(ranks) for size in head["samplers"]) for head in heads)
        )

    # Words

    def _step(self, k: int) -> str:
        row = self._row(min(self.rows), k)
        return f"step {row['k'] + 1} of {self.kind}"

    def _finding(self, kind: str, k: int, ranks: Sequence[int], text: str) -> Finding:
        site = self._row(ranks[0], k)["site"]
        return Finding(kind, site, sorted(ranks), text, f"{self.kind}.step()")
