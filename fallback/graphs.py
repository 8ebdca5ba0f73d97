"""The additions of a fold as kernels follow them: chains by blocks, and graphs, which may differ by
blocks. Plain data; `fallback.schedules` compiles to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = [
    "Adder",
    "ChainSchedule",
    "GraphSchedule",
    "ReductionGraph",
    "adders_of",
    "binary_additions",
    "neighbour_additions",
    "pairs_first_additions",
    "power_below",
]


@dataclass(frozen=True)
class ChainSchedule:
    """A chain per block: that of elements edges[k]..edges[k + 1]-1 starts at member starts[k].

    It visits the members up (`step` 1) or down (-1), and around.
    """

    edges: tuple[int, ...]
    starts: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Adder:
    """How a node adds its terms, other than by one rounded addition of two.

    "exact": their exact sum, rounded once to the accumulator. "aligned": each is first rounded (by
    `rounding`) to a multiple of 2**(e - bits + 1), where e is the exponent of the largest of them.
    `to_sum`: how the sum is rounded to the accumulator.
    """

    kind: str
    bits: int = 0
    rounding: str = "toward-zero"
    to_sum: str = "nearest-even"

    def __str__(self) -> str:
        return self.kind if self.kind != "aligned" else f"aligned to {self.bits} bits"


@dataclass(frozen=True)
class ReductionGraph:
    """Additions of two nodes each: the members are nodes 0..R-1, and addition k makes node R + k.

    Addition k is step k + 1 of the enumeration that numbers roundings. `postfix` is the same graph
    for a machine with a stack: m pushes member m, and -k replaces the last two values by addition
    k - 1.

    `adders`: for each addition None, or how it adds; empty: all are of two nodes, and round once.
    """

    additions: tuple[tuple[int, ...], ...]
    adders: tuple[Adder | None, ...] = ()
    postfix: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "postfix", tuple(_postfix(self.additions)))

    @property
    def depth(self) -> int:
        """The number of values that a machine with a stack holds at once."""
        depth = most = 0
        for instruction in self.postfix:
            depth += 1 if instruction >= 0 else 1 - len(self.additions[-instruction - 1])
            most = max(most, depth)
        return most

    @property
    def is_wide(self) -> bool:
        """Whether there are additions that only NumPy's kernels have."""
        return bool(self.adders)


@dataclass(frozen=True)
class GraphSchedule:
    """A graph per block: elements edges[k]..edges[k + 1]-1 are added by graphs[starts[k]]."""

    edges: tuple[int, ...]
    starts: tuple[int, ...]
    graphs: tuple[ReductionGraph, ...]

    @property
    def depth(self) -> int:
        """The number of values that a machine with a stack holds at once."""
        return max(graph.depth for graph in self.graphs)

    @property
    def is_wide(self) -> bool:
        """Whether there are additions that only NumPy's kernels have."""
        return any(graph.is_wide for graph in self.graphs)


def adders_of(order: ReductionGraph | GraphSchedule) -> Iterator[Adder | None]:
    """The adders of all graphs."""
    for graph in order.graphs if isinstance(order, GraphSchedule) else (order,):
        yield from graph.adders


def _postfix(additions: tuple[tuple[int, ...], ...]) -> list[int]:
    """The graph's last node, depth first: m is member m, and -k the addition that is step k."""
    members = sum(len(each) - 1 for each in additions) + 1
    found: list[int] = []
    waiting = [members + len(additions) - 1]
    while waiting:
        node = waiting.pop()
        if node < members:
            found.append(node)  # a member, or an addition whose operands are there
        else:
            waiting += [-(node - members + 1), *reversed(additions[node - members])]
    return found


def power_below(members: int) -> int:
    """The largest power of two of at most `members`."""
    return 1 << (members.bit_length() - 1)


def neighbour_additions(members: int) -> list[tuple[int, int]]:
    """The additions of order="tree"."""
    additions: list[tuple[int, int]] = []
    level = list(range(members))
    while len(level) > 1:
        first = members + len(additions)
        additions += zip(level[::2], level[1::2], strict=False)
        odd = level[-1:] if len(level) % 2 else []
        level = [*range(first, first + len(level) // 2), *odd]
    return additions


def pairs_first_additions(members: int) -> list[tuple[int, int]]:
    """The first pairs, and a tree over the power of two of values that remain."""
    extra = members - power_below(members)
    additions = [(2 * pair, 2 * pair + 1) for pair in range(extra)]
    level = [*range(members, members + extra), *range(2 * extra, members)]
    while len(level) > 1:
        first = members + len(additions)
        additions += zip(level[::2], level[1::2], strict=True)
        level = [*range(first, first + len(level) // 2)]
    return additions


def binary_additions(members: int) -> list[tuple[int, int]]:
    """The last nodes first, so that children come before their parents."""
    additions: list[tuple[int, int]] = []
    node = list(range(members))
    for r in range(members - 1, -1, -1):
        width = 1 << ((r + 1).bit_length() - 1)
        for child in (r + width, r + 2 * width):
            if child < members:
                additions.append((node[child], node[r]))
                node[r] = members + len(additions) - 1
    return additions
