"""Bad input is told what is wrong with it: JAX's type of error, the numbers, and nothing changed.

Each call runs in a thread of its own with a deadline, so that a hang would be a failure here.
"""

from __future__ import annotations

import contextvars
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import lax
from tests.oracles.machine_time import PATIENCE

# No shrinking: it repeats a failure hundreds of times, and one that hangs would take an hour.
WIDELY = settings(
    max_examples=25,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)

Map = Callable[..., Any]


def serial_pmap(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return gpusim.pmap(f, schedule="one", **options)


MAPS: dict[str, Map] = {"vmap": gpusim.vmap, "pmap": gpusim.pmap, "pmap-one": serial_pmap}
everywhere = pytest.mark.parametrize("map_", MAPS.values(), ids=MAPS)


def run_to_end(call: Callable[[], Any]) -> BaseException | None:
    """What the call raises, if anything; it ends, and leaves no thread of gpusim but idle ones."""
    raised: list[BaseException] = []
    before = set(threading.enumerate())

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the call hangs"
    left = {t for t in threading.enumerate() if t.name.startswith("gpusim")} - before
    assert not left, f"threads left behind: {left}"
    return raised[0] if raised else None


def assert_refused(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    map_: Map,
    f: Callable[..., Any],
    *arrays: Any,
    says: Any = (),
    **options: Any,
) -> BaseException:
    """Mapping ``f`` raises ``kind``, the message has all of ``says``, and arrays are unchanged."""
    copies = [np.array(array) for array in arrays]
    options.setdefault("axis_name", "i")
    error = run_to_end(lambda: map_(f, **options)(*arrays))
    assert isinstance(error, kind), f"expected {kind}, got {error!r}"
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert np.asarray(array).flags.writeable
    message = str(error)
    for word in says if isinstance(says, (list, tuple)) else (says,):
        assert contains(message, word), f"{word!r} is missing in: {message}"
    return error


def contains(message: str, word: Any) -> bool:
    """Whether the message has the word, or the number by itself (12 does not have a 2)."""
    if isinstance(word, int):
        return re.search(rf"(?<![\w.]){word}(?![\w]|\.\d)", message) is not None
    return str(word) in message


def rows(replicas: int, *shape: int) -> np.ndarray:
    return np.arange(replicas * int(np.prod(shape)), dtype=np.float32).reshape(replicas, *shape)


# --- names -------------------------------------------------------------------------------------

INDEX = np.zeros(4, np.int32)
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda x, name: lax.psum(x, name),
    "pmean": lambda x, name: lax.pmean(x, name),
    "pmax": lambda x, name: lax.pmax(x, name),
    "pmin": lambda x, name: lax.pmin(x, name),
    "pargmax": lambda x, name: lax.pargmax(x, name),
    "pargmin": lambda x, name: lax.pargmin(x, name),
    "pbroadcast": lambda x, name: lax.pbroadcast(x, name, 0),
    "ppermute": lambda x, name: lax.ppermute(x, name, [(0, 1)]),
    "pshuffle": lambda x, name: lax.pshuffle(x, name, [1, 0, 2, 3]),
    "pswapaxes": lambda x, name: lax.pswapaxes(x, name, 0),
    "all_gather": lambda x, name: lax.all_gather(x, name),
    "all_to_all": lambda x, name: lax.all_to_all(x, name, 0, 0),
    "psum_scatter": lambda x, name: lax.psum_scatter(x, name),
    "ragged_all_to_all": lambda x, name: lax.ragged_all_to_all(
        x, x, INDEX, INDEX, INDEX, INDEX, axis_name=name
    ),
    "axis_index": lambda x, name: lax.axis_index(name),
    "axis_size": lambda x, name: lax.axis_size(name),
    "pgather": lambda x, name: lax.pgather(x, np.int32(0), name),
    "psum of a constant": lambda x, name: lax.psum(1, name),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@everywhere
@each_call
def test_an_unbound_name_is_a_name_error(call: Any, map_: Map) -> None:
    assert_refused(NameError, map_, lambda x: call(x, "nowhere"), rows(4, 4), says="nowhere")


@each_call
def test_outside_any_map_every_name_is_unbound(call: Any) -> None:
    error = run_to_end(lambda: call(rows(4, 4), "i"))
    assert isinstance(error, NameError)
    assert "'i'" in str(error) or "name: i" in str(error)


@everywhere
def test_a_tuple_with_one_unbound_name_is_a_name_error(map_: Map) -> None:
    assert_refused(
        NameError, map_, lambda x: lax.psum(x, ("i", "nowhere")), rows(4, 4), says="nowhere"
    )


@everywhere
def test_an_inner_name_is_unbound_outside_its_map(map_: Map) -> None:
    def f(x: Any) -> Any:
        inner = map_(lambda row: row * 2, axis_name="inner")(x)
        return lax.psum(inner, "inner")

    assert_refused(NameError, map_, f, rows(3, 2, 2), says="inner")


@everywhere
def test_a_name_given_twice_is_refused(map_: Map) -> None:
    assert_refused(ValueError, map_, lambda x: lax.psum(x, ("i", "i")), rows(4, 4), says="i")


@everywhere
@pytest.mark.parametrize("function", [lax.pargmax, lax.pargmin])
def test_the_arg_extremes_take_one_name(function: Any, map_: Map) -> None:
    assert_refused(TypeError, map_, lambda x: function(x, ("i",)), rows(4))


# --- groups ------------------------------------------------------------------------------------

GROUPED: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda x, g: lax.psum(x, "i", axis_index_groups=g),
    "pmean": lambda x, g: lax.pmean(x, "i", axis_index_groups=g),
    "pmax": lambda x, g: lax.pmax(x, "i", axis_index_groups=g),
    "pmin": lambda x, g: lax.pmin(x, "i", axis_index_groups=g),
    "all_gather": lambda x, g: lax.all_gather(x, "i", axis_index_groups=g),
    "all_to_all": lambda x, g: lax.all_to_all(x, "i", 0, 0, axis_index_groups=g, tiled=True),
    "psum_scatter": lambda x, g: lax.psum_scatter(x, "i", axis_index_groups=g, tiled=True),
    "pswapaxes": lambda x, g: lax.pswapaxes(x[: len(g[0])], "i", 0, axis_index_groups=g),
    "ragged_all_to_all": lambda x, g: lax.ragged_all_to_all(
        x, x, INDEX, INDEX, INDEX, INDEX, axis_name="i", axis_index_groups=g
    ),
}
each_grouped = pytest.mark.parametrize("call", GROUPED.values(), ids=GROUPED)

