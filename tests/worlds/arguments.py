"""Arguments of maps that instances share, or should not: whole arrays, and values that differ.

python -m tests.worlds.arguments: prints a line for each case that went as it should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gpusim
from gpusim import P, lax, trees

REPLICAS = 4
MESH = gpusim.Mesh(REPLICAS, "x")
LARGE = np.arange(3_000_000, dtype=np.float32)  # hashed in parts


def world(check: Any = True) -> gpusim.World:
    """A new one: an error ends a world."""
    return gpusim.World.from_environment(REPLICAS, check=check)


def refused(error: type[Exception], *parts: str, call: Callable[..., Any], args: Any) -> None:
    try:
        found = call(*args)
    except error as caught:
        text = str(caught)
        assert all(part in text for part in parts), text
    else:
        raise AssertionError(f"{parts[0]}: expected {error.__name__}, got {found}")


def differing_values() -> None:
    """Each instance has its own value of what all share."""

    def plain(w: Any, x: Any) -> Any:  # without a collective
        return last_of(w) + x

    def summing(w: Any, x: Any) -> Any:
        return lax.psum(last_of(w) + x, "x")

    for w_of in (
        lambda i: np.float32([1, 2, 3 + i]),
        lambda i: LARGE + i * (LARGE == 2_999_999.0),  # the last element
        lambda i: 0.5 + i,
        lambda i: {"w": np.ones((2, 3)), "name": f"run {i}"},
    ):
        for f in (plain, summing):
            maps = {
                "in_axes=None": (
                    gpusim.vmap(f, in_axes=(None, 0), axis_name="x"),
                    gpusim.pmap(f, "x", in_axes=(None, 0)),
                ),
                "P()": (gpusim.shard_map(f, MESH, in_specs=(P(), P("x")), out_specs=P("x")),),
            }
            for why, calls in maps.items():
                for call in calls:
                    with world() as here:
                        x = local(here)
                        same = w_of(0)
                        call(same, x)
                        refused(
                            gpusim.CollectiveMismatchError,
                            "they differ in leaf",
                            f"of the arguments, which must be equal on all instances ({why})",
                            "arguments.py:",
                            call=call,
                            args=(w_of(here.instance), x),
                        )
    with world() as here:  # a small value is in the message
        refused(
            gpusim.CollectiveMismatchError,
            "float32[1] [0.0]",
            f"float32[1] [{max(1, here.instance)}.0]",
            call=gpusim.vmap(plain, in_axes=(None, 0)),
            args=(np.float32([here.instance]), local(here)),
        )
    for check in (False, "calls"):  # the switches
        with world(check) as here:
            own = np.float64(here.instance)
            out = gpusim.vmap(plain, in_axes=(None, 0))(own, local(here))
            np.testing.assert_array_equal(out, local(here) + here.instance)


def last_of(w: Any) -> Any:
    """A number of a tree, an array or a number."""
    w = w["w"] if isinstance(w, dict) else w
    return w.reshape(-1)[-1] if np.ndim(w) else w


def local(here: gpusim.World) -> Any:
    return np.arange(REPLICAS, dtype=np.float64)[here.replica_offset :][: here.local_replicas]


def differing_results() -> None:
    """Values that come in otherwise are compared where the result is declared replicated."""
    for call in (
        lambda c, x: gpusim.vmap(lambda v: c, out_axes=None)(x),
        lambda c, x: gpusim.pmap(lambda v: c, out_axes=None)(x),
        lambda c, x: gpusim.shard_map(lambda v: c, MESH, P("x"), P())(x),
    ):
        with world() as here:
            x = local(here)
            assert call(np.float64(7), x) == 7
            refused(
                gpusim.CollectiveMismatchError,
                "they differ in bits",
                call=call,
                args=(np.float64(here.instance), x),
            )
        for check in (False, "calls"):
            with world(check) as here:
                assert call(np.float64(here.instance), local(here)) == here.instance


def whole_arrays() -> None:
    """The whole array where rows are expected, and the other way round."""
    double = gpusim.shard_map(lambda v: v * 2, MESH, P("x"), P("x"))
    total = gpusim.shard_map(lambda v: lax.psum(v, "x"), MESH, P("x"), P())
    with world() as here:
        n = here.instances
        for rows in (REPLICAS, 3 * REPLICAS, 12 * REPLICAS):
            x = np.arange(rows * 2.0).reshape(rows, 2)
            for f in (double, total):
                may_be_rows = all(rows % count == 0 for count in here.counts)
                words = ["is the same on all instances, as a whole array is"]
                if not may_be_rows:
                    words = ["is not divisible", "for whole arrays, global_arrays=True"]
                if not may_be_rows and rows % here.local_replicas == 0:
                    continue  # the other instances refuse it, which ends this one's wait
                refused(ValueError, *words, "shape (", call=f, args=(x,))
        assert n > 1
    # equal rows may be meant, and are taken when the program says so
    said = gpusim.shard_map(lambda v: lax.psum(v, "x"), MESH, P("x"), P(), global_arrays=False)
    with world() as here:
        zeros = np.zeros(12 * REPLICAS * here.local_replicas)
        assert said(np.ones_like(zeros)).sum() == REPLICAS * 12 * REPLICAS
        np.testing.assert_array_equal(double(zeros[:0]), zeros[:0])
        # rows of its own, of a size that a whole array could have
        first = 12.0 * REPLICAS * here.replica_offset
        rows = np.arange(zeros.size) + first
        np.testing.assert_array_equal(double(rows), 2 * rows)
        np.testing.assert_array_equal(double(zeros), zeros)  # this function has had its own rows
    for f in (gpusim.vmap(np.sin), gpusim.pmap(np.sin)):
        with world() as here:
            own = f"{here.replica_offset}:{here.replica_offset + here.local_replicas}"
            words = f"pass the rows of its own replicas, [{own}]"
            refused(ValueError, words, call=f, args=(np.ones(REPLICAS),))


def global_arrays() -> None:
    """With global_arrays=True a program is that of one process, in arguments and results."""
    values = np.random.default_rng(0)
    a = values.standard_normal((REPLICAS * 3, 4, 2)).astype(np.float32)
    b = values.standard_normal((4, 2 * REPLICAS)).astype(np.float32)
    mesh = gpusim.Mesh((REPLICAS, 2), ("x", "y"))
    cases: list[tuple[gpusim.Mesh, Callable[..., Any], Any, Any, tuple[Any, ...]]] = [
        (MESH, lambda v: v + lax.axis_index("x"), P("x"), P("x"), (a,)),
        (MESH, lambda v: lax.psum(v, "x"), P(None, "x"), P(), (a,)),
        (MESH, lambda v, c: v * c, (P("x"), P()), P("x"), (a, np.float32(3))),
        (MESH, lambda v: {"a": v, "b": lax.psum_scatter(v[0], "x")}, P("x"), P("x"), (a,)),
        (MESH, lambda v: np.float32(1), P("x"), P(), (a,)),
        (MESH, lambda v: v[:0], P("x"), P("x"), (a,)),
        (mesh, lambda v: v.sum(0) + lax.axis_index("y"), P(None, ("y", "x")), P(("y", "x")), (b,)),
        (mesh, lambda v: v @ v.T, P("y", "x"), P("x", "y"), (b,)),
        (mesh, lambda v, w: lax.psum(v @ w, "y"), (P("x", "y"), P("y")), P("x"), (a[:, :, 0], b)),
        (mesh, lambda v: lax.all_gather(v, "x"), P("x"), P(None, "x"), (a[..., 0],)),
        (mesh, lambda v: v.astype(np.float16), P(None, "x"), P(None, "x"), (b[None, 0],)),
    ]
    for number, (grid, f, in_specs, out_specs, args) in enumerate(cases):
        call = gpusim.shard_map(f, grid, in_specs, out_specs, global_arrays=True)
        plain = gpusim.shard_map(f, grid, in_specs, out_specs)
        expected = trees.flatten(plain(*args))[0]
        with world():
            found = trees.flatten(call(*args))[0]
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape, (number, left, right)
            np.testing.assert_array_equal(left, right, err_msg=str(number))
    with world() as here:
        call = gpusim.shard_map(np.sin, MESH, P("x"), P("x"), global_arrays=True)
        refused(
            gpusim.CollectiveMismatchError,
            "leaf 0 of the arguments, which must be equal on all instances (global_arrays=True)",
            call=call,
            args=(a + here.instance,),
        )


def main() -> None:
    for case in (differing_values, differing_results, whole_arrays, global_arrays):
        case()
        print(case.__name__, flush=True)


if __name__ == "__main__":
    main()
