"""Pytrees as in `jax.tree`: nested containers whose leaves are arrays, numbers and other objects.

Nodes are tuples, lists, dicts, named tuples, deques (in JAX they are leaves) and registered
classes; None is a node without leaves. Every map takes such trees, and returns them. The functions
that register classes have the names of `jax.tree_util`.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import optree

from .trees import NAMESPACE, Structure

__all__ = [
    "all",
    "broadcast",
    "flatten",
    "flatten_with_path",
    "leaves",
    "leaves_with_path",
    "map",
    "map_with_path",
    "reduce",
    "structure",
    "transpose",
    "unflatten",
    "keystr",
    "DictKey",
    "FlattenedIndexKey",
    "GetAttrKey",
    "SequenceKey",
    "Structure",
    "register_dataclass",
    "register_pytree_node",
    "register_pytree_node_class",
    "register_pytree_with_keys",
    "register_static",
]

IsLeaf = Callable[[Any], bool] | None
T = TypeVar("T", bound=type)
MISSING: Any = object()


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """The leaves of a tree, in order, and its structure.

    **Arguments**:

    - `tree`: a pytree. The values of a dict are taken in the order of its sorted keys.
    - `is_leaf`: whether a node counts as a leaf.

    >>> from gpusim import tree
    >>> tree.flatten({"b": [1, None], "a": 2})
    ([2, 1], PyTreeSpec({'a': *, 'b': [*, None]}...))
    """
    found, treedef = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    return found, treedef


def unflatten(treedef: Structure, leaves: Iterable[Any]) -> Any:
    """The tree of a structure with these leaves.

    **Raises**: ValueError: if there are more leaves or fewer than in the structure.

    >>> from gpusim import tree
    >>> tree.unflatten(tree.structure({"a": 0, "b": (1, 2)}), [7, 8, 9])
    {'a': 7, 'b': (8, 9)}
    """
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree, in order.

    >>> from gpusim import tree
    >>> tree.leaves({"b": [1, None], "a": 2})
    [2, 1]
    """
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def structure(tree: Any, is_leaf: IsLeaf = None) -> Structure:
    """The structure of a tree, without its leaves; structures compare by ==.

    >>> from gpusim import tree
    >>> tree.structure([1, 2]) == tree.structure([3, 4]), tree.structure([1, 2]).num_leaves
    (True, 2)
    """
    return flatten(tree, is_leaf)[1]


def map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """The tree with `f` applied to each leaf, together with those of further trees.

    **Arguments**:

    - `f`: a function of one leaf of each tree.
    - `rest`: trees of the same structure; where `tree` has a leaf, they may have subtrees.

    **Raises**: ValueError: if the structures differ.

    >>> import numpy as np
    >>> from gpusim import tree
    >>> params, grads = {"w": np.ones(2), "b": 0.5}, {"w": np.ones(2), "b": 1.0}
    >>> tree.map(lambda p, g: p - 0.1 * g, params, grads)
    {'w': array([0.9, 0.9]), 'b': 0.4}
    """
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def reduce(
    function: Callable[[Any, Any], Any],
    tree: Any,
    initializer: Any = MISSING,
    is_leaf: IsLeaf = None,
) -> Any:
    """functools.reduce over the leaves.

    >>> import operator
    >>> from gpusim import tree
    >>> tree.reduce(operator.add, {"a": 1, "b": (2, 3)})
    6
    """
    first = () if initializer is MISSING else (initializer,)
    return functools.reduce(function, leaves(tree, is_leaf), *first)


def all(tree: Any, *, is_leaf: IsLeaf = None) -> bool:
    """Whether all leaves are true.

    >>> from gpusim import tree
    >>> tree.all({"a": True, "b": [True, False]})
    False
    """
    return builtins.all(leaves(tree, is_leaf))


def broadcast(prefix_tree: Any, full_tree: Any, is_leaf: IsLeaf = None) -> Any:
    """The tree of the structure of `full_tree` with the leaves of a prefix of it.

    **Raises**: ValueError: if the first is not a prefix of the second.

    >>> from gpusim import tree
    >>> tree.broadcast({"a": 1, "b": 2}, {"a": [0, 0], "b": {"c": 0}})
    {'a': [1, 1], 'b': {'c': 2}}
    """
    return optree.tree_broadcast_prefix(prefix_tree, full_tree, is_leaf, namespace=NAMESPACE)


def transpose(outer_treedef: Structure, inner_treedef: Structure | None, tree: Any) -> Any:
    """A tree of trees as the tree of the other way round.

    **Arguments**:

    - `outer_treedef`: the outer structure of `tree`.
    - `inner_treedef`: the structure of each of its leaves; None: that of the first.

    **Raises**: ValueError: if the tree does not have these structures.

    >>> from gpusim import tree
    >>> pairs = [{"loss": 1, "norm": 2}, {"loss": 3, "norm": 4}]
    >>> tree.transpose(tree.structure([0, 0]), None, pairs)
    {'loss': [1, 3], 'norm': [2, 4]}
    """
    if inner_treedef is None:
        inner_treedef = structure(outer_treedef.flatten_up_to(tree)[0])
    return optree.tree_transpose(outer_treedef, inner_treedef, tree)


