"""Pytrees: nested tuples, lists, dicts, named tuples and registered classes, by optree, as in JAX.

None is an empty tree, except in specifications (in_axes, out_axes), where it is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree

Structure = optree.PyTreeSpec

NAMESPACE = "gpusim"
"""optree's registry in which `gpusim.tree` registers classes; those of its global one are nodes
too."""

LEAF: Structure = optree.treespec_leaf()
"""The structure of a tree that is a leaf."""

LEAF_TYPES: set[type] = {np.ndarray, int, float, complex, bool}
"""Types whose values are known to be leaves."""


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree`, in order, and its structure."""
    if type(tree) in LEAF_TYPES:
        return [tree], LEAF
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    return leaves, structure


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """The tree of that structure with these leaves."""
    if structure is LEAF and len(leaves) == 1:
        return leaves[0]
    return optree.tree_unflatten(structure, leaves)


def map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` applied to each leaf."""
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    return optree.tree_unflatten(structure, [function(leaf) for leaf in leaves])


def is_leaf(tree: Any) -> bool:
    """Whether `tree` is a single leaf."""
    if type(tree) in LEAF_TYPES:
        return True
    leaves, _ = optree.tree_flatten(tree, namespace=NAMESPACE)
    return len(leaves) == 1 and leaves[0] is tree


def broadcast_prefix(
    prefix: Any, tree: Any, what: str, is_prefix_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """For each leaf of `tree`, the leaf of `prefix` at or above it; None is a leaf of `prefix`.

    **Arguments**:

    - `what`: the name of the prefix in messages.
    - `is_prefix_leaf`: whether a node of the prefix is a leaf although it has children.

    **Raises**: ValueError if `prefix` is not a tree prefix of `tree`; the message begins with
    `what`.

    >>> broadcast_prefix((0, None), ({"a": 1, "b": 2}, [3]), "in_axes")
    [0, 0, None]
    """
    if prefix is None or type(prefix) in LEAF_TYPES:
        return [prefix] * len(flatten(tree)[0])
    leaves, structure = optree.tree_flatten(
        prefix, is_leaf=is_prefix_leaf, none_is_leaf=True, namespace=NAMESPACE
    )
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError:
        (error, *_) = optree.prefix_errors(
            prefix, tree, is_leaf=is_prefix_leaf, none_is_leaf=True, namespace=NAMESPACE
        )
        raise ValueError(f"{NO_PREFIX.format(what)}: {error(what)}") from None
    # optree takes a dict for an OrderedDict, whose leaves may be in another order
    if flatten(structure.unflatten(subtrees))[1] != flatten(tree)[1]:
        raise ValueError(f"{NO_PREFIX.format(what)}: they have dictionaries of different types")
    found = []
    for leaf, subtree in zip(leaves, subtrees, strict=True):
        found += [leaf] * len(flatten(subtree)[0])
    return found


NO_PREFIX = "{} must be a tree prefix of the corresponding value"
