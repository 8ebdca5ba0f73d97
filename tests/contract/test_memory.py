"""Large results take memory that earlier ones have given back, and never memory in use."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import gpusim
from gpusim import fallback, lax
from gpusim.fallback import memory
from tests.oracles.machine_time import PATIENCE

LARGE = (memory.SMALLEST // 4 + 1,)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Start with nothing kept, and leave nothing behind."""
    before = memory.keep_at_most(0)
    memory.keep_at_most(1 << 28)
    yield
    memory.keep_at_most(0)
    memory.keep_at_most(before)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_the_last_view_of_it_has_gone() -> None:
    first = memory.empty(LARGE, np.float32)
    place, view = address(first), first[5:].reshape(-1)[::2]
    del first
    other = memory.empty(LARGE, np.float32)
    assert address(other) != place  # the view still reads the first
    del view
    assert address(memory.empty(LARGE, np.float32)) == place


def test_any_shape_and_dtype_of_nearly_the_same_size_is_served() -> None:
    place = address(memory.empty((4, *LARGE), np.float32))
    smaller = memory.empty((LARGE[0] * 9 // 10, 4, 2), np.float16)
    assert address(smaller) == place
    assert smaller.flags.c_contiguous and smaller.flags.writeable and smaller.flags.aligned
    del smaller
    assert address(memory.empty((2, *LARGE), np.float32)) != place  # half of it would lie idle


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 1 << 30), (7, 5)])
def test_small_arrays_are_numpys_own(shape: tuple[int, ...]) -> None:
    array = memory.empty(shape, np.int8)
    assert array.shape == shape and array.flags.owndata


def test_no_more_is_kept_than_is_allowed_and_the_oldest_goes_first() -> None:
    size = 4 * LARGE[0]
    memory.keep_at_most(2 * size)
    held = [memory.empty(LARGE, np.float32) for _ in range(3)]
    places = [address(array) for array in held]
    while held:
        del held[0]
    assert [block.nbytes for block in memory._free_list.free] == [size, size]
    assert [address(block) for block in memory._free_list.free] == places[1:]
    memory.keep_at_most(0)
    assert not memory._free_list.free
    memory.empty(LARGE, np.float32)
    assert not memory._free_list.free and not memory._free_list.returned


def test_arrays_may_die_while_their_thread_holds_the_lock() -> None:
    array = memory.empty(LARGE, np.float32)
    with memory._free_list.lock:
        del array
        assert len(memory._free_list.returned) == 1
    memory._free_list.trim()
    assert len(memory._free_list.free) == 1 and not memory._free_list.returned


def test_threads_never_share_memory() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(200):
            array = memory.empty(LARGE, np.int32)
            array[::4096] = number * 1000 + turn
            if not (array[::4096] == number * 1000 + turn).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_that_are_held_are_never_overwritten() -> None:
    x = np.arange(8 * LARGE[0], dtype=np.float32).reshape(8, -1)
    turn = gpusim.vmap(
        lambda v: lax.ppermute(v, "i", [(i, (i + 3) % 8) for i in range(8)]), axis_name="i"
    )
    shifted = [turn(x * factor) for factor in range(1, 4)]
    gc.collect()
    for factor, result in enumerate(shifted, 1):
        np.testing.assert_array_equal(result, np.roll(x * factor, 3, axis=0))
        np.testing.assert_array_equal(
            fallback.fold(result), fallback.fold(np.roll(x * factor, 3, 0))
        )


def in_a_process_of_its_own(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_the_environment_says_how_much_is_kept() -> None:
    program = "from fallback import memory; print(memory.default_limit())"
    assert in_a_process_of_its_own(program, GPUSIM_KEEP_MIB="3").stdout == f"{3 << 20}\n"
    assert in_a_process_of_its_own(program, GPUSIM_KEEP_MIB="0").stdout == "0\n"
    wrong = in_a_process_of_its_own(program, GPUSIM_KEEP_MIB="much")
    assert "GPUSIM_KEEP_MIB='much': expected a number of mebibytes" in wrong.stderr


def test_a_forked_child_keeps_memory_of_its_own() -> None:
    program = """
import os
from gpusim.fallback import memory
shape = (memory.SMALLEST,)
held, gone = memory.empty(shape, "f4"), memory.empty(shape, "f4")
held[:], gone[:] = 1, 2
del gone
with memory._free_list.lock:
    child = os.fork()
    if not child:
        mine = memory.empty(shape, "f4")
        mine[:] = 3
        os._exit(0 if (held == 1).all() else 1)
assert os.waitpid(child, 0)[1] == 0 and (held == 1).all()
"""
    done = in_a_process_of_its_own(program)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_nothing_is_said_at_the_end_of_the_interpreter() -> None:
    program = (
        "from fallback import memory; kept = [memory.empty((1 << 20,), 'f4') for _ in range(3)]"
    )
    done = in_a_process_of_its_own(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
