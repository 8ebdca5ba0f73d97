"""Pytrees: nested tuples, lists, dicts, named tuples and registered classes, by optree, in JAX's
reading.

None is an empty tree, except in specifications (in_axes, out_axes), where it is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree

Structure = optree.PyTreeSpec


_LEAF: Structure = optree.treespec_leaf()

LEAF_TYPES: set[type] = {np.ndarray, int, float, complex, bool}
"""Types whose values are leaves, which need not be taken apart to know it."""


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree`, in order, and its structure."""
    if type(tree) in LEAF_TYPES:
        return [tree], _LEAF
    leaves, structure = optree.tree_flatten(tree)
    return leaves, structure


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """The tree of that structure with these leaves."""
    if structure is _LEAF and len(leaves) == 1:
        return leaves[0]
    return optree.tree_unflatten(structure, leaves)


def map(
    function: Callable[[Any], Any], tree: Any
) -> Any:  # as the tree functions of JAX and optree
    """The tree with `function` applied to each leaf."""
    leaves, structure = optree.tree_flatten(tree)
    return optree.tree_unflatten(structure, [function(leaf) for leaf in leaves])


def is_leaf(tree: Any) -> bool:
    """Whether `tree` is a single leaf."""
    if type(tree) in LEAF_TYPES:
        return True
    leaves, _ = optree.tree_flatten(tree)
    return len(leaves) == 1 and leaves[0] is tree


def spread_prefix(
    prefix: Any, tree: Any, what: str, is_prefix_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """For each leaf of `tree`, the leaf of `prefix` that covers it; None is a leaf of `prefix`.

    Raises:
        ValueError: when `prefix` is not a tree prefix of `tree`; the message begins with `what`.
    """
    covers: list[Any] = []
    _spread(prefix, tree, what, is_prefix_leaf, covers, "")
    return covers


def _children(node: Any) -> tuple[list[Any], list[Any], Any] | None:
    """Children, their entries and the kind of one tree node; None for a leaf."""
    if node is None:
        return [], [], None
    children, kind, entries, _ = optree.tree_flatten_one_level(node)
    return list(children), list(entries), (type(node), kind)


def _node(tree: Any) -> bool:
    return not is_leaf(tree)


def _spread(
    prefix: Any,
    tree: Any,
    what: str,
    is_prefix_leaf: Callable[[Any], bool] | None,
    covers: list[Any],
    path: str,
) -> None:
    if (
        prefix is None
        or (is_prefix_leaf is not None and is_prefix_leaf(prefix))
        or not _node(prefix)
    ):
        covers.extend([prefix] * len(flatten(tree)[0]))
        return
    if tree is None or not _node(tree):
        raise ValueError(
            f"{what} must be a tree prefix of the corresponding value, but at {path or 'its root'} "
            f"it has a {type(prefix).__name__} where the value is {describe(tree)}"
        )
    below, entries, kind = _children(prefix) or ([], [], None)
    under, tree_entries, tree_kind = _children(tree) or ([], [], None)
    if kind != tree_kind or entries != tree_entries:
        raise ValueError(
            f"{what} must be a tree prefix of the corresponding value, but at "
            f"{path or 'its root'} it "
            f"has a {type(prefix).__name__} with entries {entries} where the value has a "
            f"{type(tree).__name__} with entries {tree_entries}"
        )
    for part, subtree, entry in zip(below, under, entries, strict=True):
        _spread(part, subtree, what, is_prefix_leaf, covers, f"{path}[{entry!r}]")


def describe(value: Any) -> str:
    """A short description of a leaf for messages."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"an array of shape {tuple(shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
