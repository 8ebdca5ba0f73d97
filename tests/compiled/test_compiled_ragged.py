"""ragged_all_to_all by the kernel that checks the slices and copies the rows at once."""

from __future__ import annotations

import numpy as np
import pytest

from gpusim.collectives import ragged, ragged_all_to_all
from gpusim.fallback.kernels import chosen
from tests.oracles.ragged_programs import NAMES, random_program, reference


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("per_member", [1, 3])
@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("groups", [None, [[*range(16, -1, -1)], [*range(17, 34)]]])
def test_slices_in_the_order_of_their_senders_need_no_plan(
    monkeypatch, dtype, per_member, gap, groups
):
    """The compiled kernel checks and copies them, 16 receivers at a time and what is left."""
    monkeypatch.setattr(ragged, "plan_slices", None)
    for seed, batch, row in ((0, (), (16,)), (1, (2,), (3,)), (2, (), ())):
        program = random_program(
            np.random.default_rng(seed),
            34,
            groups,
            batch=batch,
            row=row,
            per_member=per_member,
            ordered=True,
            gap=gap,
        )
        for name in ("operand", "output"):
            program.arguments[name] = program.arguments[name].astype(np.float32)
        for name in NAMES[2:]:
            program.arguments[name] = program.arguments[name].astype(dtype)
        with chosen("compiled"):
            value = program.call().value
        np.testing.assert_array_equal(value, reference(program), strict=True)


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize("per_member", [1, 2])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_wrong_number_among_many_is_found(name, per_member, dtype):
    rng = np.random.default_rng(5)
    program = random_program(rng, 34, None, per_member=per_member, ordered=True, gap=0, rows=2)
    most = len(program.arguments["output"][0]), len(program.arguments["operand"][0])
    for number in (-1, max(most) + 1, np.iinfo(dtype).max, np.iinfo(dtype).min):
        for _ in range(10):
            at = tuple(rng.integers(program.arguments[name].shape))
            wrong = program.arguments[name].astype(dtype)
            wrong[at] = number
            indices = {other: program.arguments[other].astype(dtype) for other in NAMES[2:]}
            with chosen("compiled"), pytest.raises(ValueError, match=f"ragged.*{number}"):
                program.call(**{**indices, name: wrong})


@pytest.mark.parametrize("longer", ["operand", "output"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_slice_is_not_longer_than_the_shorter_of_both_arrays(longer, dtype):
    """The last slice that replica 20 receives has one row more than the operand, or the output."""
    program = random_program(np.random.default_rng(6), 34, None, ordered=True, rows=2)
    a = program.arguments
    shorter = {"operand": "output", "output": "operand"}[longer]
    rows = a[shorter].shape[1] + 1
    a[longer] = np.concatenate([a[longer], np.zeros((34, 2 * rows))], axis=1)
    a["send_sizes"][33, 20] = a["recv_sizes"][20, 33] = rows
    indices = {name: a[name].astype(dtype) for name in NAMES[2:]}
    with chosen("compiled"), pytest.raises(ValueError, match=rf"size {rows} ends past"):
        program.call(**indices)


def test_an_empty_slice_does_not_hide_an_overlap(monkeypatch):
    """Replica 0 receives slices of 2, 0 and 1 rows; the empty one lies inside the first."""
    sizes = np.array([[2, 0, 0], [0, 0, 0], [1, 0, 0]])
    starts = np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]])
    a = {"operand": np.ones((3, 2)), "output": np.zeros((3, 3))}
    a |= {"input_offsets": np.zeros((3, 3), int), "send_sizes": sizes}
    a |= {"output_offsets": starts, "recv_sizes": sizes.T}
    with chosen("compiled"):
        with monkeypatch.context() as patch:
            patch.setattr(ragged, "plan_slices", None)
            assert ragged_all_to_all(**a).value.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
        starts[2, 0] = 1
        with pytest.raises(ValueError, match="replica 2, slice 0 writes rows 1:2"):
            ragged_all_to_all(**a)
