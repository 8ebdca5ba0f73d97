"""Programs in which one instance goes wrong, in the ways that programs do.

python -m tests.worlds.faults FAULT [WHERE]: instance WHERE (the last one, if not given) commits it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.runtime import reaper

Steps = Callable[[], None]
STOPS = "GPUSIM_TEST_STOPS"  # set where the test continues the launcher that a fault has stopped

FAULTS: dict[str, Callable[[gpusim.World, bool], None]] = {}
#: Those in which all goes well in the end.
PATIENT = ("a late start", "a stop", "the same errors, caught", "a mismatch, caught by all")


def fault(name: str) -> Callable[[Any], Any]:
    def register(program: Any) -> Any:
        FAULTS[name] = program
        return program

    return register


def step(world: gpusim.World, size: int = 3, dtype: Any = np.float32) -> Any:
    x = np.ones((world.local_replicas, size), dtype)
    return gpusim.vmap(lambda v: lax.psum(v, "i"), axis_name="i")(x)


def steps(world: gpusim.World, count: int = 10**7) -> None:
    """Many collectives: what the others wait in."""
    for _ in range(count):
        step(world)
        time.sleep(0.001)


def in_vmap(world: gpusim.World, f: Callable[[Any], Any], size: int = 6) -> None:
    gpusim.vmap(f, axis_name="i")(np.ones((world.local_replicas, size), np.float32))


# --- instances that end -------------------------------------------------------------------------


def stop_launcher() -> None:
    """Stop mpirun, if the test continues it later.

    It ends the others a quarter of a second after an instance, on a busy machine before they speak.
    """
    if STOPS in os.environ:
        os.kill(reaper.launcher_of(os.getpid()), signal.SIGSTOP)


@fault("SIGKILL")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            stop_launcher()
            os.kill(os.getpid(), signal.SIGKILL)
        steps(world)


@fault("SIGKILL while others compute")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            stop_launcher()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(7200)  # what waits for this hangs


@fault("segfault")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            stop_launcher()
            ctypes.string_at(0)
        steps(world)


@fault("os._exit(0)")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        if guilty:
            stop_launcher()
            os._exit(0)
        steps(world)


@fault("os._exit(3)")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        if guilty:
            stop_launcher()
            os._exit(3)
        steps(world)


@fault("return from the block")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if not guilty:
            step(world)


@fault("the end of the program")
def _(world: gpusim.World, guilty: bool) -> None:
    if not guilty:
        with world:
            step(world)


@fault("sys.exit(0)")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        if guilty:
            sys.exit(0)
        steps(world)


@fault("sys.exit(3)")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        if guilty:
            sys.exit(3)
        steps(world)


@fault("sys.exit(3) before")
def _(world: gpusim.World, guilty: bool) -> None:
    if guilty:
        sys.exit(3)
    with world:
        steps(world)


# --- instances that raise -----------------------------------------------------------------------


@fault("an error")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            raise ValueError("no good")
        steps(world)


@fault("an error, late")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            time.sleep(1)
            raise ValueError("no good")
        steps(world)


@fault("an error while others compute")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            raise ValueError("no good")
        time.sleep(7200)  # what waits for this hangs


@fault("an error before the block")
def _(world: gpusim.World, guilty: bool) -> None:
    if guilty:
        raise ValueError("no good")
    with world:
        steps(world)


@fault("an error after the block")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
    if guilty:
        raise ValueError("no good")
    with world:
        steps(world)


@fault("an error in a map")
def _(world: gpusim.World, guilty: bool) -> None:
    def f(v: Any) -> Any:
        total = lax.psum(v, "i")
        if guilty:
            raise ValueError("no good")
        return lax.psum(total, "i")

    with world:
        in_vmap(world, f)


@fault("an error in a thread")
def _(world: gpusim.World, guilty: bool) -> None:
    def f(v: Any) -> Any:
        total = lax.psum(v, "i")
        if guilty and lax.axis_index("i") == world.replica_offset:
            raise ValueError("no good")
        return lax.psum(total, "i")

    with world:
        gpusim.pmap(f, "i")(np.ones((world.local_replicas, 2)))


@fault("an error in a thread of threads")
def _(world: gpusim.World, guilty: bool) -> None:
    """The other threads of the guilty instance wait for other instances meanwhile."""

    def inner(v: Any) -> Any:
        if guilty and lax.axis_index("j") == 3:
            time.sleep(0.5)
            raise ValueError("no good")
        return lax.psum(v, "i")

    def f(v: Any) -> Any:
        if not guilty:
            time.sleep(7200)  # what waits for this hangs
        return gpusim.pmap(inner, "j")(v)

    with world:
        gpusim.pmap(f, "i")(np.ones((world.local_replicas, 5)))


@fault("one thread that does not call")
def _(world: gpusim.World, guilty: bool) -> None:
    """The others' thread waits for this one, whose instance goes on to the next collective."""

    def inner(v: Any) -> Any:
        return v if guilty and lax.axis_index("j") == 3 else lax.psum(v, "i")

    def f(v: Any) -> Any:
        return lax.psum(gpusim.pmap(inner, "j")(v), "i")

    with world:
        gpusim.pmap(f, "i")(np.ones((world.local_replicas, 5)))


