"""Programs that change arrays in place have NumPy's results under every map, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import Mesh, P
from gpusim.maps import per_replica_route
from tests.oracles.budget import budget
from tests.oracles.in_place import (
    REPLICAS,
    START,
    random_arguments,
    random_program,
    run_loop,
    run_program,
)
from tests.oracles.replicated import bits_of

PROGRAMS = budget(60, full=1000)


def described(values: dict[str, Any]) -> dict[str, Any]:
    """Return the dtypes, shapes and bits of one replica's values, and which are NumPy scalars."""
    return {
        name: (value.dtype.name, value.shape, bits_of(np.asarray(value)))
        for name, value in values.items()
    }


def under(map_: Any, program: str, x: np.ndarray, y: np.ndarray) -> Any:
    """Return each replica's values and errors under a map, and the statements it refused."""
    seen: list[Any] = []

    def f(x: Any, y: Any) -> Any:
        values, *errors = run_program(program, x, y)
        seen.append(errors)
        return values

    results = map_(f)(x, y)
    for name, value in results.items():
        assert value.flags.writeable, name
    return [
        ({name: value[r] for name, value in results.items()}, *seen[r % len(seen)])
        for r in range(REPLICAS)
    ]


def by_shard_map(f: Any) -> Any:
    mesh = Mesh((REPLICAS,), ("i",))

    def sharded(x: Any, y: Any) -> Any:
        return {name: value[None] for name, value in f(x[0], y[0]).items()}

    return gpusim.shard_map(sharded, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def by_nested(f: Any) -> Any:
    return lambda x, y: {
        name: value[0]
        for name, value in gpusim.vmap(gpusim.vmap(f, axis_name="i"), axis_name="outer")(
            np.stack([x, x[::-1]]), np.stack([y, y[::-1]])
        ).items()
    }


MAPS = {
    "vmap": lambda f: gpusim.vmap(f, axis_name="i"),
    "shard_map": by_shard_map,
    "vmap in vmap": by_nested,
    "last axis": lambda f: (
        lambda x, y: gpusim.vmap(f, in_axes=2, axis_name="i")(
            np.moveaxis(x, 0, 2), np.moveaxis(y, 0, 2)
        )
    ),
    "pmap": lambda f: gpusim.pmap(f, axis_name="i", schedule="one"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAPS)
def test_random_programs(name: str) -> None:
    compared = 0
    for seed in range(PROGRAMS):
        rng = np.random.default_rng(seed)
        program, (x, y) = random_program(rng), random_arguments(rng)
        compared += compare(MAPS[name], program, x, y, seed)
    assert compared >= 0.8 * PROGRAMS


def compare(map_: Any, program: str, x: np.ndarray, y: np.ndarray, seed: Any = None) -> bool:
    """Assert that the map gives what NumPy gives replica by replica; whether it is comparable.

    It is not where an index is out of range on some replicas only, or the map refuses a statement
    that NumPy takes.
    """
    expected = run_loop(program, x, y)
    if any(errors != expected[0][1] for _, errors in expected):
        return False
    lines = (START + program).splitlines()
    text = f"seed {seed}, {x.dtype} {y.dtype}\n{START}{program}"
    for r, (found, right) in enumerate(zip(under(map_, program, x, y), expected, strict=True)):
        values, failed, refused = found
        failing = [number for number, _ in right[1]]
        if any(number not in failing for number in refused):
            return False
        assert [n for n, _ in failed] == failing, (
            text,
            [(lines[n], e) for n, e in {*failed} ^ {*right[1]}],
        )
        for one, other in zip(failed, right[1], strict=True):
            assert one == other or one[0] in refused, (text, lines[one[0]], one, other)
        mine, theirs = described(values), described(right[0])
        assert mine.keys() == theirs.keys(), text
        for name in mine:
            assert mine[name] == theirs[name], (
                f"replica {r}, {name}: {values[name]!r} instead of {right[0][name]!r}\n{text}"
            )
    return True
