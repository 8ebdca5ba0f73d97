"""ragged_all_to_all against JAX's pseudocode in plain Python: results, adjoint, and every check."""

from __future__ import annotations

from sys import getrefcount

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import compiled
from gpusim.collectives import ragged_all_to_all
from gpusim.collectives.ragged_plan import RECEIVER, ROWS, WRITTEN_TO, overlapping
from gpusim.fallback import fold
from gpusim.fallback.kernels import chosen
from tests.oracles.ragged_programs import NAMES, Program, random_program, reference

Array = np.ndarray
SETS = st.sampled_from(["numpy"] if compiled.problem() else ["numpy", "compiled"])
GROUPS = {
    1: [None],
    2: [None, [[0], [1]], [[1, 0]]],
    3: [None, [[2, 0, 1]]],
    4: [None, [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0], [1], [2], [3]]],
    6: [None, [[0, 2, 4], [5, 3, 1]], [[0, 1], [5, 2], [3, 4]]],
}


@st.composite
def programs(draw: st.DrawFn, **fixed) -> Program:
    size = draw(st.sampled_from(sorted(GROUPS)))
    return random_program(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        size,
        draw(st.sampled_from(GROUPS[size])),
        batch=tuple(draw(st.lists(st.integers(1, 2), max_size=2))),
        row=tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        per_member=draw(st.integers(1, 3)),
        rows=draw(st.integers(0, 4)),
        ordered=draw(st.booleans()),
        **fixed,
    )


# What it computes


def test_jaxs_worked_example():
    result = ragged_all_to_all(
        np.array([[1, 2, 2], [3, 4, 0]]),
        np.zeros((2, 4), int),
        np.array([[0, 1], [0, 1]]),
        np.array([[1, 2], [1, 1]]),
        np.array([[0, 0], [1, 2]]),
        np.array([[1, 1], [2, 1]]),
    )
    assert result.mapped and result.value.tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from(["stacked", "list"]), SETS)
def test_rows_arrive_as_in_the_pseudocode(program, form, kernels):
    before = {name: x.copy() for name, x in program.arguments.items()}
    with chosen(kernels):
        value, mapped = program.call(form=form)
    assert mapped and isinstance(value, list) == (form == "list")
    np.testing.assert_array_equal(np.stack(value), reference(program), strict=True)
    for name, x in program.arguments.items():
        np.testing.assert_array_equal(x, before[name])
        assert not any(np.shares_memory(part, x) for part in value)
    assert all(part.flags.writeable for part in value)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_offsets_may_have_every_integer_type(dtype):
    program = random_program(np.random.default_rng(1), 3, None, per_member=2)
    indices = {name: program.arguments[name].astype(dtype) for name in NAMES[2:]}
    np.testing.assert_array_equal(program.call(**indices).value, reference(program))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, ml_dtypes.bfloat16, np.complex64, "S3"])
def test_rows_of_every_dtype_are_copied_not_computed_with(dtype):
    program = random_program(np.random.default_rng(2), 4, None, row=(2,))
    for name in ("operand", "output"):
        program.arguments[name] = program.arguments[name].astype(dtype)
    value = program.call().value
    assert value.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(value, reference(program))


def test_rows_of_python_objects_are_held_by_the_result():
    program = random_program(np.random.default_rng(2), 4, None, ordered=True)
    one, other = object(), object()
    a = program.arguments
    a["operand"] = np.full_like(a["operand"], one, dtype=object)
    a["output"] = np.full_like(a["output"], other, dtype=object)
    held = getrefcount(one) + getrefcount(other)
    value = program.call().value
    np.testing.assert_array_equal(value, reference(program))
    assert getrefcount(one) + getrefcount(other) == held + value.size