@fault("an error in a pending exchange")
def _(world: gpusim.World, guilty: bool) -> None:
    """The kernel fails between sending and receiving; the program catches that, and goes on."""
    from gpusim.collectives.distributed import algorithms, job

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    algorithms.SMALL = 0
    fold = job.DistributedFold.fold
    with world:
        x = np.ones((world.local_replicas, 40_000), np.float32)
        if guilty:
            job.DistributedFold.fold = fail
        try:
            gpusim.vmap(lambda v: lax.psum(v, "i"), axis_name="i")(x)
        except MemoryError:
            job.DistributedFold.fold = fold
        while True:
            gpusim.vmap(lambda v: lax.psum(v, "i"), axis_name="i")(x)


# --- instances that call something else ----------------------------------------------------------


@fault("another collective")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        in_vmap(world, lambda v: lax.pmax(v, "i") if guilty else lax.psum(v, "i"))


@fault("another shape")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world, 4 if guilty else 3)


@fault("another dtype")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world, dtype=np.float16 if guilty else np.float32)


@fault("another reduction")
def _(world: gpusim.World, guilty: bool) -> None:
    with world, gpusim.reduction(order="ring" if guilty else "tree"):
        step(world)


@fault("another permutation")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        in_vmap(world, lambda v: lax.ppermute(v, "i", [(0, 1)] if guilty else [(1, 0)]))


@fault("other groups")
def _(world: gpusim.World, guilty: bool) -> None:
    everybody = list(range(world.replicas))
    groups = [everybody[::-1]] if guilty else [everybody]
    with world:
        in_vmap(world, lambda v: lax.psum(v, "i", axis_index_groups=groups))


@fault("one collective more")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        step(world)
        if guilty:
            step(world)


@fault("another value of what all share")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        in_vmap(world, lambda v: v[:3] + lax.psum(np.float32([guilty, 0, 0]), "i"))


# --- signals from outside, and programs without a fault -------------------------------------------


@fault("endless")
def _(world: gpusim.World, guilty: bool) -> None:
    """For tests that interrupt and kill: prints the process ids."""
    with world:
        step(world)
        print(f"pid {world.instance} {os.getpid()}", flush=True)
        steps(world)


@fault("endless threads")
def _(world: gpusim.World, guilty: bool) -> None:
    def inner(v: Any) -> Any:
        for _ in range(10**7):
            v = lax.pmean(v, "i")
        return v

    with world:
        step(world)
        print(f"pid {world.instance} {os.getpid()}", flush=True)
        x = np.ones((world.local_replicas, 3))
        gpusim.pmap(lambda v: gpusim.pmap(inner, "j")(v), "i")(x)


@fault("threads that wait")
def _(world: gpusim.World, guilty: bool) -> None:
    """Ctrl-C comes to replicas that wait for an instance that does not come."""
    with world:
        step(world)
        print(f"pid {world.instance} {os.getpid()}", flush=True)
        if guilty:
            time.sleep(7200)  # what waits for this hangs
        gpusim.pmap(lambda v: lax.psum(v, "i"), "i")(np.ones(world.local_replicas))


@fault("a late start")
def _(world: gpusim.World, guilty: bool) -> None:
    if guilty:
        time.sleep(5)
    with world:
        step(world)


@fault("a stop")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        for number in range(300):
            step(world)
            if guilty and number == 100:
                if not os.fork():  # as a debugger does
                    time.sleep(4)
                    os.kill(os.getppid(), signal.SIGCONT)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGSTOP)


@fault("the same errors, caught")
def _(world: gpusim.World, guilty: bool) -> None:
    try:
        with world:
            step(world)
            raise ValueError("no good")
    except ValueError:
        time.sleep(0.2)
    try:
        with world:
            raise AssertionError("it has ended")
    except gpusim.GpusimError as error:
        assert "has ended with an error" in str(error)


@fault("a mismatch, caught by all")
def _(world: gpusim.World, guilty: bool) -> None:
    with world:
        try:
            step(world, 3 + guilty)
            raise AssertionError("the shapes differ")
        except gpusim.CollectiveMismatchError:
            pass
        try:
            step(world)
            raise AssertionError("it has ended")
        except gpusim.GpusimError as error:
            assert "has ended with an error" in str(error)


def main() -> None:
    name = sys.argv[1]
    if name == "no MPI at all":
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            return
        gpusim.World.from_environment()
    elif name == "an import error":
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise ImportError("no such thing")
        gpusim.World.from_environment()
    else:
        launched = gpusim.World.from_environment(2 * int(os.environ["OMPI_COMM_WORLD_SIZE"]))
        where = int(sys.argv[2]) if len(sys.argv) > 2 else launched.instances - 1
        FAULTS[name](launched, launched.instance == where)
    print("went on to the end", flush=True)


if __name__ == "__main__":
    main()
