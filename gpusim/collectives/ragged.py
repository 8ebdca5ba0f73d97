"""ragged_all_to_all: segments of rows, of any lengths, from every replica to every other."""

from __future__ import annotations

from typing import Any

from ..groups import Groups
from .distributed import ragged as distributed
from .distributed.layout import Layout
from .kernels import kernels
from .operand import Operand, Result
from .ragged_plan import (
    check_arguments,
    check_cotangent,
    plan_slices,
    ragged_plan,
    rest_of_outputs,
)
from .ragged_rows import (
    clear_received,
    copy_of,
    entries_of,
    exchange_at_once,
    new_like,
    send_back,
    zeros_like,
)
from .record import AxisIndexGroups, AxisName, Call, ShapeDtype, collective


def _exchange_rows(
    operand: Operand, output: Operand, *indices: Operand, groups: Groups | None
) -> Result:
    partition = check_arguments(operand, output, indices, groups)
    written = new_like(output)
    if exchange_at_once(written, operand, output, indices, partition):
        return Result(written, True)
    segments = plan_slices(operand, output, indices, partition)
    ragged_copy = kernels(operand.array).ragged_copy
    received = entries_of(written, output)
    ragged_copy(entries_of(output.values, output), received, rest_of_outputs(segments, output))
    ragged_copy(entries_of(operand.values, operand), received, segments)
    return _in_form(written, operand, output)


def _exchange_rows_distributed(
    layout: Layout, operand: Operand, output: Operand, *indices: Operand, groups: Groups | None
) -> Result:
    return Result(distributed.exchange_rows(layout, operand, output, indices, groups), True)


def _output_result(operands: list[ShapeDtype], members: int) -> list[ShapeDtype]:
    return [operands[1]]


@collective(
    local=_exchange_rows,
    distributed=_exchange_rows_distributed,
    result=_output_result,
    operands=6,
    groups="even",
)
def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
) -> Call:
    r"""Send slices of rows of different lengths to each replica of the group.

    With n replicas in the group there are K slices, K a multiple of n; slice i goes to replica
    ``i // (K // n)``. It is ``operand[input_offsets[i]:][:send_sizes[i]]`` and is written on its
    receiver at row ``output_offsets[i]``.

    **Arguments**:

    - `operand`: (N, \*row), the rows to send.
    - `output`: (M, \*row) in the same dtype, the content of rows where nothing is received.
    - `input_offsets`, `send_sizes`: (K,) integers, where each slice begins in `operand`, and its
      number of rows.
    - `output_offsets`: (K,) integers, where each *sent* slice begins in its *receiver's* output.
    - `recv_sizes`: (K,) integers, how many rows are received in each slice from each replica:
      all_to_all of the senders' send_sizes.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `axis_index_groups`: groups of one size, as in `psum`.

    **Returns**: a new array (M, \*row): `output` with the received rows written.

    **Raises**: ValueError, before anything is written, for arguments that are not integers of rank
    1 or do not divide; for slices that leave `operand` or their receiver's `output`, sizes that
    disagree with recv_sizes, and slices that overlap on a receiver. The message names the replica,
    the slice and the numbers.

    Two replicas hold rows 1 to 3 and 4 to 6; each sends its first row to replica 0, the others to
    1.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> def f(rows, start, received):
    ...     output = np.zeros(4, int)
    ...     offsets, sizes = np.array([0, 1]), np.array([1, 2])
    ...     return lax.ragged_all_to_all(
    ...         rows, output, offsets, sizes, start, received, axis_name="i"
    ...     )
    >>> rows = np.array([[1, 2, 3], [4, 5, 6]])
    >>> start = np.array([[0, 0], [1, 2]])  # replica 1's slices follow replica 0's
    >>> received = np.array([[1, 1], [2, 2]])
    >>> gpusim.vmap(f, axis_name="i")(rows, start, received)
    array([[1, 4, 0, 0],
           [2, 3, 5, 6]])
    """
    operands = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    return Call(ragged_all_to_all, operands, axis_name, axis_index_groups)


def _send_rows_back(
    ct: Operand, operand: Operand, output: Operand, *indices: Operand, groups: Groups | None
) -> tuple[Result, Result]:
    segments = ragged_plan(operand, output, indices, groups)
    check_cotangent(ct, output)
    operand_ct, output_ct = zeros_like(ct, operand), copy_of(ct)
    if len(segments):
        send_back(entries_of(ct.values, ct), entries_of(operand_ct, operand), segments, ct)
        clear_received(entries_of(output_ct, output), segments, ct)
    return _in_form(operand_ct, ct), _in_form(output_ct, ct)


def _send_rows_back_distributed(
    layout: Layout,
    ct: Operand,
    operand: Operand,
    output: Operand,
    *indices: Operand,
    groups: Groups | None,
) -> tuple[Result, Result]:
    found = distributed.send_rows_back(layout, ct, operand, output, indices, groups)
    return Result(found[0], True), Result(found[1], True)


def _operands_result(operands: list[ShapeDtype], members: int) -> list[ShapeDtype]:
    return [operands[1], operands[2]]


@collective(
    name="ragged_all_to_all.transpose",
    local=_send_rows_back,
    distributed=_send_rows_back_distributed,
    result=_operands_result,
    operands=7,
    groups="even",
)
def _ragged_all_to_all_transpose(
    ct: Any,
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
) -> Call:
    """The cotangents of operand and output, for the cotangent `ct` of the result.

    The operand's: received slices sent back, zeros in rows that were not sent. Where a sender's
    slices overlap, the rows that come back are added linearly, in the order of the slices. The
    output's: `ct`, zeroed exactly where something was received. Of `operand` and `output` only
    shapes and dtypes matter; checks and errors are those of ragged_all_to_all.
    """
    operands = (ct, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    return Call(_ragged_all_to_all_transpose, operands, axis_name, axis_index_groups)


_ragged_all_to_all_transpose.transpose = ragged_all_to_all
ragged_all_to_all.transpose = _ragged_all_to_all_transpose


def _in_form(values: Any, *operands: Operand) -> Result:
    """A list where one of the operands was a list."""
    return Result(list(values) if any(o.listed for o in operands) else values, True)