def test_operands_may_be_the_same_on_all_replicas():
    rng = np.random.default_rng(3)
    rows, zeros = rng.integers(1, 9, (4, 2)), np.zeros((6, 2), int)
    indices = [np.arange(3), np.ones(3, int), None, np.ones(3, int)]
    same = [np.broadcast_to(x, (3, *x.shape)) for x in (rows, zeros)]
    stacked = [None if i is None else np.broadcast_to(i, (3, 3)) for i in indices]
    stacked[2] = np.broadcast_to(np.arange(3)[:, None], (3, 3))  # sender r writes row r
    expected = np.zeros((3, 6, 2), int)
    expected[:, :3] = rows[:3][:, None]
    np.testing.assert_array_equal(ragged_all_to_all(*same, *stacked).value, expected)
    as_lists = ragged_all_to_all([rows] * 3, [zeros] * 3, *map(list, stacked)).value
    np.testing.assert_array_equal(np.stack(as_lists), expected)
    assert as_lists[0] is not as_lists[1]


def test_indices_may_be_a_stacked_array_where_data_are_a_list():
    program = random_program(np.random.default_rng(4), 4, [[3, 1], [0, 2]])
    lists = {name: list(program.arguments[name]) for name in ("operand", "output")}
    value = program.call(**lists).value
    assert isinstance(value, list)
    np.testing.assert_array_equal(np.stack(value), reference(program))


@pytest.mark.parametrize(("sent", "received"), [(0, 0), (0, 3), (3, 0)])
def test_arrays_without_rows_are_exchanged(sent, received):
    zeros = np.zeros((2, 4), int)
    result = ragged_all_to_all(
        np.ones((2, sent, 5)), np.full((2, received, 5), 7.0), zeros, zeros, zeros, zeros
    )
    np.testing.assert_array_equal(result.value, np.full((2, received, 5), 7.0))


def test_an_empty_batch_gives_an_empty_result():
    value = ragged_all_to_all(
        np.ones((2, 0, 3)), np.ones((2, 0, 4)), *[np.zeros((2, 0, 2), int)] * 4, batch_ndim=1
    ).value
    assert value.shape == (2, 0, 4)


def test_empty_slices_may_sit_at_the_very_end_and_inside_others():
    value = ragged_all_to_all(
        np.array([[1, 2], [3, 4]]),
        np.zeros((2, 2), int),
        np.array([[0, 2], [1, 0]]),
        np.array([[2, 0], [0, 2]]),
        np.array([[0, 2], [1, 0]]),
        np.array([[2, 0], [0, 2]]),
    ).value
    assert value.tolist() == [[1, 2], [3, 4]]


# Its transpose


def transposed(program: Program, ct: Array, form: str = "stacked") -> tuple[Array, Array]:
    operand_ct, output_ct = program.call(ragged_all_to_all.transpose, ct, form=form)
    assert operand_ct.mapped and output_ct.mapped
    return np.stack(operand_ct.value), np.stack(output_ct.value)


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from(["stacked", "list"]), st.integers(0, 99))
def test_inner_products_are_equal(program, form, seed):
    a = program.arguments
    y = np.random.default_rng(seed).integers(-99, 99, a["output"].shape).astype(float)
    before = y.copy()
    operand_ct, output_ct = transposed(program, y, form)
    result = np.stack(program.call(form=form).value)
    assert np.vdot(result, y) == np.vdot(a["operand"], operand_ct) + np.vdot(a["output"], output_ct)
    np.testing.assert_array_equal(y, before)


@settings(max_examples=100, deadline=None)
@given(programs(), st.integers(0, 99))
def test_slices_come_back_added_and_received_rows_are_zeroed(program, seed):
    a = program.arguments
    ct = np.random.default_rng(seed).integers(-99, 99, a["output"].shape).astype(float)
    operand_ct, output_ct = np.zeros_like(a["operand"]), ct.copy()
    for b, sender, _, sent, receiver, written in program.sends():
        operand_ct[(sender, *b)][sent] += ct[(receiver, *b)][written]
        output_ct[(receiver, *b)][written] = 0
    actual = transposed(program, ct)
    np.testing.assert_array_equal(actual[0], operand_ct, strict=True)
    np.testing.assert_array_equal(actual[1], output_ct, strict=True)