partitions = st.permutations(range(4)).flatmap(
    lambda order: st.sampled_from(
        [[order], [order[:2], order[2:]], [[k] for k in order], [order[:1], order[1:]]]
    )
)


@everywhere
@each_grouped
def test_groups_that_are_no_partition_are_refused(call: Any, map_: Map) -> None:
    @WIDELY
    @given(
        partitions,
        st.integers(0, 3),
        st.sampled_from(("overlap", "missing", "beyond", "negative")),
    )
    def refused(groups: list[list[int]], member: int, fault: str) -> None:
        replaced = {"overlap": (member + 1) % 4, "beyond": member + 4, "negative": member - 4}
        groups = [
            [replaced.get(fault, k) if k == member else k for k in group]
            for group in groups
            if fault != "missing" or group != [member]
        ]
        if fault == "missing":
            groups = [[k for k in group if k != member] for group in groups]
        number = replaced.get(fault, member)
        assert_refused(ValueError, map_, lambda x: call(x, groups), rows(4, 12), says=number)

    refused()


@everywhere
@pytest.mark.parametrize("call", list(GROUPED.values())[4:], ids=list(GROUPED)[4:])
def test_groups_of_unequal_size_serve_reductions_only(call: Any, map_: Map) -> None:
    groups = [[0, 1, 2], [3]]
    error = assert_refused(ValueError, map_, lambda x: call(x, groups), rows(4, 12))
    assert contains(str(error), 3) or contains(str(error), 1) or str(groups) in str(error)


@everywhere
@pytest.mark.parametrize("function", [lax.psum, lax.pmax, lax.pmin])
def test_groups_and_positional_axes_exclude_each_other(function: Any, map_: Map) -> None:
    def f(x: Any) -> Any:
        return function(x, ("i", 0), axis_index_groups=[[0, 1], [2, 3]])

    assert_refused(ValueError, map_, f, rows(4, 4))


