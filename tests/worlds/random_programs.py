"""Random programs in worlds of random shares, against the same programs on one instance.

python -m tests.worlds.random_programs COUNT: all instances draw the same COUNT programs.
"""

from __future__ import annotations

import random
import sys
import traceback
from typing import Any

import ml_dtypes
import numpy as np
import optree
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import gpusim
from gpusim.collectives.distributed import algorithms, job, layout
from tests.oracles import programs as ps

ACCUMULATORS = st.sampled_from((None, np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
REDUCTIONS = st.builds(
    dict,
    order=st.sampled_from(("linear", "reverse", "tree", "ring", "exact")),
    accumulate=ACCUMULATORS,
    rounding=st.sampled_from(("nearest", "stochastic")),
    seed=st.sampled_from((0, 2**64 - 1)),
) | st.builds(dict, order=st.sampled_from(("kahan", "neumaier")), accumulate=ACCUMULATORS)
# The outermost axis has a replica at least for each of three instances.
AXES: tuple[ps.Axes, ...] = tuple((("i", size),) for size in (3, 4, 5, 6, 8, 9)) + tuple(
    (("x", x), ("y", y)) for x, y in ((3, 2), (4, 2), (5, 1), (3, 3))
)

SAFE = ("vmap of vmap", "pmap of vmap", "pmap-one of vmap", "shard_map")


def shares(replicas: int, instances: int, chance: random.Random) -> list[int]:
    """How many replicas each instance holds: at least one, otherwise anything."""
    cuts = sorted(chance.sample(range(1, replicas), instances - 1))
    return [end - first for first, end in zip([0, *cuts], [*cuts, replicas], strict=True)]


def choose_ways(chance: random.Random) -> None:
    """Let small arrays go the ways that large ones go, or not."""
    small = chance.random() < 0.7
    algorithms.SMALL = 0 if small else 64 * 1024
    job.BLOCK = 5 if small else 256 * 1024
    layout.LONG_MESSAGE = 8 if chance.random() < 0.5 else 16 * 1024


def part(tree: Any, mapped: Any, rows: slice) -> Any:
    return optree.tree_map(lambda leaf, has: leaf[rows] if has else leaf, tree, mapped)


def check(
    engine: Any, program: ps.Program, how: dict[str, Any], chance: random.Random
) -> tuple[str, bool]:
    """Run a program in a world; what it was, and whether it ended in an error, as it should."""
    choose_ways(chance)
    whole = program.argument()
    with gpusim.reduction(**how):
        reference = ps.outcome(
            lambda: ps.nest((ps.MAPS["vmap"],) * len(program.axes))(program, whole)
        )
    world = gpusim.World(shares(program.sizes[0], engine.instances, chance), engine)
    rows = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    local = part(whole, program.mapped, rows)
    runs = ps.executors(program)
    if reference.error is not None and len(program.axes) > 1:
        # An error in one inner thread ends others while they wait for other instances, and with
        # that the world.
        runs = {name: run for name, run in runs.items() if name in SAFE}
    with world:
        for name in chance.sample(sorted(runs), 3):
            where = f"{name} of {program}, {how}, {world.counts}"
            with gpusim.reduction(**how):
                ours = ps.outcome(lambda run=runs[name]: run(program, local))
            if reference.error is not None or ours.error is not None:
                assert type(ours.error) is type(reference.error), (where, ours, reference)
                continue
            everywhere = optree.tree_map(lambda leaf: leaf[rows], reference.results)
            ps.assert_same_bits(ours.results, everywhere, where)
    return repr(program), reference.error is not None


def main() -> None:
    count = int(sys.argv[1])
    from gpusim.runtime.engines import mpi

    engine = mpi.connect()
    found: list[tuple[str, bool]] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(int(sys.argv[2]))  # the same on every instance
    @given(ps.programs(axes=AXES), REDUCTIONS)
    def agree(program: ps.Program, how: dict[str, Any]) -> None:
        try:
            found.append(check(engine, program, how, random.Random(program.seed)))
        except Exception as error:
            # A world has no second try, which is what hypothesis would report.
            engine.fail(error)
            traceback.print_exc()
            engine.abort(f"gpusim: {program}, {how}")

    agree()
    errors = sum(error for _, error in found)
    assert errors < len(found) / 2
    print(f"{len({text for text, _ in found})} programs agree")


if __name__ == "__main__":
    main()