def test_the_matrix_of_the_transpose_is_the_transposed_matrix():
    program = random_program(np.random.default_rng(8), 2, None, per_member=2, rows=2)
    sizes = [program.arguments[name].size for name in ("operand", "output")]

    def forward(flat: Array) -> Array:
        parts = np.split(flat, [sizes[0]])
        names = ("operand", "output")
        changed = {
            name: part.reshape(program.arguments[name].shape)
            for name, part in zip(names, parts, strict=True)
        }
        return program.call(**changed).value.ravel()

    def backward(flat: Array) -> Array:
        ct = flat.reshape(program.arguments["output"].shape)
        return np.concatenate([part.ravel() for part in transposed(program, ct)])

    there = np.stack([forward(row) for row in np.eye(sum(sizes))], axis=1)
    back = np.stack([backward(row) for row in np.eye(sizes[1])], axis=1)
    np.testing.assert_array_equal(back, there.T)


@settings(max_examples=50, deadline=None)
@given(programs(overlap=False), st.integers(0, 99))
def test_transposing_twice_is_the_original_where_slices_do_not_overlap(program, seed):
    # Without overlaps, sending back is itself a ragged_all_to_all (into zeros), whose transpose
    # sends forth: the rows that arrive are those that the original writes.
    a = program.arguments
    n = program.size if program.groups is None else len(program.groups[0])
    per_member = a["send_sizes"].shape[-1] // n
    reverse = {name: np.zeros_like(a[name]) for name in NAMES[2:]}
    for b, sender, i, sent, receiver, written in program.sends():
        members = next(g for g in program.groups or [list(range(program.size))] if sender in g)
        at = (receiver, *b, members.index(sender) * per_member + i % per_member)
        reverse["input_offsets"][at], reverse["output_offsets"][at] = written.start, sent.start
        reverse["send_sizes"][at] = sent.stop - sent.start
    reverse["recv_sizes"] = a["send_sizes"]
    sending_back = Program(
        {"operand": a["output"], "output": a["operand"], **reverse},
        program.groups,
        program.batch_ndim,
    )
    x = np.random.default_rng(seed).integers(1, 99, a["operand"].shape).astype(float)
    back, _ = transposed(program, program.call(operand=x).value)
    again = sending_back.call(
        operand=program.call(operand=x).value, output=np.zeros_like(a["operand"])
    ).value
    np.testing.assert_array_equal(back, again)
    forth, _ = transposed(sending_back, x)
    np.testing.assert_array_equal(
        forth, program.call(operand=x, output=np.zeros_like(a["output"])).value
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fnuz])
@pytest.mark.parametrize("form", ["stacked", "list"])
def test_repeated_rows_are_folded_linearly_in_the_order_of_the_slices(dtype, form):
    # One row goes to all three replicas, from each to its own place.
    size = 3
    indices = {
        "input_offsets": np.zeros((size, size), int),
        "send_sizes": np.ones((size, size), int),
        "output_offsets": np.tile(np.arange(size)[:, None], (1, size)),
        "recv_sizes": np.ones((size, size), int),
    }
    rng = np.random.default_rng(5)
    ct = (rng.standard_normal((size, size, 50)) * 9).astype(dtype)
    program = Program({"operand": ct[:, :2], "output": ct, **indices}, None, 0)
    operand_ct, _ = transposed(program, ct, form)
    for sender in range(size):
        np.testing.assert_array_equal(operand_ct[sender, 0], fold(list(ct[:, sender])))
    assert not operand_ct[:, 1].astype(float).any()


def test_minus_zero_comes_back_as_minus_zero():
    program = random_program(np.random.default_rng(6), 4, None, per_member=2, rows=3)
    ct = np.full(program.arguments["output"].shape, -0.0)
    operand_ct, output_ct = transposed(program, ct)
    sent = np.zeros(operand_ct.shape, bool)
    for _, sender, _, rows, _, _ in program.sends():
        sent[sender, rows] = True
    np.testing.assert_array_equal(np.signbit(operand_ct), sent)
    assert sent.any() and not np.signbit(reference(program)[output_ct == 1]).any()


def test_a_cotangent_must_be_like_the_output():
    program = random_program(np.random.default_rng(7), 2, None)
    output = program.arguments["output"]
    for ct in (output[:, :-1], output.astype(np.float32), output[:1]):
        with pytest.raises(ValueError, match=r"ct must be like output, float64\[2, .* got float"):
            program.call(ragged_all_to_all.transpose, ct)