# --- members: sources and destinations ---------------------------------------------------------


@everywhere
def test_a_source_out_of_range_is_an_index_error(map_: Map) -> None:
    @WIDELY
    @given(st.one_of(st.integers(4, 10**6), st.integers(-(10**6), -5)))
    def refused(source: int) -> None:
        for call in (
            lambda x: lax.pbroadcast(x, "i", source),
            lambda x: lax.ppermute(x, "i", [(source, 0)]),
            lambda x: lax.ppermute(x, "i", [(0, source)]),
        ):
            error = assert_refused(IndexError, map_, call, rows(4, 2), says=source)
            assert contains(str(error), 4) or contains(str(error), 3)  # the size, or the last

    refused()


@everywhere
def test_a_source_or_destination_given_twice_is_refused(map_: Map) -> None:
    @WIDELY
    @given(st.permutations(range(4)), st.integers(0, 3), st.booleans(), st.booleans())
    def refused(order: list[int], twice: int, is_source: bool, negative: bool) -> None:
        again = twice - 4 if negative else twice
        pairs = [(order[0], twice), (order[1], again)]
        if is_source:
            pairs = [(b, a) for a, b in pairs]
        assert_refused(
            ValueError, map_, lambda x: lax.ppermute(x, "i", pairs), rows(4, 2), says=twice
        )

    refused()


@everywhere
@pytest.mark.parametrize("perm", [[0, 0, 1, 2], [1, 2, 3, 4], [0, 1, 3], [-1, 0, 1, 2]], ids=str)
def test_pshuffle_takes_permutations_only(perm: list[int], map_: Map) -> None:
    assert_refused(
        ValueError, map_, lambda x: lax.pshuffle(x, "i", perm), rows(4, 2), says=str(perm)
    )


@everywhere
@pytest.mark.parametrize("perm", [[(0, 1, 2)], [(0,)]], ids=str)
def test_ppermute_takes_pairs_only(perm: Any, map_: Map) -> None:
    assert_refused(ValueError, map_, lambda x: lax.ppermute(x, "i", perm), rows(4, 2))


@everywhere
@pytest.mark.parametrize("end", [0.5, "0", None], ids=repr)
def test_members_are_integers(end: Any, map_: Map) -> None:
    for call in (
        lambda x: lax.ppermute(x, "i", [(end, 1)]),
        lambda x: lax.ppermute(x, "i", [(1, end)]),
        lambda x: lax.pbroadcast(x, "i", end),
    ):
        assert_refused(TypeError, map_, call, rows(4, 2))


# --- shapes and axes ---------------------------------------------------------------------------


@everywhere
def test_a_dimension_that_does_not_divide_is_refused(map_: Map) -> None:
    @WIDELY
    @given(st.integers(2, 6), st.integers(0, 13), st.integers(0, 1))
    def refused(replicas: int, length: int, axis: int) -> None:
        shape = (length, 2) if axis == 0 else (2, length)
        x = rows(replicas, *shape)
        says = (length, replicas)
        if length != replicas:
            for call in (
                lambda x: lax.psum_scatter(x, "i", scatter_dimension=axis),
                lambda x: lax.all_to_all(x, "i", axis, 0),
                lambda x: lax.pswapaxes(x, "i", axis),
            ):
                assert_refused(ValueError, map_, call, x, says=says)
        if length % replicas:
            for call in (
                lambda x: lax.psum_scatter(x, "i", scatter_dimension=axis, tiled=True),
                lambda x: lax.all_to_all(x, "i", axis, 1 - axis, tiled=True),
            ):
                assert_refused(ValueError, map_, call, x, says=says)

    refused()


# numpy's AxisError is both a ValueError and an IndexError, as JAX is here and there.
AXIS_CALLS: dict[str, Callable[[Any, int], Any]] = {
    "all_gather": lambda x, axis: lax.all_gather(x, "i", axis=axis),
    "all_gather tiled": lambda x, axis: lax.all_gather(x, "i", axis=axis, tiled=True),
    "psum_scatter": lambda x, axis: lax.psum_scatter(x, "i", scatter_dimension=axis),
    "psum_scatter tiled": lambda x, axis: lax.psum_scatter(
        x, "i", scatter_dimension=axis, tiled=True
    ),
    "all_to_all split": lambda x, axis: lax.all_to_all(x, "i", axis, 0),
    "all_to_all concat": lambda x, axis: lax.all_to_all(x, "i", 0, axis),
    "all_to_all tiled concat": lambda x, axis: lax.all_to_all(x, "i", 0, axis, tiled=True),
    "pswapaxes": lambda x, axis: lax.pswapaxes(x, "i", axis),
    "psum": lambda x, axis: lax.psum(x, ("i", axis)),
    "pmax": lambda x, axis: lax.pmax(x, ("i", axis)),
}


