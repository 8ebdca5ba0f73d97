"""All collectives, orders, accumulators, roundings, dtypes and groups, in a world of R replicas.

python -m tests.worlds.everything REPLICAS FOLDER: each instance writes what its replicas have got
into FOLDER. The same program with one instance says what is right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gpusim
from gpusim import collectives, lax
from gpusim.collectives.distributed import algorithms, job, layout

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.int32, np.complex64)
ORDERS = ("linear", "reverse", "tree", "ring")
LARGE = (9_001,)  # elements, in several blocks

Case = tuple[str, Callable[..., Any], tuple[np.ndarray, ...]]


def values(replicas: int, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers of many magnitudes for all replicas, so that the order of additions shows."""
    rng = np.random.default_rng([seed, replicas, *shape])
    whole = (replicas, *shape)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-100, 100, whole).astype(dtype)
    x = rng.standard_normal(whole) * 2.0 ** rng.integers(-6, 6, whole)
    if np.dtype(dtype).kind == "c":
        return (x + 1j * rng.standard_normal(whole)).astype(dtype)
    return x.astype(dtype)


def groupings(replicas: int) -> dict[str, Any]:
    evens, odds = list(range(0, replicas, 2)), list(range(1, replicas, 2))
    found: dict[str, Any] = {
        "uneven": [list(range(replicas - 1)), [replicas - 1]],
        "mixed": [odds[::-1], evens],
    }
    if replicas % 2 == 0:
        half = replicas // 2
        found["halves"] = [list(range(half)), list(range(half, replicas))]
        found["pairs"] = [[i, i + half] for i in range(half)]
        found["neighbours"] = [[i, i + 1] for i in range(0, replicas, 2)]
        found["backwards"] = [list(range(replicas))[::-1]]
    return found


def reductions() -> Iterator[tuple[str, dict[str, Any]]]:
    for order in ("kahan", "neumaier"):
        yield order, {"order": order}
    for order in (*ORDERS, "exact"):
        yield order, {"order": order}
        yield f"{order}, stochastic", {"order": order, "rounding": "stochastic", "seed": 7}
    yield "linear, float32", {"accumulate": np.float32}
    yield "tree, float16", {"order": "tree", "accumulate": np.float16}
    yield "ring, e4m3", {"order": "ring", "accumulate": ml_dtypes.float8_e4m3fn}
    eight = gpusim.Wire("int8", scale="amax", block=16, rounding="stochastic")
    across = gpusim.Reduction(order="ring", wire=gpusim.Wire("float16", at="ends"))
    yield "wires, ring", {"order": "ring", "wire": eight, "seed": 5}
    yield "wires, levels", {"order": "tree", "groups_of": 3, "across": across}
    yield "wires, integers", {"order": "fixed", "accumulate": "int16"}
    yield "linear, a format", {"accumulate": gpusim.Format(6, 3)}