# What is refused, before anything is written


def valid() -> dict[str, Array]:
    """Four replicas in two groups, two slices for each member, all of one row."""
    return {
        "operand": np.arange(4.0 * 4 * 2).reshape(4, 4, 2),
        "output": np.zeros((4, 5, 2)),
        "input_offsets": np.tile(np.arange(4), (4, 1)),
        "send_sizes": np.ones((4, 4), int),
        "output_offsets": np.array([[0, 1, 0, 1], [2, 3, 2, 3]] * 2),
        "recv_sizes": np.ones((4, 4), int),
    }


PAIRS = [[0, 1], [2, 3]]


def put(name: str, where: tuple[int, int], number: int, *more) -> dict[str, Array]:
    changed = {name: valid()[name].copy()}
    changed[name][where] = number
    for other, at, value in more:
        changed.setdefault(other, valid()[other].copy())[at] = value
    return changed


def test_the_valid_arguments_are_valid():
    assert ragged_all_to_all(**valid(), groups=PAIRS).mapped


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *(
            ({name: valid()[name].astype(float)}, f"{name} must be of integer type, got float64")
            for name in NAMES[2:]
        ),
        *(({name: np.ones((4, 4), bool)}, f"{name} must be of integer") for name in NAMES[2:]),
        *(({name: np.ones((4, 4, 1), int)}, rf"{name}.*shape \(4, 1\)") for name in NAMES[2:]),
        *(({name: np.ones(4, int)}, rf"{name} must have one axis.*\(\)") for name in NAMES[2:]),
        *(({name: np.ones((4, 0), int)}, rf"{name}.*one slice.*\(0,\)") for name in NAMES[2:]),
        *(({name: np.ones((4, 6), int)}, f"equal, got .*'{name}': 6") for name in NAMES[2:]),
        *(
            ({name: np.ones((3, 4), int)}, rf"{name} has .* \(3,\), operand.*\(4,\)")
            for name in NAMES[2:]
        ),
        ({name: np.ones((4, 3), int) for name in NAMES[2:]}, "2 replicas, got 3 slices"),
        *(
            (put(name, (2, 3), -1), f"{name} must not be negative, got -1 on replica 2, slice 3")
            for name in NAMES[2:]
        ),
        (
            put("send_sizes", (1, 2), 0),
            "replica 1, slice 2 has send_sizes 0, but its receiver, replica 1, has recv_sizes 1 "
            "in slice 2",
        ),
        (
            put("recv_sizes", (3, 1), 5),
            "replica 2, slice 3 has send_sizes 1, but its receiver, replica 3, has recv_sizes 5 "
            "in slice 1",
        ),
        (
            put("input_offsets", (3, 0), 4),
            "slice 0 with input_offsets 4 and size 1 ends past the 4 rows of its operand",
        ),
        (
            put("output_offsets", (2, 3), 5),
            r"replica 2, slice 3 with output_offsets 5 and size 1 ends past the 5 rows of the "
            r"receiver's output \(replica 3\)",
        ),
        (
            put("input_offsets", (0, 0), 5, ("send_sizes", (0, 0), 0), ("recv_sizes", (0, 0), 0)),
            "input_offsets 5 and size 0 ends past the 4 rows",
        ),
        (put("input_offsets", (0, 0), 2**63 - 1), "input_offsets 9223372036854775807 and size 1"),
        (
            put("send_sizes", (0, 0), 2**63 - 1, ("recv_sizes", (0, 0), 2**63 - 1)),
            "size 9223372036854775807 ends past the 4 rows",
        ),
        (
            {"input_offsets": np.full((4, 4), 2**64 - 1, np.uint64)},
            "replica 0, slice 0 with input_offsets .* ends past the 4 rows",
        ),
        (
            put("output_offsets", (1, 0), 1),
            "slices overlap on their receiver, replica 0: replica 0, slice 1 writes rows 1:2, "
            "replica 1, slice 0 writes rows 1:2",
        ),
        (
            put("send_sizes", (3, 2), 2, ("recv_sizes", (3, 2), 2), ("input_offsets", (3, 2), 0)),
            "receiver, replica 3: replica 3, slice 2 writes rows 2:4, "
            "replica 3, slice 3 writes rows 3:4",
        ),
        (
            {"operand": np.zeros((4, 4, 3))},
            r"one shape and dtype, got float64\[3\] and float64\[2\]",
        ),
        ({"operand": np.zeros((4, 4))}, r"got float64\[\] and float64\[2\]"),
        ({"output": np.zeros((4, 5, 2), int)}, r"got float64\[2\] and int64\[2\]"),
        ({"operand": np.zeros(4)}, r"operand must have an axis of rows, got shape \(\)"),
        ({"output": np.zeros(4)}, r"output must have an axis of rows, got shape \(\)"),
        ({"output": np.zeros((3, 5, 2))}, r"output has replica and batch axes \(3,\)"),
    ],
)
@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("transpose", [False, True])
def test_faults_are_errors_that_name_replica_slice_and_numbers(changed, message, form, transpose):
    program = Program({**valid(), **changed}, PAIRS, 0)
    before = {name: x.copy() for name, x in program.arguments.items()}
    with pytest.raises(ValueError, match=message):
        if transpose:
            program.call(ragged_all_to_all.transpose, valid()["output"], form=form)
        else:
            program.call(form=form)
    for name, x in program.arguments.items():
        np.testing.assert_array_equal(x, before[name])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_overlaps_are_found_among_few_and_many_rows(data):
    """With few rows for a slice the slices that cover a row are counted, else they are sorted."""
    size = data.draw(st.integers(1, 4))
    slices = data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 20), st.integers(1, 4)))
    )
    segments = np.zeros((len(slices), 5), np.int64)
    segments[:, [RECEIVER, WRITTEN_TO, ROWS]] = np.reshape(slices, (-1, 3))
    rows = data.draw(st.sampled_from([24, 10_000]))
    covered = [{(r, row) for row in range(first, first + n)} for r, first, n in slices]
    pairs = overlapping(segments, RECEIVER, WRITTEN_TO, rows)
    assert all(covered[one] & covered[other] for one, other in pairs)
    assert bool(len(pairs)) == (sum(map(len, covered)) > len(set().union(*covered)))