@everywhere
@pytest.mark.parametrize("axis", [3, 7, -4, -9])
@pytest.mark.parametrize("call", AXIS_CALLS.values(), ids=AXIS_CALLS)
def test_an_axis_out_of_range_is_refused(call: Any, axis: int, map_: Map) -> None:
    error = assert_refused(ValueError, map_, lambda x: call(x, axis), rows(4, 4, 4))
    assert contains(str(error), axis) or contains(str(error), 2)


@everywhere
@pytest.mark.parametrize("name", ["all_gather tiled", "psum_scatter", "all_to_all split", "psum"])
def test_a_scalar_has_no_axis(name: str, map_: Map) -> None:
    assert_refused(ValueError, map_, lambda x: AXIS_CALLS[name](x, 0), rows(4))


@everywhere
@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all split", "pswapaxes"])
def test_axes_are_integers(name: str, map_: Map) -> None:
    assert_refused(TypeError, map_, lambda x: AXIS_CALLS[name](x, 0.5), rows(4, 4, 4))


@everywhere
def test_booleans_are_not_scattered(map_: Map) -> None:
    assert_refused(TypeError, map_, lambda x: lax.psum_scatter(x > 3, "i"), rows(4, 4), says="bool")


@everywhere
@pytest.mark.parametrize("value", ["text", object()], ids=["str", "object"])
@pytest.mark.parametrize("function", [lax.psum, lax.pmax, lax.all_gather])
def test_only_arrays_are_sent(function: Any, value: Any, map_: Map) -> None:
    assert_refused(TypeError, map_, lambda x: function(value, "i"), rows(4))


# --- ragged_all_to_all -------------------------------------------------------------------------


def ragged(replicas: int, slices: int, rng: np.random.Generator) -> list[np.ndarray]:
    """A valid call: every replica sends ``slices`` slices to each, one row at least in each."""
    count = replicas * slices
    sizes = rng.integers(1, 4, (replicas, count)).astype(np.int32)
    landing, received = np.zeros_like(sizes), np.zeros_like(sizes)
    for receiver in range(replicas):
        start = 0
        for sender in range(replicas):
            for k in range(slices):
                mine, theirs = receiver * slices + k, sender * slices + k
                landing[sender, mine] = start
                received[receiver, theirs] = sizes[sender, mine]
                start += sizes[sender, mine]
    offsets = (np.cumsum(sizes, axis=1) - sizes).astype(np.int32)
    operand = rng.standard_normal((replicas, int(sizes.sum(axis=1).max()), 2))
    rows_ = int((landing + sizes).max())
    return [operand, np.zeros((replicas, rows_, 2)), offsets, sizes, landing, received]


def exchange(*arguments: Any) -> Any:
    return lax.ragged_all_to_all(*arguments, axis_name="i")


NAMES = ("operand", "output", "input_offsets", "send_sizes", "output_offsets", "recv_sizes")
plans = st.tuples(st.integers(2, 4), st.integers(1, 2), st.integers(0, 99))


@everywhere
@pytest.mark.parametrize("which", [2, 3, 4, 5], ids=NAMES[2:])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "complex64"])
def test_offsets_and_sizes_are_integers(dtype: str, which: int, map_: Map) -> None:
    arguments = ragged(2, 1, np.random.default_rng(0))
    arguments[which] = arguments[which].astype(dtype)
    assert_refused(ValueError, map_, exchange, *arguments, says=(NAMES[which], dtype))


@everywhere
@pytest.mark.parametrize("which", [2, 3, 4, 5], ids=NAMES[2:])
@pytest.mark.parametrize("shape", [(), (2, 2), (0,)], ids=str)
def test_offsets_and_sizes_have_one_axis(shape: Any, which: int, map_: Map) -> None:
    arguments = ragged(2, 1, np.random.default_rng(0))
    arguments[which] = np.zeros((2, *shape), np.int32)
    assert_refused(ValueError, map_, exchange, *arguments, says=NAMES[which])