def fold_cases(replicas: int) -> Iterator[Case]:
    """The folds; large ones are passed on in blocks, small ones gathered."""
    for size in ((), (3,), (5, 7), (0,), LARGE):
        for dtype in DTYPES if size == LARGE else (np.float32, np.float16):
            x = values(replicas, size, dtype)
            for name, how in reductions():
                if "format" in name and size == LARGE:
                    continue
                if "wires" in name and np.dtype(dtype).kind == "c":
                    continue
                reduction = gpusim.Reduction(**how)
                label = f"{name}, {np.dtype(dtype)}{list(size)}"
                yield (
                    f"psum, {label}",
                    lambda v, r=reduction: lax.psum(v, "i", reduction=r),
                    (x,),
                )
    x = values(replicas, (4_001,), np.float16)
    for grouping, groups in groupings(replicas).items():
        for name, how in reductions():
            if "format" in name:
                continue
            reduction = gpusim.Reduction(**how)
            yield (
                f"psum, {name}, groups {grouping}",
                lambda v, r=reduction, g=groups: lax.psum(v, "i", axis_index_groups=g, reduction=r),
                (x,),
            )
    for dtype in (np.float32, np.int32, ml_dtypes.bfloat16):
        x = values(replicas, (5_003,), dtype)
        yield f"pmean, {np.dtype(dtype)}", lambda v: lax.pmean(v, "i"), (x,)
        if np.dtype(dtype).kind != "c":
            yield f"pmax, {np.dtype(dtype)}", lambda v: lax.pmax(v, "i"), (x,)
            yield f"pmin, {np.dtype(dtype)}", lambda v: lax.pmin(v, "i"), (x,)
            yield f"pargmax, {np.dtype(dtype)}", lambda v: lax.pargmax(v, "i"), (x // 1,)
            yield f"pargmin, {np.dtype(dtype)}", lambda v: lax.pargmin(v, "i"), (x // 1,)
    for grouping, groups in groupings(replicas).items():
        x = values(replicas, (31,), np.int16)
        yield f"pmean, {grouping}", lambda v, g=groups: lax.pmean(v, "i", axis_index_groups=g), (x,)
        yield f"pmax, {grouping}", lambda v, g=groups: lax.pmax(v, "i", axis_index_groups=g), (x,)
    yield "psum, bool", lambda v: lax.psum(v > 0, "i"), (values(replicas, (5,), np.float32),)
    yield (
        "psum, a tree",
        lambda v: lax.psum({"a": v, "b": (v + 1, 2.5)}, "i"),
        (values(replicas, (5,), np.float32),),
    )
    for tiled in (False, True):
        for axis in (0, 1, -1):
            n = replicas * (2 if tiled else 1)
            shape = tuple(n if a == axis % 3 else 3 for a in range(3))
            for number, (name, how) in enumerate(reductions()):
                # All reductions along one axis; of the others every third.
                if "format" in name or (axis != 1 and number % 3):
                    continue
                reduction = gpusim.Reduction(**how)
                yield (
                    f"psum_scatter, {name}, axis {axis}, tiled {tiled}",
                    lambda v, r=reduction, a=axis, t=tiled: lax.psum_scatter(
                        v, "i", scatter_dimension=a, tiled=t, reduction=r
                    ),
                    (values(replicas, shape, np.float16),),
                )


def rearranging_cases(replicas: int) -> Iterator[Case]:
    x = values(replicas, (replicas, 3, 2 * replicas), np.float32)
    shift = [(i, (i + 3) % replicas) for i in range(replicas)]
    order = [(3 * i + 1) % replicas for i in range(replicas)]
    yield "ppermute", lambda v: lax.ppermute(v, "i", shift), (x,)
    yield "ppermute, some", lambda v: lax.ppermute(v, "i", shift[: replicas // 2]), (x,)
    yield "ppermute.transpose", lambda v: lax.ppermute.transpose(v, "i", shift[1:]), (x,)
    if sorted(order) == list(range(replicas)):
        yield "pshuffle", lambda v: lax.pshuffle(v, "i", order), (x,)
        yield "pshuffle.transpose", lambda v: lax.pshuffle.transpose(v, "i", order), (x,)
    for source in (0, replicas - 1):
        yield f"pbroadcast {source}", lambda v, s=source: lax.pbroadcast(v, "i", s), (x,)
        yield (
            f"pbroadcast.transpose {source}",
            lambda v, s=source: lax.pbroadcast.transpose(v, "i", s),
            (x,),
        )
    for tiled in (False, True):
        for axis in (0, 1, 2):
            yield (
                f"all_gather {axis} {tiled}",
                lambda v, a=axis, t=tiled: lax.all_gather(v, "i", axis=a, tiled=t),
                (x,),
            )
            yield (
                f"all_to_all {axis} {tiled}",
                lambda v, a=axis, t=tiled: lax.all_to_all(v, "i", 2 if t else 0, a, tiled=t),
                (x,),
            )
    yield "all_to_all.transpose", lambda v: lax.all_to_all.transpose(v, "i", 1, 0), (x,)
    yield "all_gather.transpose", lambda v: lax.all_gather.transpose(v, "i", axis=0), (x,)
    yield "psum_scatter.transpose", lambda v: lax.psum_scatter.transpose(v, "i"), (x,)
    yield "pswapaxes", lambda v: lax.pswapaxes(v, "i", 0), (x,)
    yield "axis_index", lambda v: lax.axis_index("i") + v[0, 0, 0] * 0, (x,)
    yield "axis_size", lambda v: v * 0 + lax.axis_size("i"), (x,)
    yield "psum of a number", lambda v: v * 0 + lax.psum(0.1, "i"), (x,)
    chosen = np.arange(2 * replicas).reshape(replicas, 2) % replicas
    yield "pgather", lambda v, k: lax.pgather(v, k, "i"), (x, chosen)
    yield "pgather, the same", lambda v: lax.pgather(v, np.array([1, 0]), "i"), (x,)
    for grouping, groups in groupings(replicas).items():
        if grouping in ("uneven", "mixed"):
            continue
        n = len(groups[0])
        y = values(replicas, (n, 5, 2 * n), np.int16)
        yield (
            f"all_gather, {grouping}",
            lambda v, g=groups: lax.all_gather(v, "i", axis=1, axis_index_groups=g),
            (y,),
        )
        yield (
            f"all_to_all, {grouping}",
            lambda v, g=groups: lax.all_to_all(v, "i", 2, 1, tiled=True, axis_index_groups=g),
            (y,),
        )
        yield (
            f"psum_scatter, {grouping}",
            lambda v, g=groups: lax.psum_scatter(v, "i", axis_index_groups=g),
            (y,),
        )
    yield (
        "unvaried",
        lambda v: (
            lax.psum(np.float32(0.1) * np.ones(3, np.float32), "i"),
            lax.all_gather(np.arange(3), "i"),
            lax.ppermute(np.arange(3), "i", [(0, 1)]),
            lax.psum_scatter(np.ones(replicas), "i"),
            v[0],
        ),
        (x,),
    )


def ragged_cases(replicas: int) -> Iterator[Case]:
    rng = np.random.default_rng(replicas)
    sizes = rng.integers(0, 4, (replicas, replicas))
    starts = np.cumsum(sizes, axis=1) - sizes
    targets = np.cumsum(sizes, axis=0) - sizes
    rows, room = int(sizes.sum(axis=1).max()), int(sizes.sum(axis=0).max()) + 2
    operand = values(replicas, (rows, 3), np.float32)
    output = values(replicas, (room, 3), np.float32, seed=1)
    tables = (starts, sizes, targets, sizes.T.copy())
    yield (
        "ragged_all_to_all",
        lambda a, b, *t: lax.ragged_all_to_all(a, b, *t, axis_name="i"),
        (operand, output, *tables),
    )
    yield (
        "ragged_all_to_all.transpose",
        lambda c, a, b, *t: lax.ragged_all_to_all.transpose(c, a, b, *t, axis_name="i"),
        (output[:, ::-1].copy(), operand, output, *tables),
    )
    overlapping = (starts // 2, sizes, targets, sizes.T.copy())
    yield (
        "ragged_all_to_all.transpose, rows sent twice",
        lambda c, a, b, *t: lax.ragged_all_to_all.transpose(c, a, b, *t, axis_name="i"),
        (output, operand, output, *overlapping),
    )


def cases(replicas: int) -> Iterator[Case]:
    yield from fold_cases(replicas)
    yield from rearranging_cases(replicas)
    yield from ragged_cases(replicas)


def nested_cases(replicas: int) -> Iterator[Case]:
    """Programs of two axes; the outer one spans the instances."""

    def two(f: Callable[..., Any]) -> Callable[..., Any]:
        return gpusim.vmap(f, axis_name="j")

    x = values(replicas, (3, 40), np.float16)
    for names in ("i", "j", ("i", "j"), ("j", "i")):
        for name, how in reductions():
            if "format" in name:
                continue
            reduction = gpusim.Reduction(**how)
            yield (
                f"psum over {names}, {name}",
                two(lambda v, n=names, r=reduction: lax.psum(v, n, reduction=r)),
                (x,),
            )
        yield f"axis_index {names}", two(lambda v, n=names: lax.axis_index(n) + 0 * v[0]), (x,)
        size = {"i": replicas, "j": 3}.get(names, 3 * replicas)
        y = values(replicas, (3, size, 2), np.int32)
        yield f"all_to_all {names}", two(lambda v, n=names: lax.all_to_all(v, n, 0, 0)), (y,)
        yield f"all_gather {names}", two(lambda v, n=names: lax.all_gather(v, n)), (y,)
        yield f"psum_scatter {names}", two(lambda v, n=names: lax.psum_scatter(v, n)), (y,)
        turn = [(k, (k + 2) % size) for k in range(size)]
        yield f"ppermute {names}", two(lambda v, n=names, t=turn: lax.ppermute(v, n, t)), (y,)


def until_all_are_done(x: Any) -> Any:
    """A loop of i steps on replica i: the first instance's replicas have finished first."""

    def step(i: Any, x: Any) -> Any:
        return x + lax.psum(x, "i") / 64

    return lax.fori_loop(0, lax.axis_index("i"), step, x)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in gpusim.trees.flatten(tree)[0]]


def run(world: gpusim.World) -> dict[str, np.ndarray]:
    """The bytes of what the replicas that are here have got, by case, executor and leaf."""
    here = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    found: dict[str, np.ndarray] = {}

    def keep(name: str, tree: Any) -> None:
        for number, leaf in enumerate(leaves(tree)):
            rows = np.frombuffer(np.ascontiguousarray(leaf).tobytes(), np.uint8)
            assert len(leaf) == world.local_replicas
            found[f"{name}, leaf {number}"] = rows.reshape(len(leaf), -1)

    with world:
        for number, (name, f, arguments) in enumerate(cases(world.replicas)):
            local = [argument[here] for argument in arguments]
            keep(f"vmap {name}", gpusim.vmap(f, axis_name="i")(*local))
            if number % 4 == 0:  # that both have the same bits is another test's claim
                keep(f"pmap {name}", gpusim.pmap(f, "i")(*local))
        for name, f, arguments in nested_cases(world.replicas):
            local = [argument[here] for argument in arguments]
            keep(f"vmap {name}", gpusim.vmap(f, axis_name="i")(*local))
        for name, result in stacked_calls(world, here):
            value = result.value
            shape = (world.local_replicas, *value.shape)
            keep(f"stacked {name}", value if result.mapped else np.broadcast_to(value, shape))
        with gpusim.reduction(order="ring", rounding="stochastic", seed=3) as state:
            x = values(world.replicas, (50,), np.float16)[here]
            for _ in range(3):
                x = gpusim.vmap(lambda v: v - lax.pmean(v, "i"), axis_name="i")(x)
            keep("a context", x)
            keep("its calls", np.full(world.local_replicas, state.calls))
        noise = gpusim.vmap(lambda v: gpusim.rng(5, "i").normal((4,)) + v, axis_name="i")(
            np.zeros(world.local_replicas)
        )
        keep("random numbers", noise)
        ones = np.ones(world.local_replicas)
        keep("a loop", gpusim.vmap(until_all_are_done, axis_name="i")(ones))
        keep("numbers of threads", gpusim.pmap(numbers, "i")(np.zeros(world.local_replicas)))
        inner = values(world.replicas, (3, 4), np.float32)[here]
        keep("threads in threads", gpusim.pmap(threads_inside, "i")(inner))
        mesh = gpusim.Mesh((world.replicas, 2), ("x", "y"))
        split = gpusim.shard_map(
            lambda v: lax.psum(v * lax.axis_index(("x", "y")), "x"),
            mesh=mesh,
            in_specs=gpusim.P("x", "y"),
            out_specs=gpusim.P(None, "y"),
        )
        keep(
            "a mesh",
            np.broadcast_to(
                split(values(world.replicas, (4,), np.float32)[here]), (world.local_replicas, 1, 4)
            ),
        )
    return found


def stacked_calls(world: gpusim.World, here: slice) -> Iterator[tuple[str, collectives.Result]]:
    """Collectives on stacked arrays, outside of any map."""
    replicas = world.replicas
    x = values(replicas, (replicas, 5), np.float32)[here]
    last_first = [*reversed(range(replicas))]
    ring = gpusim.Reduction(order="ring", rounding="stochastic", accumulate="float16", seed=4)
    groups = [last_first[:2], last_first[2:]]
    yield "psum", collectives.psum(x)
    yield "psum, ring", collectives.psum(x.astype(np.float16), reduction=ring)
    yield "psum of groups", collectives.psum(x, groups=groups)
    yield "pmean", collectives.pmean(x)
    yield "pmax", collectives.pmax(x)
    yield "pargmin", collectives.pargmin(x)
    yield "all_reduce", collectives.all_reduce(x, reduction=gpusim.Reduction(op="prod"))
    yield "psum_scatter", collectives.psum_scatter(x)
    yield "psum_scatter.transpose", collectives.psum_scatter.transpose(x[:, 0])
    yield "all_gather", collectives.all_gather(x, axis=1)
    yield "all_gather.transpose", collectives.all_gather.transpose(x)
    yield "all_to_all", collectives.all_to_all(x, 0, 1)
    yield "pswapaxes", collectives.pswapaxes(x, 0)
    yield "ppermute", collectives.ppermute(x, [(0, 1), (1, replicas - 1)])
    yield "ppermute.transpose", collectives.ppermute.transpose(x, [(0, 1), (1, replicas - 1)])
    yield "pshuffle", collectives.pshuffle(x, last_first)
    yield "pbroadcast", collectives.pbroadcast(x, 1)
    yield "pbroadcast.transpose", collectives.pbroadcast.transpose(x, 1)


def numbers(v: Any) -> Any:
    """Python numbers, which differ between replicas or not."""
    return v + lax.psum(float(lax.axis_index("i")) * 0.1, "i") + lax.psum(0.1, "i")


def threads_inside(v: Any) -> Any:
    """A pmap in a pmap: several collectives over the outer axis at the same time."""

    def f(w: Any) -> Any:
        return lax.psum(w, "i") + lax.psum(w, "j") + lax.psum(w, ("j", "i"))

    return gpusim.pmap(f, "j")(v)


def main() -> None:
    replicas, folder = int(sys.argv[1]), Path(sys.argv[2])
    # Folds of these sizes then go all ways, in several blocks.
    job.BLOCK, algorithms.SMALL, layout.LONG_MESSAGE = 1024, 1024, 512
    world = gpusim.World.from_environment(replicas)
    found = run(world)
    np.savez(folder / f"{world.instance}.npz", **{n.replace("/", "|"): v for n, v in found.items()})


if __name__ == "__main__":
    main()
