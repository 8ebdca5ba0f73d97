"""Trees of additions as plain data, the same for each element or by ranges of elements, and what
kernels follow of them: a named order, chains, or graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from .graphs import (
    Adder,
    ChainSchedule,
    GraphSchedule,
    ReductionGraph,
    binary_additions,
    neighbour_additions,
    pairs_first_additions,
)
from .orders import EXACT, ring_bounds

__all__ = ["SumTree", "Trees", "compile_trees", "trees_of_order"]

Node = TypeVar("Node")


@dataclass(frozen=True)
class SumTree:
    """A tree of additions. The order of a node's terms has no meaning, so equal trees are equal.

    **Attributes**:

    - `postfix`: the tree for a machine with a stack: m pushes member m, and -k replaces the last k
      values by their sum. Of a node's terms, that with the lowest member comes first.
    - `adders`: how the nodes add, in the order of `postfix`: None for one rounded addition of two
      terms. Empty: all nodes are such.

    >>> SumTree.of([2, [1, 0]])
    SumTree(postfix=(0, 1, -2, 2, -2), adders=())
    >>> SumTree.of([2, [1, 0]]).nested
    [[0, 1], 2]
    """

    postfix: tuple[int, ...]
    adders: tuple[Adder | None, ...] = ()

    @classmethod
    def of(cls, nested: Any, adders: Mapping[tuple[int, ...], Adder] | None = None) -> SumTree:
        """The tree of nested lists, whose numbers are members.

        `adders` has the adders of nodes by their paths: the indices that lead to each from the
        root. Those of more than two terms that are not among them add exactly.
        """
        parts: list[_Part] = []
        waiting: list[tuple[Any, tuple[int, ...], bool]] = [(nested, (), False)]
        while waiting:
            node, path, is_ready = waiting.pop()
            if not isinstance(node, list | tuple):
                parts.append(_Part(int(node)))
            elif not is_ready:
                waiting.append((node, path, True))
                # Paths are as long as a tree is deep: they are made only where they are asked for.
                paths = [(*path, k) if adders else () for k in range(len(node))]
                waiting += [(child, at, False) for child, at in zip(node, paths, strict=True)]
            else:
                whole = _joined(parts[-len(node) :], (adders or {}).get(path))
                parts[-len(node) :] = [whole]
        (whole,) = parts
        return cls(*_postfix(whole))

    @classmethod
    def of_graph(cls, graph: ReductionGraph, members: int) -> SumTree:
        """The tree of a graph."""
        parts = [_Part(m) for m in range(members)]
        for number, nodes in enumerate(graph.additions):
            own = graph.adders[number] if graph.adders else None
            parts.append(_joined([parts[node] for node in nodes], own))
        return cls(*_postfix(parts[-1]))

    @property
    def members(self) -> int:
        """The number of members."""
        return sum(instruction >= 0 for instruction in self.postfix)

    @property
    def is_wide(self) -> bool:
        """Whether a node is other than one rounded addition of two terms."""
        return bool(self.adders)

    def rounded(self, to_sum: str) -> SumTree:
        """The tree whose sums are rounded in this way to the accumulator."""
        nodes = sum(instruction < 0 for instruction in self.postfix)
        known = [adder or Adder("exact") for adder in self.adders or (None,) * nodes]
        return SumTree(self.postfix, tuple(replace(adder, to_sum=to_sum) for adder in known))

    @property
    def nested(self) -> Any:
        """The tree as nested lists."""
        return self.folded(lambda member: member, lambda terms, _: terms)

    def folded(
        self, leaf: Callable[[int], Any], add: Callable[[list[Any], Adder | None], Any]
    ) -> Any:
        """The root's value, from those of leaves and the sums of nodes."""
        stack: list[Any] = []
        adders = iter(self.adders)
        for instruction in self.postfix:
            if instruction >= 0:
                stack.append(leaf(instruction))
                continue
            terms = stack[instruction:]
            del stack[instruction:]
            stack.append(add(terms, next(adders, None)))
        return stack.pop()

    def chain(self) -> tuple[int, ...] | None:
        """The members in the order of the additions, if one is added after the other.

        The first two may change places. None: the tree is not a chain.
        """
        found: list[int] = []
        for terms in _additions_from_root(self):
            leaves = [term for term in terms if isinstance(term, int)]
            if len(terms) != 2 or not leaves:
                return None
            found += leaves[::-1] if len(leaves) == 2 else leaves
        return tuple(reversed(found)) if found else (self.postfix[0],)

    def graph(self) -> ReductionGraph:
        """The additions, numbered by height, and from the lowest member on.

        The height of a node is the number of additions on the longest way from it to a member. Of
        a node's terms, that which needs the most memory comes first, so that stacks stay low.
        """
        found: list[tuple[int, int, int]] = []
        members = self.members
        terms_of: list[tuple[Sequence[int], Adder | None]] = []
        needs = dict.fromkeys(range(members), 1)  # values on a stack, by node

        def add(terms: list[tuple[int, int, int]], adder: Adder | None) -> tuple[int, int, int]:
            height, node = 1 + max(term[0] for term in terms), members + len(found)
            nodes = sorted((term[2] for term in terms), key=lambda n: -needs[n])
            needs[node] = max(held + needs[n] for held, n in enumerate(nodes))
            terms_of.append((nodes, adder))
            found.append((height, terms[0][1], node))
            return found[-1]

        self.folded(lambda member: (0, member, member), add)
        number = {old: members + k for k, (_, _, old) in enumerate(sorted(found))}
        ordered = [terms_of[old - members] for _, _, old in sorted(found)]
        additions = tuple(tuple(number.get(n, n) for n in nodes) for nodes, _ in ordered)
        adders = tuple(adder for _, adder in ordered) if self.is_wide else ()
        return ReductionGraph(additions, adders)