@everywhere
def test_the_number_of_slices_is_divisible_by_the_size_of_the_axis(map_: Map) -> None:
    arguments = ragged(3, 2, np.random.default_rng(0))
    arguments[2:] = [array[:, :5] for array in arguments[2:]]
    arguments[2:] = [np.ascontiguousarray(array) for array in arguments[2:]]
    assert_refused(ValueError, map_, exchange, *arguments, says=(5, 3))


@everywhere
@pytest.mark.parametrize("which", [2, 3, 4, 5], ids=NAMES[2:])
def test_offsets_and_sizes_have_equal_lengths(which: int, map_: Map) -> None:
    arguments = ragged(2, 2, np.random.default_rng(0))
    arguments[which] = np.ascontiguousarray(arguments[which][:, :2])
    assert_refused(ValueError, map_, exchange, *arguments, says=(4, 2))


@everywhere
def test_operand_and_output_have_equal_rows_and_dtypes(map_: Map) -> None:
    for wrong in (np.zeros((2, 9, 3)), np.zeros((2, 9)), np.zeros((2, 9, 2), np.float32)):
        arguments = ragged(2, 1, np.random.default_rng(0))
        arguments[1] = wrong
        error = run_to_end(lambda given=arguments: map_(exchange, axis_name="i")(*given))
        assert isinstance(error, (ValueError, TypeError)), wrong.shape


@everywhere
def test_slices_that_leave_their_arrays_are_refused(map_: Map) -> None:
    @WIDELY
    @given(plans, st.data())
    def refused(plan: tuple[int, int, int], data: Any) -> None:
        replicas, slices, seed = plan
        arguments = ragged(replicas, slices, np.random.default_rng(seed))
        operand, output, offsets, sizes, landing, _ = arguments
        replica = data.draw(st.integers(0, replicas - 1), "replica")
        k = data.draw(st.integers(0, replicas * slices - 1), "slice")
        array, limit = data.draw(
            st.sampled_from(((offsets, operand.shape[1]), (landing, output.shape[1]))), "array"
        )
        past = limit - int(sizes[replica, k]) + 1
        number = data.draw(st.sampled_from((past, past + 1000, 2**31 - 1, -1, -5)), "number")
        array[replica, k] = number
        assert_refused(ValueError, map_, exchange, *arguments, says=(replica, k, number))

    refused()


@everywhere
def test_negative_sizes_are_refused(map_: Map) -> None:
    for which, number in ((3, -1), (5, -2)):
        arguments = ragged(3, 1, np.random.default_rng(1))
        arguments[which][1, 2] = number
        assert_refused(ValueError, map_, exchange, *arguments, says=(number, 1, 2))


@everywhere
def test_sends_that_disagree_with_receives_are_refused(map_: Map) -> None:
    @WIDELY
    @given(plans, st.data())
    def refused(plan: tuple[int, int, int], data: Any) -> None:
        replicas, slices, seed = plan
        arguments = ragged(replicas, slices, np.random.default_rng(seed))
        received = arguments[5]
        replica = data.draw(st.integers(0, replicas - 1), "replica")
        k = data.draw(st.integers(0, replicas * slices - 1), "slice")
        sent = int(received[replica, k])
        received[replica, k] = sent - 1
        error = assert_refused(ValueError, map_, exchange, *arguments, says=(sent, sent - 1))
        assert contains(str(error), replica)

    refused()


@everywhere
def test_slices_that_overlap_on_a_receiver_are_refused(map_: Map) -> None:
    @WIDELY
    @given(plans, st.data())
    def refused(plan: tuple[int, int, int], data: Any) -> None:
        replicas, slices, seed = plan
        arguments = ragged(replicas, slices, np.random.default_rng(seed))
        landing = arguments[4]
        receiver = data.draw(st.integers(0, replicas - 1), "receiver")
        # The second slice that lands there lands on the last row of the first.
        incoming = sorted(
            (int(landing[sender, receiver * slices + k]), sender, receiver * slices + k)
            for sender in range(replicas)
            for k in range(slices)
        )
        start, sender, k = incoming[1]
        landing[sender, k] = start - 1
        assert_refused(ValueError, map_, exchange, *arguments, says=(receiver, start - 1))

    refused()


