"""gpusim.tree is jax.tree on the same trees; every map takes and returns registered classes."""

from __future__ import annotations

from tests.oracles import jax_oracle  # isort: skip - first: it sets JAX's devices and 64-bit types

import collections
import dataclasses
import operator
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax, tree

jax = jax_oracle.jax
Point = collections.namedtuple("Point", "x y")


@tree.register_dataclass
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    kind: str = dataclasses.field(default="tanh", metadata={"static": True})


@tree.register_pytree_node_class
@jax.tree_util.register_pytree_node_class
class Line:
    def __init__(self, *parts: Any, name: str = "line") -> None:
        self.parts, self.name = parts, name

    def tree_flatten(self) -> Any:
        return self.parts, self.name

    @classmethod
    def tree_unflatten(cls, name: str, parts: Any) -> Line:
        return cls(*parts, name=name)


class Keyed:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def keyed(of: Any) -> Any:
    return lambda k: (((of.GetAttrKey("a"), k.a), (of.DictKey("b"), k.b)), None)


jax.tree_util.register_pytree_with_keys(Keyed, keyed(jax.tree_util), lambda _, parts: Keyed(*parts))
tree.register_pytree_with_keys(Keyed, keyed(tree), lambda _, parts: Keyed(*parts))


@tree.register_static
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Config:
    depth: int


TREES = {
    "a leaf": 3,
    "None": None,
    "nothing": (),
    "dict": {"b": [1, None, (2,)], "a": {10: 3, 2: 4}},
    "named tuple": [Point(1, {"k": 2}), Point(None, 3)],
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "defaultdict": collections.defaultdict(list, {"b": 1, "a": [2]}),
    "dataclass": {"layers": [Layer(1, 2), Layer(3, (4, 5), "relu")]},
    "class": [Line(1, 2, 3), Line(name="empty")],
    "keys": (Keyed(1, [2, 3]), 4),
    "static": {"config": Config(3), "x": 1},
    "leaves": ["a", {1, 2}, frozenset(), object],
}


def plain(path: Any) -> Any:
    return [(type(key).__name__, *vars_of(key)) for key in path]


def vars_of(key: Any) -> Any:
    return [getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)]


@pytest.mark.parametrize("value", TREES.values(), ids=TREES)
def test_trees_are_jaxs(value: Any) -> None:
    assert tree.leaves(value) == jax.tree.leaves(value)
    pairs, theirs = tree.leaves_with_path(value), jax.tree.leaves_with_path(value)
    assert [plain(path) for path, _ in pairs] == [plain(path) for path, _ in theirs]
    for (path, leaf), (other, same) in zip(pairs, theirs, strict=True):
        assert leaf is same
        assert tree.keystr(path) == jax.tree_util.keystr(other)
        assert tree.keystr(path, simple=True, separator="/") == jax.tree_util.keystr(
            other, simple=True, separator="/"
        )
    found = tree.unflatten(tree.structure(value), tree.leaves(value))
    assert type(found) is type(value)
    assert jax.tree.structure(found) == jax.tree.structure(value)
    assert tree.structure(found) == tree.structure(value)
    assert tree.all(value) == jax.tree.all(value)


def test_functions_are_jaxs() -> None:
    a, b = {"w": (1, 2), "b": None, "l": Layer(3, 4)}, {"w": (5, [6]), "b": None, "l": Layer(7, 8)}
    for t in (tree, jax.tree):
        assert t.map(lambda x, y: (x, y), a, b)["w"] == ((1, 5), (2, [6]))
        assert t.map(operator.add, a, a)["l"] == Layer(6, 8)
        assert t.map(len, {"x": [1, 2], "y": []}, is_leaf=lambda n: isinstance(n, list)) == {
            "x": 2,
            "y": 0,
        }
        assert t.reduce(operator.add, a) == 10
        assert t.reduce(operator.add, a, 100) == 110
        with pytest.raises(TypeError):
            t.reduce(operator.add, ())
        assert t.broadcast({"w": 1, "l": 2, "b": None}, a) == {
            "w": (1, 1),
            "b": None,
            "l": Layer(2, 2),
        }
        outer, inner = t.structure([0, 0, 0]), t.structure({"p": 0, "q": 0})
        rows = [{"p": i, "q": -i} for i in range(3)]
        for treedef in (inner, None):
            assert t.transpose(outer, treedef, rows) == {"p": [0, 1, 2], "q": [0, -1, -2]}
        assert t.map_with_path(lambda path, x, y: (len(path), x + y), a, a)["w"] == (
            (2, 2),
            (2, 4),
        )
        with pytest.raises(ValueError):
            t.map(operator.add, a, {"w": (1, 2)})
        with pytest.raises(ValueError):
            t.unflatten(t.structure([1, 2]), [1])
        with pytest.raises(ValueError):
            t.broadcast([1, 2], [1, 2, 3])