class _Part(NamedTuple):
    """A subtree: its lowest member, which is all of it if it has no terms, and how it adds."""

    lowest: int
    terms: tuple[_Part, ...] = ()
    adder: Adder | None = None


def _lowest(part: _Part) -> int:
    return part.lowest


def _joined(terms: Iterable[_Part], adder: Adder | None) -> _Part:
    found = tuple(sorted(terms, key=_lowest))
    if adder is None and len(found) > 2:
        adder = Adder("exact")
    elif adder == Adder("exact") and len(found) == 2:
        adder = None  # one rounded addition
    return _Part(found[0].lowest, found, adder)


def _postfix(whole: _Part) -> tuple[tuple[int, ...], tuple[Adder | None, ...]]:
    """The instructions of a tree, and the adders of its nodes."""
    found: list[int] = []
    adders: list[Adder | None] = []
    waiting: list[_Part | None] = [whole]  # None: the node that comes next has its terms
    while waiting:
        part = waiting.pop()
        if part is None:
            part = waiting.pop()
            assert part is not None
            found.append(-len(part.terms))
            adders.append(part.adder)
        elif part.terms:
            waiting += [part, None, *reversed(part.terms)]
        else:
            found.append(part.lowest)
    return tuple(found), tuple(adders) if any(adders) else ()


def _additions_from_root(tree: SumTree) -> Iterator[list[Any]]:
    """The terms of each addition, from the root down as long as one term is an addition."""
    nodes: list[list[Any]] = []

    def add(terms: list[Any], _: Adder | None) -> list[Any]:
        nodes.append(terms)
        return terms

    tree.folded(lambda member: member, add)
    yield from reversed(nodes)


@dataclass(frozen=True)
class Trees:
    """Elements edges[k]..edges[k + 1]-1 are added by trees[which[k]]; a Fold of a Schedule."""

    edges: tuple[int, ...]
    which: tuple[int, ...]
    trees: tuple[SumTree, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.edges, self.which, self.trees)))

    def __hash__(self) -> int:
        found: int = self.__dict__["_hash"]  # those of many ranges take longer than a fold
        return found

    @classmethod
    def joined(cls, ranges: Sequence[tuple[int, int, SumTree]]) -> Trees:
        """The trees of ranges that follow each other, neighbours with one tree made one."""
        trees = list(dict.fromkeys(tree for _, _, tree in ranges))
        number = {tree: k for k, tree in enumerate(trees)}
        edges, which = [0], list[int]()
        for first, end, tree in ranges:
            if first == end:
                continue
            if which and which[-1] == number[tree]:
                edges[-1] = end
            else:
                edges.append(end)
                which.append(number[tree])
        return cls(tuple(edges), tuple(which), tuple(trees))

    @property
    def ranges(self) -> list[tuple[int, int, SumTree]]:
        """The ranges: begin, end, tree."""
        spans = zip(pairwise(self.edges), self.which, strict=True)
        return [(first, end, self.trees[which]) for (first, end), which in spans]