@everywhere
def test_a_refused_exchange_writes_nothing(map_: Map) -> None:
    arguments = ragged(2, 2, np.random.default_rng(2))
    arguments[4][1, 3] = 10**6  # the last slice of all: the others would have been written
    seen: list[Any] = []

    def f(operand: Any, output: Any, *rest: Any) -> Any:
        try:
            return exchange(operand, output, *rest)
        finally:
            seen.append(np.array(output.sum() if map_ is not gpusim.vmap else 0.0))

    assert_refused(ValueError, map_, f, *arguments)
    assert all(total == 0 for total in seen)


# --- trees and replicas that differ ------------------------------------------------------------


@pytest.mark.parametrize("map_", [gpusim.pmap, serial_pmap], ids=["pmap", "pmap-one"])
def test_replicas_that_send_different_trees_are_a_mismatch(map_: Map) -> None:
    trees: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (lambda x: [x, x], lambda x: [x]),
        (lambda x: x, lambda x: (x,)),
        (lambda x: x, lambda x: x[:1]),
        (lambda x: x, lambda x: x.astype(np.float64)),
    ]
    for one, other in trees:

        def f(x: Any, one: Any = one, other: Any = other) -> Any:
            return lax.psum(other(x) if lax.axis_index("i") == 2 else one(x), "i")

        assert_refused(
            gpusim.CollectiveMismatchError,
            map_,
            f,
            rows(4, 2),
            says=("psum", 2, "test_bad_input.py"),
        )


@pytest.mark.parametrize("map_", [gpusim.pmap, serial_pmap], ids=["pmap", "pmap-one"])
def test_replicas_that_return_different_trees_are_refused(map_: Map) -> None:
    for one, other in (
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (lambda x: (x, x), lambda x: x),
        (lambda x: x, lambda x: x[:1]),
        (lambda x: x, lambda x: x.astype(np.float64)),
        (lambda x: x, lambda x: None),
    ):

        def f(x: Any, one: Any = one, other: Any = other) -> Any:
            return other(x) if lax.axis_index("i") == 1 else one(x)

        assert_refused(ValueError, map_, f, rows(3, 2), says=1)


@pytest.mark.parametrize("map_", [gpusim.pmap, serial_pmap], ids=["pmap", "pmap-one"])
@pytest.mark.parametrize("leaver", [0, 1, 3])
def test_a_replica_that_returns_early_is_a_deadlock_at_once(leaver: int, map_: Map) -> None:
    def f(x: Any) -> Any:
        return x if lax.axis_index("i") == leaver else lax.psum(x, "i")

    assert_refused(gpusim.DeadlockError, map_, f, rows(4, 2), says=("psum", leaver))


@pytest.mark.parametrize("map_", [gpusim.pmap, serial_pmap], ids=["pmap", "pmap-one"])
def test_a_replica_that_raises_ends_the_others(map_: Map) -> None:
    def f(x: Any) -> Any:
        if lax.axis_index("i") == 2:
            raise ZeroDivisionError("in the program")
        return lax.psum(x, "i")

    error = assert_refused(gpusim.ReplicaError, map_, f, rows(4, 2), says=2)
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("map_", [gpusim.pmap, serial_pmap], ids=["pmap", "pmap-one"])
def test_an_error_of_one_replica_names_it_in_a_note(map_: Map) -> None:
    def f(x: Any) -> Any:
        return lax.psum(x, "nowhere") if lax.axis_index("i") == 2 else x

    error = assert_refused(NameError, map_, f, rows(4, 2), says="nowhere")
    assert any(contains(note, 2) for note in getattr(error, "__notes__", ()))


# --- the maps themselves -----------------------------------------------------------------------


def identity(*arguments: Any) -> Any:
    return arguments[0]


@everywhere
@pytest.mark.parametrize("axes", ["a", 0.5, True, ("a",), (0.5,), np.float32(1)], ids=repr)
@pytest.mark.parametrize("which", ["in_axes", "out_axes"])
def test_axes_of_a_map_are_integers_or_none(which: str, axes: Any, map_: Map) -> None:
    assert_refused(TypeError, map_, identity, rows(3, 2), says=which, **{which: axes})


