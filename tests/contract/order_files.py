"""Random trees, and files of revealed orders as `gpusim reveal` writes them of an engine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gpusim.fallback.trees import SumTree, Trees

BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def entry(nested: Any, bits: int | None = 24, **more: Any) -> dict[str, Any]:
    """A tree as files have it."""
    accumulator = {"bits": bits, "rounding": "nearest-even", "subnormals": "kept"}
    return {"tree": nested, "adders": "rounded", "accumulator": accumulator, **more}


def order(
    trees: Trees, ranks: int, dtype: str = "float32", bits: int | None = None, **more: Any
) -> dict[str, Any]:
    """The contents of a file with one call; `bits` of accumulators are the type's if not given."""
    bits = bits or BITS[dtype]
    exact = [[[], {"kind": "exact"}]]
    entries = [
        entry(tree.nested, bits, **({"adders": exact} if tree.is_wide else {}), **more)
        for tree in trees.trees
    ]
    spans = zip(pairwise(trees.edges), trees.which, strict=True)
    ranges = [[begin, end, which] for (begin, end), which in spans]
    call = {"elements": trees.edges[-1], "dtype": dtype, "ranges": ranges}
    return {
        "format": "gpusim order",
        "version": 1,
        "engine": "an engine",
        "world_size": ranks,
        "dtype": dtype,
        "op": "sum",
        "calls": [call],
        "trees": entries,
    }


def write(path: Path, contents: dict[str, Any]) -> Path:
    """The file with these contents."""
    path.write_text(json.dumps(contents))
    return path


def random_tree(random: np.random.Generator, members: int, widest: int = 2) -> Any:
    """A tree of nested lists, whose nodes have 2 to `widest` terms."""
    nodes: list[Any] = random.permutation(members).tolist()
    while len(nodes) > 1:
        terms = min(len(nodes), int(random.integers(2, widest + 1)))
        chosen = [nodes.pop(int(random.integers(len(nodes)))) for _ in range(terms)]
        nodes.append(chosen)
    return nodes[0]


def random_trees(
    random: np.random.Generator, members: int, elements: int, widest: int = 2, kinds: int = 4
) -> Trees:
    """Trees by ranges of elements, some of them the same."""
    known = [SumTree.of(random_tree(random, members, widest)) for _ in range(kinds)]
    cuts = np.unique(random.integers(0, elements + 1, size=int(random.integers(0, 9))))
    spans = pairwise([0, *(c for c in cuts.tolist() if 0 < c < elements), elements])
    return Trees.joined([(a, b, known[int(random.integers(kinds))]) for a, b in spans])


def nodes_of(nested: Any, path: tuple[int, ...] = ()) -> Any:
    """The adders of a tree, by their paths."""
    if isinstance(nested, list):
        yield path, nested
        for k, child in enumerate(nested):
            yield from nodes_of(child, (*path, k))


def values(ranks: int, elements: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers of many magnitudes: a row for each rank."""
    random = np.random.default_rng(seed)
    scales = 2.0 ** random.integers(-9, 9, size=(ranks, elements))
    return (random.normal(size=(ranks, elements)) * scales).astype(dtype)