def test_structures_of_other_static_fields_differ() -> None:
    assert tree.structure(Layer(1, 2)) != tree.structure(Layer(1, 2, "relu"))
    assert tree.structure(Config(1)) != tree.structure(Config(2))


def vmapped(f: Any, *args: Any) -> Any:
    return gpusim.vmap(f, axis_name="i")(*args)


def pmapped(f: Any, *args: Any) -> Any:
    return gpusim.pmap(f, "i")(*args)


def sharded(f: Any, *args: Any) -> Any:
    def shard(*args: Any) -> Any:
        rows = [tree.map(lambda x: x[0], arg) for arg in args]
        return tree.map(lambda x: np.expand_dims(x, 0), f(*rows))

    i = gpusim.P("i")
    return gpusim.shard_map(shard, gpusim.Mesh(3, "i"), (i,) * len(args), i)(*args)


@pytest.mark.parametrize("mapped", [vmapped, pmapped, sharded])
def test_maps_and_collectives_take_registered_classes(mapped: Any) -> None:
    w, b = np.arange(6.0).reshape(3, 2), np.arange(3)
    model = {"layers": [Layer(w, b, "relu")], "line": Line(b, name="x"), "config": Config(2)}

    def f(model: Any) -> Any:
        (layer,) = model["layers"]
        assert layer.kind == "relu" and model["config"] == Config(2)
        assert layer.w.shape == (2,) and model["line"].name == "x"
        total = lax.psum(layer, "i")
        return lax.fori_loop(0, 2, lambda i, m: tree.map(lambda a: 2 * a, m), total), model

    total, same = mapped(f, model)
    assert isinstance(total, Layer) and total.kind == "relu"
    np.testing.assert_array_equal(total.w, np.tile(4 * w.sum(axis=0), (3, 1)))
    np.testing.assert_array_equal(same["line"].parts[0], b)
    assert tree.structure(same) == tree.structure(model)


def test_in_axes_are_prefixes_of_registered_classes() -> None:
    f = gpusim.vmap(
        lambda layer: layer.w + layer.b, in_axes=(Layer(0, None, "tanh"),), axis_name="i"
    )
    np.testing.assert_array_equal(f(Layer(np.arange(3), 10)), [10, 11, 12])


def test_registration_says_what_is_wrong() -> None:
    @dataclasses.dataclass
    class Two:
        a: int
        b: int = 0

    with pytest.raises(ValueError, match=r"must be the fields of Two, but differ in \['b'\]"):
        tree.register_dataclass(Two, ["a"], [])
    with pytest.raises(ValueError, match=r"differ in \['c'\]"):
        tree.register_dataclass(Two, ["a", "b", "c"], [])
    with pytest.raises(TypeError, match="data_fields and meta_fields, or neither"):
        tree.register_dataclass(Two, ["a", "b"])
    with pytest.raises(TypeError, match="which is not a dataclass"):
        tree.register_dataclass(Config.__class__)
    tree.register_dataclass(Two, ["a"], [], drop_fields=["b"])
    assert tree.map(lambda x: x + 1, Two(1, 5)) == Two(2, 0)
    with pytest.raises(ValueError, match="registered"):
        tree.register_dataclass(Two)


def test_a_dataclass_that_is_not_registered_is_an_error_that_says_how() -> None:
    @dataclasses.dataclass
    class Params:
        w: Any

    message = r"type Params; an array .* register the class by gpusim\.tree\.register_dataclass"
    with pytest.raises(TypeError, match=message):
        gpusim.vmap(lambda p: p.w)(Params(np.ones(3)))
    with pytest.raises(TypeError, match=message):
        gpusim.vmap(lambda x: lax.psum(Params(x), "i"), axis_name="i")(np.ones(3))