@lru_cache(maxsize=64)
def compile_trees(fold: Trees, members: int) -> Any:
    """The order that kernels follow."""
    trees = [fold.trees[which] for which in fold.which]
    if members == 1 or not trees:
        return "linear"
    chains = {tree: None if tree.is_wide else tree.chain() for tree in fold.trees}
    for step in (1, -1):
        starts = [_start(chains[tree], step) for tree in trees]
        found = tuple(start for start in starts if start is not None)
        if len(found) == len(starts):
            return _named(ChainSchedule(fold.edges, found, step), members)
    named = {SumTree.of_graph(graph, members): graph for graph in _known_graphs(members)}
    graphs = tuple(named.get(tree) or tree.graph() for tree in fold.trees)
    if len(fold.trees) == 1 and not graphs[0].is_wide:
        is_tree = graphs[0].additions == tuple(neighbour_additions(members))
        return "tree" if is_tree else graphs[0]
    at_once = SumTree.of([*range(members)])
    if all(tree == at_once for tree in trees):
        return EXACT
    return GraphSchedule(fold.edges, fold.which, graphs)


def _known_graphs(members: int) -> list[ReductionGraph]:
    """Those of the orders with names, whose additions are numbered in their own ways."""
    kinds = (binary_additions, pairs_first_additions, neighbour_additions)
    return [ReductionGraph(tuple(kind(members))) for kind in kinds]


def _start(chain: tuple[int, ...] | None, step: int) -> int | None:
    """The member at which a walk around begins that is this chain, if there is one."""
    if chain is None:
        return None
    members = len(chain)
    for first in chain[:2]:
        second = chain[0] + chain[1] - first if members > 1 else first
        visited = (first, second, *chain[2:])[:members]
        if all((first + step * turn) % members == m for turn, m in enumerate(visited)):
            return first
    return None


def _named(order: ChainSchedule, members: int) -> str | ChainSchedule:
    if order.step == 1 and set(order.starts) == {0}:
        return "linear"
    if set(order.starts) == {members - 1} and order.step == -1:
        return "reverse"
    bounds = ring_bounds(order.edges[-1], members)
    spans = [(a, b, k) for k, (a, b) in enumerate(pairwise(bounds)) if a < b]
    same = [(a, b, k) for (a, b), k in zip(pairwise(order.edges), order.starts, strict=True)]
    return "ring" if order.step == 1 and spans == same else order


def trees_of_order(order: Any, members: int, elements: int) -> Trees:
    """The tree of each element, of an order that kernels follow."""
    graph = None
    if order == "tree":
        graph = ReductionGraph(tuple(neighbour_additions(members)))
    elif isinstance(order, ReductionGraph):
        graph = order
    if members == 1:
        tree = SumTree((0,))
    elif graph is not None:
        tree = SumTree.of_graph(graph, members)
    elif order == EXACT:
        tree = SumTree.of([*range(members)])
    elif isinstance(order, GraphSchedule):
        trees = [SumTree.of_graph(graph, members) for graph in order.graphs]
        spans = zip(pairwise(order.edges), order.starts, strict=True)
        return Trees.joined([(a, b, trees[which]) for (a, b), which in spans])
    else:
        return _trees_of_chains(order, members, elements)
    return Trees.joined([(0, elements, tree)])


def _trees_of_chains(order: str | ChainSchedule, members: int, elements: int) -> Trees:
    if isinstance(order, ChainSchedule):
        edges, starts, step = order.edges, order.starts, order.step
    elif order == "ring":
        edges, starts, step = tuple(ring_bounds(elements, members)), tuple(range(members)), 1
    elif order == "reverse":
        edges, starts, step = (0, elements), (members - 1,), -1
    else:
        edges, starts, step = (0, elements), (0,), 1
    trees = {start: _chain_tree(members, start, step) for start in set(starts)}
    spans = zip(pairwise(edges), starts, strict=True)
    return Trees.joined([(a, b, trees[start]) for (a, b), start in spans])


def _chain_tree(members: int, start: int, step: int) -> SumTree:
    visited = [(start + step * turn) % members for turn in range(members)]
    nodes, left = [], visited[0]
    for turn, right in enumerate(visited[1:]):
        nodes.append((left, right))
        left = members + turn
    return SumTree.of_graph(ReductionGraph(tuple(nodes)), members)
