"""Dropout of one model's ranks by the wrong random bits, from what all ranks have noted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from .findings import Finding, ranks_in_words
from .log import Log

__all__ = ["analyse"]


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """The kinds same-random-bits and other-random-bits."""
    rows = {log.rank: log.rows["draws"] for log in logs if log.rows.get("draws")}
    groups: dict[str, list[int]] = {}
    for log in logs:
        groups.update(log.groups)
    found: list[Finding] = []
    for label, ranks in groups.items():
        own = [rank for rank in ranks if rank in rows and label in rows[rank][0]["links"]]
        if len(own) == len(ranks) > 1:
            found += _of_group(label, own, rows)
    return found


def _of_group(
    label: str, ranks: Sequence[int], rows: dict[int, list[dict[str, Any]]]
) -> Iterator[Finding]:
    """The findings of ranks that hold parts of one model, one of each kind and site."""
    heads = [rows[rank][0] for rank in ranks]
    split = _have_parts([head["weights"] for head in heads])
    operations = {each for head in heads for each in head["links"][label]}
    only_routes = operations <= {"all_to_all", "all_to_all_single"}  # tokens to experts
    draws: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for rank in ranks:
        for row in rows[rank][1:]:
            draws[row["site"], row["number"]].append(row)
    done = set()
    for (site, _), drawn in draws.items():
        if len(drawn) < len(ranks) or any(row["shape"] != drawn[0]["shape"] for row in drawn):
            continue
        if any(row["constant"] for row in drawn):
            continue
        bits, states, inputs = (
            len({row[name] for row in drawn}) for name in ("bits", "state", "inputs")
        )
        shape = drawn[0]["shape"]
        words = f"dropout of {shape} on {ranks_in_words(ranks)}"
        if bits == 1 and states > 1:
            size = prod(shape)
            replicated = split or all(size in row["sizes"].get(label, ()) for row in drawn)
            if replicated and ("other", site) not in done:
                done.add(("other", site))
                text = (
                    f"{words}, which share a model and have the same tensor there, draws from "
                    "generators in different states: what was replicated is not any more"
                )
                deviating = _deviating(ranks, [row["state"] for row in drawn])
                yield Finding("other-random-bits", site, deviating, text, "dropout")
        elif bits == len(ranks) and states == 1:
            same_inputs = inputs == 1 and drawn[0]["inputs"]
            of_parts = same_inputs or _are_parts(drawn) or (split and not only_routes)
            if of_parts and ("same", site) not in done:
                done.add(("same", site))
                text = (
                    f"{words}, which share a model and have different parts there, draws from "
                    "generators in the same state: all parts are dropped out alike"
                )
                yield Finding("same-random-bits", site, list(ranks), text, "dropout")


def _deviating(ranks: Sequence[int], states: Sequence[str]) -> list[int]:
    """The ranks whose state is not that of most; all if most have none alike."""
    state, count = Counter(states).most_common(1)[0]
    if 2 * count <= len(ranks):
        return list(ranks)
    return [rank for rank, own in zip(ranks, states, strict=True) if own != state]


def _have_parts(weights: Sequence[dict[str, str]]) -> bool:
    """Whether ranks have different weights of one name."""
    names = set.intersection(*(set(each) for each in weights))
    return any(len({each[name] for each in weights}) == len(weights) for name in names)


def _are_parts(drawn: Sequence[dict[str, Any]]) -> bool:
    """Whether the ranks' modules were given parts of one tensor."""
    parts = [row["part"] for row in drawn]
    if not all(parts):
        return False
    return len({whole for whole, _ in parts}) == 1 and len({at for _, at in parts}) == len(parts)
