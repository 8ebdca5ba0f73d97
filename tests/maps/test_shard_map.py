"""shard_map: splitting by specs, collectives over the mesh, putting together, and its mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import Mesh, P, lax

MESH = Mesh((4, 2), ("x", "y"))
X = np.arange(8 * 12.0).reshape(8, 12)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (P("x", "y"), (2, 6)),
        (P("y", "x"), (4, 3)),
        (P("x"), (2, 12)),
        (P(None, "x"), (8, 3)),
        (P(("x", "y")), (1, 12)),
        (P(("y", "x"), None), (1, 12)),
        (P(), (8, 12)),
    ],
)
def test_splitting_and_joining_by_the_same_spec_is_the_identity(spec, shape):
    def f(x):
        assert x.shape == shape
        return x * 2

    assert (gpusim.shard_map(f, mesh=MESH, in_specs=spec, out_specs=spec)(X) == X * 2).all()


def test_a_tuple_of_mesh_axes_splits_in_its_own_order():
    index = gpusim.shard_map(
        lambda x: np.full_like(x, 10) * lax.axis_index("x") + lax.axis_index("y"),
        mesh=MESH,
        in_specs=P(("y", "x")),
        out_specs=P(("y", "x")),
    )(np.zeros(8))
    assert index.tolist() == [0, 10, 20, 30, 1, 11, 21, 31]


@pytest.mark.parametrize(
    "mesh", [Mesh((1,), ("x",)), Mesh(3, "x"), Mesh((5,), ["x"]), Mesh((7,), ("x",))]
)
def test_a_sharded_matrix_product(mesh):
    n = mesh.size
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(-5, 5, (2 * n, 3 * n)).astype(float),
        rng.integers(-5, 5, (3 * n, 4)).astype(float),
    )
    f = gpusim.shard_map(
        lambda a, b: lax.psum_scatter(a @ b, "x", tiled=True),
        mesh=mesh,
        in_specs=(P(None, "x"), P("x")),
        out_specs=P("x"),
    )
    assert (f(a, b) == a @ b).all()


def test_results_declared_replicated_are_returned_once():
    f = gpusim.shard_map(
        lambda x: (lax.psum(x, ("x", "y")), lax.all_gather(x, "x", tiled=True)),
        mesh=MESH,
        in_specs=P("x", "y"),
        out_specs=(P(), P(None, "y")),
    )
    total, gathered = f(X)
    assert (total == X.reshape(4, 2, 2, 6).sum((0, 2))).all()
    assert (gathered == X).all()


def test_a_result_declared_replicated_that_is_not_is_an_error():
    f = {"mesh": MESH, "in_specs": P("x"), "out_specs": P()}
    with pytest.raises(
        ValueError, match=r"declared replicated over mesh axis 'x'.*replicas 0 and 1"
    ):
        gpusim.shard_map(lambda x: x, **f)(X)
    assert (gpusim.shard_map(lambda x: x, **f, check_vma=False)(X) == X[:2]).all()
    # copies that are equal bit by bit are replicated, however they came about
    assert (gpusim.shard_map(lambda x: x * 0, **f)(np.ones(4)) == 0).all()


def test_trees_of_specs():
    def f(tree, scale):
        return {"sum": lax.psum(tree["a"], "x"), "own": tree["b"][0] * scale}

    result = gpusim.shard_map(
        f,
        mesh=MESH,
        in_specs=({"a": P("x"), "b": P(None, "y")}, P()),
        out_specs={"sum": P(), "own": P(None, "y")},
    )({"a": np.arange(4), "b": [X]}, 3)
    assert result["sum"].tolist() == [6] and (result["own"] == X * 3).all()


def test_shard_map_nests_with_vmap():
    inside = gpusim.vmap(
        gpusim.shard_map(
            lambda x: x + lax.psum(x, ("x", "b")),
            mesh=Mesh((2,), ("x",)),
            in_specs=P("x"),
            out_specs=P("x"),
        ),
        axis_name="b",
    )
    x = np.arange(12).reshape(3, 4)
    assert (inside(x) == x + np.tile(x.reshape(3, 2, 2).sum((0, 1)), 2)).all()


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (
            ValueError,
            "axis 0 of size 6 is not divisible by the size 4",
            lambda f: f(P("x"), P())(X[:6]),
        ),
        (ValueError, "fewer axes", lambda f: f(P("x", "y"), P())(np.ones(8))),
        (ValueError, "no axis 'z'", lambda f: f(P("z"), P())),
        (ValueError, "twice", lambda f: f(P("x", "x"), P())),
        (TypeError, "PartitionSpec", lambda f: f("x", P())),
        (TypeError, "PartitionSpec", lambda f: f(P("x"), None)),
        (ValueError, "2 entries for 1", lambda f: f((P("x"), P("x")), P("x"))(X)),
        (ValueError, "out_specs", lambda f: f(P("x"), (P("x"), P("x")))(X)),
        (ValueError, "fewer axes", lambda f: f(P("x"), P("x", None, "y"))(X)),
        (TypeError, "Mesh", lambda f: gpusim.shard_map(abs, (4, 2), P("x"), P("x"))),
        (ValueError, "positive", lambda f: Mesh((0,), ("x",))),
        (ValueError, "axis_names", lambda f: Mesh((2, 2), ("x",))),
        (ValueError, "twice", lambda f: Mesh((2, 2), ("x", "x"))),
        (
            NameError,
            "'i'",
            lambda f: gpusim.shard_map(lambda x: lax.psum(x, "i"), MESH, P("x"), P("x"))(X),
        ),
    ],
)
def test_bad_specs_are_named(error, words, call):
    def f(in_specs, out_specs):
        return gpusim.shard_map(lambda x: x, mesh=MESH, in_specs=in_specs, out_specs=out_specs)

    with pytest.raises(error, match=words):
        call(f)


def test_it_is_a_decorator_and_takes_the_mesh_around_it() -> None:
    @gpusim.shard_map(in_specs=P("x", "y"), out_specs=P("x"))
    def rows(v: Any) -> Any:
        return lax.psum(v.sum(axis=1), "y")

    assert rows.__name__ == "rows"
    v = np.arange(32.0).reshape(4, 8)
    with pytest.raises(ValueError, match="shard_map has no mesh"):
        rows(v)
    for shape in ((2, 2), (4, 1), (1, 8)):
        with gpusim.set_mesh(Mesh(shape, ("x", "y"))):
            np.testing.assert_array_equal(rows(v), v.sum(axis=1))
    with pytest.raises(ValueError, match="shard_map has no mesh"):
        rows(v)
    with gpusim.set_mesh(Mesh(2, "x")), pytest.raises(ValueError, match="no axis 'y'"):
        rows(v)


def test_specs_are_required_by_name() -> None:
    mesh = Mesh(2, "x")
    with pytest.raises(TypeError, match=r"needs in_specs= .*no shardings to infer"):
        gpusim.shard_map(lambda v: v, mesh=mesh, out_specs=P("x"))
    with pytest.raises(TypeError, match="needs out_specs="):
        gpusim.shard_map(mesh=mesh, in_specs=P("x"))
    with pytest.raises(TypeError, match="axis_names must be a set"):
        gpusim.shard_map(lambda v: v, mesh, P(), P(), axis_names="x")
    with pytest.raises(ValueError, match=r"no axes \['z'\]"):
        gpusim.shard_map(lambda v: v, mesh, P(), P(), axis_names={"z"})
    with pytest.raises(TypeError, match=r"must be a gpusim\.Mesh"), gpusim.set_mesh((2,)):
        pass


def test_axis_names_are_the_axes_that_the_function_sees() -> None:
    mesh = Mesh((2, 4), ("x", "y"))
    seen = []

    def inner(v: Any) -> Any:
        seen.append((v.shape, lax.axis_size(("x", "y"))))
        return lax.psum(v, ("x", "y"))

    def outer(v: Any) -> Any:
        with pytest.raises(NameError):
            lax.axis_index("y")
        # the mesh is that of the outer map, of which y is left
        sums = gpusim.shard_map(inner, in_specs=P("y"), out_specs=P())(v)
        return sums + lax.axis_index("x")

    with pytest.raises(ValueError, match="no axis 'y'"):
        gpusim.shard_map(outer, mesh, P("x", "y"), P("x"), axis_names={"x"})
    f = gpusim.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    v = np.arange(16)
    expected = v.reshape(8, 2).sum(axis=0)
    np.testing.assert_array_equal(f(v), np.concatenate([expected, expected + 1]))
    assert seen == [((2,), 8)]