def test_faults_in_a_batch_name_its_entry():
    batched = {name: np.stack([x] * 3, axis=1) for name, x in valid().items()}
    batched["input_offsets"][2, 1, 3] = 9
    with pytest.raises(ValueError, match=r"replica 2, slice 3 \(batch entry \(1,\)\) with input"):
        ragged_all_to_all(**batched, groups=PAIRS, batch_ndim=1)


def test_slices_of_different_batch_entries_do_not_overlap():
    batched = {name: np.stack([x] * 3, axis=1) for name, x in valid().items()}
    value = ragged_all_to_all(**batched, groups=PAIRS, batch_ndim=1).value
    np.testing.assert_array_equal(value[:, 2], ragged_all_to_all(**valid(), groups=PAIRS).value)


@pytest.mark.parametrize("groups", [[[0], [1, 2, 3]], [[0, 1]], [[0, 1], [1, 2]]])
def test_groups_are_an_even_partition(groups):
    with pytest.raises(ValueError, match="axis_index_groups must"):
        ragged_all_to_all(**valid(), groups=groups)


@settings(max_examples=200, deadline=None)
@given(programs(), st.sampled_from(NAMES[2:]), SETS, st.data())
def test_a_wrong_number_is_a_value_error_or_a_different_valid_program(program, name, kernels, data):
    indices = program.arguments[name].copy()
    at = tuple(data.draw(st.integers(0, n - 1)) for n in indices.shape)
    indices[at] += data.draw(st.sampled_from([-50, -1, 1, 2, 50]))
    changed = Program({**program.arguments, name: indices}, program.groups, program.batch_ndim)
    before = {other: x.copy() for other, x in changed.arguments.items()}
    try:
        with chosen(kernels):
            value = changed.call().value
    except ValueError as error:
        assert "ragged_all_to_all: " in str(error)
    else:
        np.testing.assert_array_equal(value, reference(changed))
    for other, x in changed.arguments.items():
        np.testing.assert_array_equal(x, before[other])