@everywhere
@pytest.mark.parametrize("axis", [2, 5, -3])
def test_an_in_axis_out_of_range_is_refused(axis: int, map_: Map) -> None:
    assert_refused(ValueError, map_, identity, rows(3, 2), says=axis, in_axes=axis)


@everywhere
def test_a_scalar_cannot_be_mapped(map_: Map) -> None:
    error = run_to_end(lambda: map_(identity, axis_name="i")(np.float32(1)))
    assert isinstance(error, ValueError)


@everywhere
@pytest.mark.parametrize("axis", [2, -3])
def test_an_out_axis_out_of_range_is_refused(axis: int, map_: Map) -> None:
    assert_refused(ValueError, map_, identity, rows(3, 2), says=axis, out_axes=axis)


@everywhere
def test_sizes_that_differ_are_refused_with_both_numbers(map_: Map) -> None:
    @WIDELY
    @given(st.integers(1, 9), st.integers(1, 9))
    def refused(one: int, other: int) -> None:
        if one != other:
            assert_refused(
                ValueError, map_, identity, rows(one, 2), rows(other, 2), says=(one, other)
            )
            assert_refused(
                ValueError, map_, identity, rows(one, 2), says=(one, other), axis_size=other
            )

    refused()


@everywhere
def test_nothing_to_map_is_refused(map_: Map) -> None:
    assert_refused(ValueError, map_, identity, rows(3, 2), in_axes=None)
    error = run_to_end(lambda: map_(lambda: 1, axis_name="i")())
    assert isinstance(error, ValueError)


@everywhere
@pytest.mark.parametrize(
    "argument, in_axes",
    [
        ({"a": 1}, ({"b": 0},)),
        ({"a": 1}, ((0,),)),
        ([1, 1], ((0, 0),)),
        ((1, 1), ((0, 0, 0),)),
        (1, (0, 0)),
        (1, ({"a": 0},)),
    ],
    ids=str,
)
def test_in_axes_are_a_prefix_of_the_arguments(argument: Any, in_axes: Any, map_: Map) -> None:
    import optree

    tree = optree.tree_map(lambda _: rows(3, 2), argument)
    error = run_to_end(lambda: map_(identity, axis_name="i", in_axes=in_axes)(tree))
    assert isinstance(error, ValueError)
    assert "in_axes" in str(error)


@everywhere
@pytest.mark.parametrize(
    "f, out_axes",
    [
        (lambda x: x, (0, 0)),
        (lambda x: (x, x), (0, 0, 0)),
        (lambda x: {"a": x}, {"b": 0}),
        (lambda x: [x, x], (0, 0)),
    ],
    ids=["leaf", "tuple", "dict", "list"],
)
def test_out_axes_are_a_prefix_of_the_results(f: Any, out_axes: Any, map_: Map) -> None:
    assert_refused(ValueError, map_, f, rows(3, 2), says="out_axes", out_axes=out_axes)


@everywhere
def test_out_axes_none_demands_a_value_that_does_not_differ(map_: Map) -> None:
    assert_refused(ValueError, map_, identity, rows(3, 2), says="out_axes", out_axes=None)


@everywhere
@pytest.mark.parametrize("result", ["text", object()], ids=["str", "object"])
def test_results_are_arrays(result: Any, map_: Map) -> None:
    assert_refused(TypeError, map_, lambda x: result, rows(3, 2))


@everywhere
def test_a_map_takes_a_callable(map_: Map) -> None:
    error = run_to_end(lambda: map_(3, axis_name="i")(rows(3, 2)))
    assert isinstance(error, TypeError)


# --- the reduction argument --------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"op": "average"},
        {"order": "random"},
        {"rounding": "up"},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_a_reduction_that_there_is_not_is_a_value_error(fault: dict[str, Any]) -> None:
    (value,) = fault.values()
    with pytest.raises(ValueError, match=re.escape(str(value))):
        gpusim.Reduction(**fault)


@everywhere
@pytest.mark.parametrize("function", [lax.psum, lax.pmean, lax.psum_scatter])
def test_the_reduction_argument_is_a_reduction(function: Any, map_: Map) -> None:
    assert_refused(TypeError, map_, lambda x: function(x, "i", reduction=3), rows(4, 4))
