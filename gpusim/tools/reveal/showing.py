"""`gpusim reveal --show`: what a file of a revealed order says, as text, JSON and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpusim.fallback.graphs import Adder
from gpusim.fallback.trees import SumTree, Trees
from gpusim.reduction.replay import problem_of
from gpusim.revealed import OrderFile, RevealedCall, read
from gpusim.words import count

from ..options import UsageError
from .naming import Likeness, in_words, likenesses, tree_in_words

__all__ = ["describe", "draw", "drawn", "lines", "show"]

#: Trees and ranges of a call that the text shows.
SHOWN = 8
#: Ranks of a tree that is drawn line by line.
DRAWN = 32


def show(path: Path, options: argparse.Namespace) -> int:
    """Print a file of `gpusim reveal`, and draw it.

    **Arguments**: `options` are those of the command: `json` prints JSON in place of text, and
    `picture` is the file of a drawing, whose suffix names the format, or None.

    **Returns**: the exit code, 0.

    **Raises**: UsageError for a file that is none of `gpusim reveal`, or cannot be read;
    ModuleNotFoundError for a picture without matplotlib.
    """
    picture: Path | None = getattr(options, "picture", None)
    try:
        file = read(path)
    except OSError as error:
        raise UsageError(f"--show {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"--show {error}") from None
    if picture is not None:
        draw(file, picture)
    if options.json:
        print(json.dumps(describe(file), indent=2))
    else:
        print("\n".join(lines(file)))
        if picture is not None:
            print(f"written to {picture}")
    return 0


# JSON


def describe(file: OrderFile) -> dict[str, Any]:
    """A file for machines: each call with its names and its problem."""
    return {
        "engine": file.engine,
        "world_size": file.world_size,
        "written": file.written,
        "calls": [_described(file, call) for call in file.calls],
        "trees": [
            {
                "tree": tree.tree.nested,
                "words": tree_in_words(tree.tree),
                "accumulator": str(tree.accumulator),
                "minus_zero": tree.minus_zero,
            }
            for tree in file.trees
        ],
    }


def _described(file: OrderFile, call: RevealedCall) -> dict[str, Any]:
    found = likenesses(file, call)
    nearest = found[0] if found else None
    return {
        "elements": call.elements,
        "dtype": call.dtype,
        "in_place": call.in_place,
        "offset": call.offset,
        "ranges": [list(each) for each in call.ranges],
        "unexplained": [[each.begin, each.end, each.reason] for each in call.unexplained],
        "words": "" if call.unexplained else in_words(file.trees_of_call(call), file.world_size),
        "twins": [each.name for each in found if each.is_twin],
        "nearest": None
        if nearest is None
        else {
            "name": nearest.name,
            "differing": nearest.other,
            "first": nearest.first,
            "differs": nearest.differs,
        },
        "same": call.same,
        "bits_same": call.bits_same,
        "ranks_agree": call.ranks_agree,
        "replays": problem_of(file, call) is None,
        "problem": problem_of(file, call),
    }


# Text


def lines(file: OrderFile) -> list[str]:
    """A file for people, line by line."""
    about = [file.engine or "an engine without a name", f"{count(file.world_size, 'rank')}"]
    said = [", ".join(about + ([f"written {file.written}"] if file.written else []))]
    for number, call in enumerate(file.calls):
        said += ["", *_call_lines(file, number, call)]
    return said


def _call_lines(file: OrderFile, number: int, call: RevealedCall) -> Iterator[str]:
    place = "in place" if call.in_place else "not in place"
    offset = f", {count(call.offset, 'element')} into the buffer" if call.offset else ""
    yield f"{count(call.elements, 'element')} of {call.dtype}, {place}{offset}"
    trees = file.trees_of_call(call)
    spans = count(len(trees.which), "range")
    yield f"  {spans} of elements, {count(len(set(trees.which)), 'tree')}"
    if not call.unexplained:
        words = in_words(trees, file.world_size)
        if words:
            yield f"  {words}"
        yield from _names(likenesses(file, call), call.elements)
    yield from _roundings(file, call)
    yield from _changes(file, number, call)
    for each in call.unexplained[:SHOWN]:
        reason = f": {each.reason}" if each.reason else ""
        yield f"  elements {each.begin:,} to {each.end - 1:,}: no tree explains them{reason}"
    yield from _tree_lines(trees, file.world_size)


def _names(found: list[Likeness], elements: int) -> Iterator[str]:
    equal = [each.name for each in found if each.is_twin]
    if equal:
        yield f"  the order of {', '.join(equal)}"
    elif found and not found[0].other:
        names = [each.name for each in found if (each.other, each.differs) == (0, found[0].differs)]
        yield f"  the trees of {', '.join(names)}, but {found[0].differs}"
    elif found and found[0].other < elements:
        best = found[0]
        yield (
            f"  none of the twins; the nearest is {best.name}: {best.other:,} of {elements:,} "
            f"elements differ, from element {best.first:,} on"
        )
    else:
        yield "  none of the twins or orders by name has a tree in common with it"


def _roundings(file: OrderFile, call: RevealedCall) -> Iterator[str]:
    if file.world_size == 1:
        return
    used = [file.trees[which] for which in dict.fromkeys(w for _, _, w in call.ranges)]
    sums = sorted({str(tree.accumulator) for tree in used})
    others = sorted({str(each) for tree in used for each in tree.others})
    also = f"; some {', '.join(others)}" if others else ""
    yield f"  partial sums: {'; '.join(sums) or 'not known'}{also}"
    if any(not tree.minus_zero for tree in used):
        yield "  a sum of negative zeros is +0"
    if call.verified is not None:
        equal, number = call.verified
        yield f"  of {number:,} sums of random values {equal:,} have the bits of this description"
    problem = problem_of(file, call)
    flushes = any(tree.accumulator.subnormals == "flushed" for tree in used)
    kept = "; subnormals are kept there" if flushes else ""
    yield f"  can be replayed{kept}" if problem is None else f"  cannot be replayed: {problem}"


def _changes(file: OrderFile, number: int, call: RevealedCall) -> Iterator[str]:
    if not call.same:
        yield (
            f"  the trees change from run to run ({count(call.repeats, 'run')}); these are "
            "the first run's"
        )
    if not call.bits_same:
        yield "  the bits of the same values change from run to run"
    if not call.ranks_agree:
        yield "  ranks have different results"
    own = file.trees_of_call(call)
    for other, before in enumerate(file.calls[:number]):
        if (before.elements, before.dtype) == (call.elements, call.dtype):
            changed = file.trees_of_call(before) != own
            kind = "other trees than" if changed else "the same trees as"
            yield f"  {kind} calls[{other}] of this size"
            return


def _tree_lines(trees: Trees, ranks: int) -> Iterator[str]:
    spans: dict[SumTree, list[tuple[int, int]]] = {}
    for begin, end, tree in trees.ranges:
        spans.setdefault(tree, []).append((begin, end))
    for tree, ranges in [*spans.items()][:SHOWN]:
        shown = ", ".join(f"{a:,} to {b - 1:,}" for a, b in ranges[:4])
        more = f" and {len(ranges) - 4:,} more ranges" if len(ranges) > 4 else ""
        yield f"  elements {shown}{more}: {tree_in_words(tree)}"
        is_chain = not tree.is_wide and tree.chain() is not None
        if not is_chain and ranks <= DRAWN:
            yield from (f"    {line}" for line in drawn(tree))
    if len(spans) > SHOWN:
        yield f"  and {count(len(spans) - SHOWN, 'more tree')}"


def drawn(tree: SumTree) -> list[str]:
    """A tree, line by line, with the root above.

    >>> print("\\n".join(drawn(SumTree.of([[0, 1], 2]))))
    +
    ├─ +
    │  ├─ 0
    │  └─ 1
    └─ 2
    """

    def add(terms: list[list[str]], adder: Adder | None) -> list[str]:
        found = ["+" if adder is None else f"+ {adder}"]
        for term in terms[:-1]:
            found += [f"├─ {term[0]}", *(f"│  {line}" for line in term[1:])]
        return [*found, f"└─ {terms[-1][0]}", *(f"   {line}" for line in terms[-1][1:])]

    found: list[str] = tree.folded(lambda member: [str(member)], add)
    return found


# Pictures


def draw(file: OrderFile, path: Path) -> None:
    """Draw the ranges and trees of the call with the most trees, the first of such.

    **Raises**: ValueError for the suffix of `path`; ModuleNotFoundError without matplotlib.
    """
    from gpusim.figures import check_suffix, styled, write

    check_suffix(path)
    call = max(file.calls, key=lambda each: len({which for _, _, which in each.ranges}))
    trees = file.trees_of_call(call)
    kinds = [*dict.fromkeys(tree for _, _, tree in trees.ranges)]
    shown = kinds[:SHOWN]
    with styled():
        from matplotlib.figure import Figure

        rows = -(-max(1, len(shown)) // 4)
        height = 1.3 + 2.2 * rows
        # No constrained layout: its solver's last bits differ, and with them the file.
        drawing = Figure(figsize=(9, height))
        grid = drawing.add_gridspec(
            rows + 1, 4, height_ratios=[0.3, *[2] * rows], left=0.02, right=0.98,
            top=1 - 0.4 / height, bottom=0.15 / height, hspace=0.5, wspace=0.1,
        )  # fmt: skip
        _draw_ranges(drawing.add_subplot(grid[0, :]), file, call, trees, shown)
        for k, tree in enumerate(shown):
            _draw_tree(drawing.add_subplot(grid[1 + k // 4, k % 4]), tree, _colour(k))
        write(drawing, path)


def _colour(number: int) -> str:
    from gpusim.figures import COLOURS

    return COLOURS[number % len(COLOURS)]


def _draw_ranges(
    axes: Any, file: OrderFile, call: RevealedCall, trees: Trees, shown: list[SumTree]
) -> None:
    colours = {tree: _colour(k) for k, tree in enumerate(shown)}
    for begin, end, tree in trees.ranges[:4000]:
        colour = colours.get(tree, "#bbbbbb")
        axes.barh(0, end - begin, left=begin, color=colour, edgecolor="white", linewidth=0.4)
    axes.set_xlim(0, call.elements)
    axes.set_yticks([])
    axes.set_xlabel("element")
    axes.set_title(
        f"{file.engine or 'an engine'}: {count(call.elements, 'element')} of {call.dtype}, "
        f"{count(file.world_size, 'rank')}, {count(len(set(trees.which)), 'tree')}"
    )


def _draw_tree(axes: Any, tree: SumTree, colour: str) -> None:
    """The root above; leaves in the order in which they stand in the tree."""
    places: list[int] = []

    def leaf(member: int) -> tuple[float, int]:
        places.append(member)
        at = float(len(places) - 1)
        if len(places) <= 2 * DRAWN:
            axes.text(at, -0.35, str(member), ha="center", va="top", fontsize=7)
        return at, 0

    def add(terms: list[tuple[float, int]], adder: Adder | None) -> tuple[float, int]:
        height = 1 + max(level for _, level in terms)
        middle = sum(at for at, _ in terms) / len(terms)
        for at, level in terms:
            axes.plot([at, middle], [level, height], color=colour, linewidth=1)
        mark = "o" if adder is None else "s"
        axes.plot([middle], [height], mark, color=colour, markersize=3)
        return middle, height

    _, top = tree.folded(leaf, add)
    axes.set_ylim(-1.2, max(top, 1) + 0.4)
    axes.axis("off")
