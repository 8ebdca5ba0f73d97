"""Averages of means of different counts, from what all ranks have noted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from .findings import Finding
from .log import Log

__all__ = ["analyse"]

Row = dict[str, Any]


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """The kind mean-of-means."""
    groups: dict[str, list[int]] = {}
    for log in logs:
        groups.update(log.groups)
    rows = {log.rank: log.rows["means"] for log in logs if log.rows.get("means")}
    found: list[Finding] = []
    for label, ranks in groups.items():
        if len(ranks) > 1 and all(rank in rows for rank in ranks):
            own = [rows[rank] for rank in ranks]
            found += _of_calls(label, ranks, own)
            found += _of_gradients(label, ranks, own)
    return found


def _together(rows: Sequence[list[Row]]) -> Iterator[list[Row]]:
    """The rows of all ranks that belong together: the same time at the same line."""
    places: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for own in rows:
        counts: dict[str, int] = defaultdict(int)
        for row in own:
            places[row["site"], counts[row["site"]]].append(row)
            counts[row["site"]] += 1
    for found in places.values():
        if len(found) == len(rows):
            yield found


def _of_calls(label: str, ranks: list[int], rows: Sequence[list[Row]]) -> Iterator[Finding]:
    """Means that are operands of a collective of the group."""
    own = [[row for row in each if row.get("label") == label] for each in rows]
    done = set()
    for together in _together(own):
        averaged = next((row["averaged"] for row in together if row["averaged"]), "")
        if together[0]["kind"] == "gather" and not averaged:
            continue
        for means in zip(*(row["means"] for row in together), strict=False):
            line = _line_of_other_counts(means)
            first = together[0]
            if line is None or first["site"] in done:
                continue
            done.add(first["site"])
            counts = [_number(each[line][0]) for each in means]
            text = (
                f"{first['operation']} has the mean of each rank, over "
                f"{_counts(ranks, counts)}: their average is not the mean over all"
            )
            site, related = first["site"], [f"{line}: the mean of the rank"]
            if averaged:
                site, related = averaged, [f"{first['site']}: {first['operation']}", *related]
            yield Finding("mean-of-means", site, list(ranks), text, "mean", related=related)


def _line_of_other_counts(means: Sequence[dict[str, list[float]]]) -> str | None:
    """A line of which all ranks have a mean there, whose counts are surely not the same."""
    lines = set.intersection(*map(set, means))
    for line in lines:
        if set.intersection(*(set(each[line]) for each in means)):
            return None
    return min(lines, default=None)


def _of_gradients(label: str, ranks: list[int], rows: Sequence[list[Row]]) -> Iterator[Finding]:
    """Means whose gradients are averaged over the group."""
    own = [[row for row in each if row["kind"] == "backward"] for each in rows]
    done = set()
    for together in _together(own):
        factors = [_factor(row, label) for row in together]
        if None in factors or together[0]["site"] in done:
            continue
        tables = [{line: (count, by) for line, count, by in row["means"]} for row in together]
        for line in set.intersection(*map(set, tables)):
            counts = [table[line][0] for table in tables]
            scales = [
                table[line][1] * (factor or 0)
                for table, factor in zip(tables, factors, strict=True)
            ]
            if len(set(counts)) == 1 or not _are_alike(scales):
                continue
            first = together[0]
            done.add(first["site"])
            text = (
                f"the gradients of a mean are averaged over the ranks, which take it over "
                f"{_counts(ranks, list(map(_number, counts)))}: they are not those of the mean "
                "over all"
            )
            related = [f"{line}: the mean of the rank"]
            related += [f"{site}: all_reduce" for _, _, site in first["by_hand"][:1]]
            yield Finding(
                "mean-of-means", first["site"], list(ranks), text, "mean", related=related
            )
            break


def _factor(row: Row, label: str) -> float | None:
    """By what a rank has multiplied its gradients before they were reduced over the group."""
    if label in row["by_torch"]:
        return 1.0
    for own, factor, _ in row["by_hand"]:
        if own == label:
            return float(factor)
    return None


def _are_alike(scales: Sequence[float]) -> bool:
    return all(abs(each - scales[0]) <= 1e-5 * abs(scales[0]) for each in scales)


def _number(count: float) -> str:
    return str(int(count)) if count == int(count) else f"{count:.6g}"


def _counts(ranks: Sequence[int], counts: Sequence[str]) -> str:
    """Counts in words, of the first ranks that differ."""
    other = next((at for at, count in enumerate(counts) if count != counts[0]), 0)
    return f"{counts[0]} elements on rank {ranks[0]} and {counts[other]} on rank {ranks[other]}"