# Paths


@dataclasses.dataclass(frozen=True)
class DictKey:
    """The key of a dict's entry, in a path."""

    key: Hashable

    def __str__(self) -> str:
        return f"[{self.key!r}]"


@dataclasses.dataclass(frozen=True)
class SequenceKey:
    """The index of a tuple's or list's entry, in a path."""

    idx: int

    def __str__(self) -> str:
        return f"[{self.idx!r}]"


@dataclasses.dataclass(frozen=True)
class GetAttrKey:
    """The name of a field, in a path."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclasses.dataclass(frozen=True)
class FlattenedIndexKey:
    """The number of a child of a registered class without keys, in a path."""

    key: int

    def __str__(self) -> str:
        return f"[<flat index {self.key}>]"


Key = DictKey | SequenceKey | GetAttrKey | FlattenedIndexKey
KeyPath = tuple[Any, ...]
Flattened = tuple[Iterable[Any], Hashable]


def keystr(keys: KeyPath, *, simple: bool = False, separator: str = "") -> str:
    """A path as text, as it would be written in Python.

    **Arguments**:

    - `simple`: only the keys, without brackets, quotes and dots.
    - `separator`: the text between two keys.

    >>> from gpusim import tree
    >>> [(path, _)] = tree.leaves_with_path({"layers": [None, 7]})
    >>> tree.keystr(path), tree.keystr(path, simple=True, separator="/")
    ("['layers'][1]", 'layers/1')
    """
    if simple:
        return separator.join(str(next(iter(vars(key).values()))) for key in keys)
    return separator.join(str(key) for key in keys)


def _key(entry: Any) -> Any:
    if isinstance(entry, optree.GetAttrEntry):
        return GetAttrKey(entry.name)
    if isinstance(entry, optree.NamedTupleEntry | optree.StructSequenceEntry):
        return GetAttrKey(entry.field)
    if isinstance(entry, optree.MappingEntry):
        return DictKey(entry.key)
    if isinstance(entry, optree.SequenceEntry):
        return SequenceKey(entry.index)
    return FlattenedIndexKey(entry.entry) if type(entry.entry) is int else entry.entry


def flatten_with_path(
    tree: Any, is_leaf: IsLeaf = None
) -> tuple[list[tuple[KeyPath, Any]], Structure]:
    """Pairs of each leaf's path and the leaf, and the structure.

    >>> from gpusim import tree
    >>> tree.flatten_with_path({"a": [5]})
    ([((DictKey(key='a'), SequenceKey(idx=0)), 5)], PyTreeSpec({'a': [*]}...))
    """
    accessors, found, treedef = optree.tree_flatten_with_accessor(
        tree, is_leaf, namespace=NAMESPACE
    )
    paths = (tuple(_key(entry) for entry in accessor) for accessor in accessors)
    return [*zip(paths, found, strict=True)], treedef


def leaves_with_path(tree: Any, is_leaf: IsLeaf = None) -> list[tuple[KeyPath, Any]]:
    """Pairs of each leaf's path and the leaf.

    >>> from gpusim import tree
    >>> [tree.keystr(path) for path, _ in tree.leaves_with_path({"a": [1, 2], "b": 3})]
    ["['a'][0]", "['a'][1]", "['b']"]
    """
    return flatten_with_path(tree, is_leaf)[0]


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """As `map`, with the leaf's path as the first argument of `f`.

    >>> from gpusim import tree
    >>> tree.map_with_path(lambda path, x: tree.keystr(path) + f"={x}", {"a": (1, 2)})
    {'a': ("['a'][0]=1", "['a'][1]=2")}
    """
    pairs, treedef = flatten_with_path(tree, is_leaf)
    others = [treedef.flatten_up_to(other) for other in rest]
    return unflatten(treedef, [f(*pair, *leaf) for pair, *leaf in zip(pairs, *others, strict=True)])


# Classes


def register_pytree_node(
    nodetype: type,
    flatten_func: Callable[[Any], Flattened],
    unflatten_func: Callable[[Any, Any], Any],
) -> None:
    """Make the instances of a class nodes of trees.

    **Arguments**:

    - `flatten_func`: takes an instance; returns its children, which are trees, and a hashable value
      with all that is not in them. Trees are of one structure only if these values are equal.
    - `unflatten_func`: takes that value and the children; returns the instance.

    **Raises**: ValueError: if the class is registered already.

    >>> import numpy as np, gpusim
    >>> class Line:
    ...     def __init__(self, slope, offset):
    ...         self.slope, self.offset = slope, offset
    >>> gpusim.tree.register_pytree_node(
    ...     Line, lambda line: ((line.slope, line.offset), None), lambda _, parts: Line(*parts)
    ... )
    >>> shifted = gpusim.vmap(lambda line: Line(line.slope, line.offset + 1))
    >>> shifted(Line(np.ones(2), np.zeros(2))).offset
    array([1., 1.])
    """
    optree.register_pytree_node(
        nodetype,
        flatten_func,
        unflatten_func,
        path_entry_type=optree.FlattenedEntry,
        namespace=NAMESPACE,
    )


def register_pytree_with_keys(
    nodetype: type,
    flatten_with_keys: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Hashable]],
    unflatten_func: Callable[[Any, Any], Any],
) -> None:
    """`register_pytree_node` for a class whose children have keys in paths.

    **Arguments**:

    - `flatten_with_keys`: as `flatten_func`, but with a pair of key (`GetAttrKey`, `DictKey`,
      `SequenceKey`) and child for each child.
    """

    def flattened(node: Any) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        pairs, auxiliary = flatten_with_keys(node)
        keys, children = zip(*pairs, strict=True)
        return children, auxiliary, keys

    optree.register_pytree_node(
        nodetype,
        flattened,
        unflatten_func,
        path_entry_type=optree.FlattenedEntry,
        namespace=NAMESPACE,
    )


def register_pytree_node_class(cls: T) -> T:
    """Register a class with ``tree_flatten(self)`` and ``tree_unflatten(cls, aux, children)``.

    **Returns**: the class, so that this is a decorator.

    >>> import gpusim
    >>> @gpusim.tree.register_pytree_node_class
    ... class Pair:
    ...     def __init__(self, *parts):
    ...         self.parts = parts
    ...     def tree_flatten(self):
    ...         return self.parts, None
    ...     @classmethod
    ...     def tree_unflatten(cls, aux, children):
    ...         return cls(*children)
    >>> gpusim.tree.leaves([Pair(1, 2), 3])
    [1, 2, 3]
    """
    unflatten_func: Any = cls.tree_unflatten  # type: ignore[attr-defined]
    register_pytree_node(cls, lambda node: node.tree_flatten(), unflatten_func)
    return cls


def register_dataclass(
    nodetype: T,
    data_fields: Sequence[str] | None = None,
    meta_fields: Sequence[str] | None = None,
    drop_fields: Sequence[str] = (),
) -> T:
    """Make the instances of a dataclass nodes of trees.

    **Arguments**:

    - `nodetype`: the dataclass, or another class that is constructed from its fields by keyword.
    - `data_fields`: the fields that are children. None, of both: all fields of a dataclass but
      those with ``field(metadata={"static": True})``.
    - `meta_fields`: the fields that belong to the structure; their values must be hashable.
    - `drop_fields`: fields that are neither; the constructor gives them their defaults.

    **Returns**: the class, so that this is a decorator.

    **Raises**:

    - TypeError: if only one of the two lists is given, or none for another class.
    - ValueError: if the lists leave a field out or name one that does not exist; or if the class
      is registered already.

    >>> import dataclasses, numpy as np, gpusim
    >>> @gpusim.tree.register_dataclass
    ... @dataclasses.dataclass
    ... class Layer:
    ...     weights: np.ndarray
    ...     activation: str = dataclasses.field(metadata={"static": True}, default="tanh")
    >>> gpusim.vmap(lambda layer: Layer(layer.weights + 1))(Layer(np.zeros(3)))
    Layer(weights=array([1., 1., 1.]), activation='tanh')
    """
    if (data_fields is None) != (meta_fields is None):
        raise TypeError("register_dataclass needs data_fields and meta_fields, or neither")
    if dataclasses.is_dataclass(nodetype):
        fields = {f.name: f for f in dataclasses.fields(nodetype) if f.init}
        if data_fields is None or meta_fields is None:
            meta_fields = [name for name, f in fields.items() if f.metadata.get("static")]
            data_fields = [n for n in fields if n not in (*meta_fields, *drop_fields)]
        named = {*data_fields, *meta_fields}
        if wrong := (fields.keys() - named - {*drop_fields}) | (named - fields.keys()):
            raise ValueError(
                f"register_dataclass: data_fields and meta_fields must be the fields of "
                f"{nodetype.__name__}, but differ in {sorted(wrong)}"
            )
    if data_fields is None or meta_fields is None:
        raise TypeError(
            f"register_dataclass needs data_fields and meta_fields for {nodetype.__name__}, which "
            "is not a dataclass"
        )
    data, meta = tuple(data_fields), tuple(meta_fields)

    def flattened(node: Any) -> tuple[Any, Any, Any]:
        return (
            tuple(getattr(node, name) for name in data),
            tuple(getattr(node, name) for name in meta),
            data,
        )

    def unflattened(values: Any, children: Any) -> Any:
        return nodetype(
            **dict(zip(data, children, strict=True)), **dict(zip(meta, values, strict=True))
        )

    optree.register_pytree_node(
        nodetype,
        flattened,
        unflattened,
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    return nodetype


def register_static(cls: T) -> T:
    """Make the instances of a class nodes without leaves, which belong to the structure.

    They must be hashable and compare by value.

    **Returns**: the class, so that this is a decorator.

    >>> import dataclasses, gpusim
    >>> @gpusim.tree.register_static
    ... @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     depth: int
    >>> gpusim.tree.leaves({"config": Config(3), "x": 1})
    [1]
    """
    register_pytree_node(cls, lambda node: ((), node), lambda node, _: node)
    return cls
