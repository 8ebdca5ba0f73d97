"""Reductions by the names of a mesh's axes, for the sums that XLA's partitioner inserts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import gpusim.jax
from gpusim import Reduction, as_reduction
from tests.jax.programs import random_programs
from tests.jax.programs.checks import (
    DEVICES,
    REDUCTIONS,
    Plain,
    all_same,
    executed,
    without_warnings,
)
from tests.jax.programs.random_programs import Draw, Program
from tests.oracles.budget import budget, seeds

Reductions = Mapping[Any, Reduction | None]


def axes_of(mesh: Mesh, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The axes along which the members of a group differ."""
    coordinates = np.stack(np.unravel_index(np.array(groups), mesh.devices.shape))
    differ = (coordinates != coordinates[:, :, :1]).any((1, 2))
    return tuple(name for name, moves in zip(mesh.axis_names, differ, strict=True) if moves)


def chosen(mesh: Mesh, reductions: Reductions, groups: Sequence[Sequence[int]]) -> Any:
    """The Reduction of a sum between these groups: a tuple's names may stand in any order."""
    axes = axes_of(mesh, groups)
    for key, reduction in reductions.items():
        if {*key} == {*axes} if isinstance(key, tuple) else axes == (key,):
            return reduction
    found = [reductions.get(axis) for axis in axes]
    assert found, groups
    assert all(each == found[0] for each in found), axes
    return found[0]


def check(program: Program, mesh: Mesh, reductions: Reductions) -> list[tuple[str, ...]]:
    """Compare with the plain computation. Returns the axes of the sums."""
    plain = Plain(program)
    with without_warnings(reductions):
        results = executed(program)
    expected, sums = plain.partitioned.run(
        plain.given, lambda groups: chosen(mesh, reductions, groups)
    )
    all_same(results, expected, f"{program.text}, {reductions}")
    return [axes_of(mesh, each.groups) for each in sums if each.op == "add" and not each.moves]


def meshes() -> list[tuple[int, ...]]:
    return [shape for shape in random_programs.SHAPES[DEVICES] if len(shape) > 1]


def each_axis_has_its_reduction() -> None:
    """Random programs on meshes of several axes, with a Reduction or None for each set of axes."""
    met = set()
    for seed in seeds(budget(20, least=3)):
        rng = np.random.default_rng(seed)
        shape = meshes()[rng.integers(len(meshes()))]
        devices = rng.permutation(np.array(jax.devices())) if rng.random() < 0.3 else jax.devices()
        mesh = Mesh(np.array(devices).reshape(shape), random_programs.NAMES[: len(shape)])
        dtype = ("float32", "float64")[rng.integers(2)]  # XLA's own sums of bfloat16 differ
        d = Draw(rng, mesh, dtype)
        blocks = (random_programs.sums, random_programs.products, random_programs.loops)
        parts = [block(d) for block in (*blocks, *blocks)]
        widths = [len(arrays) for _, arrays in parts]

        def function(*arrays: Any, parts: Any = parts, widths: Any = widths) -> Any:
            given = iter(arrays)
            return [
                part(*(next(given) for _ in range(width)))
                for (part, _), width in zip(parts, widths, strict=True)
            ]

        texts = [text for text, dtypes in REDUCTIONS.items() if dtype in dtypes]
        reductions: dict[Any, Reduction | None] = {}
        for count in range(1, len(shape) + 1):
            for names in combinations(mesh.axis_names, count):
                key = tuple(rng.permutation(names)) if count > 1 else names[0]
                left = rng.random() < 0.2
                reductions[key] = None if left else as_reduction(texts[rng.integers(len(texts))])
        arrays = [array for _, each in parts for array in each]
        met |= {*check(Program(f"seed {seed}", function, arrays), mesh, reductions)}
    assert len(met) > 1, met


def one_sum_over_axes_with_two_reductions_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("d", "m"))
    d = Draw(np.random.default_rng(1), mesh, "float32")
    both = d.array([2, 3], [("d", "m"), None])
    own = {"d": as_reduction("reverse"), "m": as_reduction("tree")}
    with gpusim.jax.installed(own):
        try:
            jax.jit(lambda x: x.sum(0))(both)
        except ValueError as error:
            assert "give install an entry for the tuple ('d', 'm')" in str(error), error
        else:
            raise AssertionError("two reductions for one sum")
    same_for_both = dict.fromkeys(("d", "m"), as_reduction("reverse"))
    check(Program("the same for both", lambda x: x.sum(0), [both]), mesh, same_for_both)
    for key in (("d", "m"), ("m", "d")):
        named = {**own, key: as_reduction("ring")}
        check(Program("a tuple", lambda x: (x.sum(0), x.sum()), [both]), mesh, named)
    # Dimensions that are split over an axis each are summed one after the other.
    crossed = d.array([2, 3], ["d", "m"])
    axes = check(Program("an axis each", lambda x: x.sum(), [crossed]), mesh, own)
    assert sorted(axes) == [("d",), ("m",)]


def parts_of_an_axis_have_its_reduction() -> None:
    """A reshape splits an axis: the sum goes over a part of it."""
    for shape, names in (((DEVICES,), ("d",)), *((each, ("d", "m", "k")) for each in meshes())):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), names[: len(shape)])
        d = Draw(np.random.default_rng(2), mesh, "float32")
        split = tuple(mesh.axis_names)
        x = d.array([1, 3], [split if len(split) > 1 else split[0], None])
        reductions: dict[Any, Reduction | None] = {
            names: as_reduction("reverse")
            for count in range(2, len(shape) + 1)
            for names in combinations(mesh.axis_names, count)
        }
        reductions |= {
            name: as_reduction(text)
            for name, text in zip(mesh.axis_names, ("tree", "ring", "exact"), strict=False)
        }
        partly = False
        for axis in (0, 1):

            def halves(x: Any, axis: int = axis) -> Any:
                return jnp.reshape(x, (2, DEVICES // 2, 3)).sum(axis)

            program = Program(f"halves along {axis} of {shape}", halves, [x])
            partly |= bool(check(program, mesh, reductions))
        # Halves of three along the first axis: XLA gathers the array before it sums.
        assert partly == (shape[0] % 2 == 0), shape


def axes_without_a_reduction_stay_xlas() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("d", "m"))
    d = Draw(np.random.default_rng(3), mesh, "float32")
    x = d.array([2, 3], ["d", "m"])
    plain = Plain(Program("both", lambda x: (x.sum(0), x.sum(1)), [x]))
    for reductions in ({}, {"d": None, "m": None}, {"another": "ring"}):
        with without_warnings(reductions):
            results = executed(plain.program)
        rounded = jax.tree.leaves(plain.results)
        for found, expected in zip(results, rounded, strict=True):
            assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    check(plain.program, mesh, {"m": as_reduction("reverse accumulate=float16")})
