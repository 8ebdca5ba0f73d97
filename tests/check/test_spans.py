"""The memory of tensors as spans: against NumPy's bounds, and element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpusim.torch.distributed.checks.spans import RUNS, is_dense, meet, spans_of
from tests.oracles.budget import budget

DTYPES = [torch.float32, torch.uint8, torch.complex128, torch.bfloat16]
SIZE = 4096


@st.composite
def tensors(draw: Any, storage: Tensor | None = None) -> Tensor:
    """A view of a storage: any shape, strides and offset that fit."""
    dtype = draw(st.sampled_from(DTYPES)) if storage is None else storage.dtype
    if storage is None:
        storage = torch.zeros(SIZE, dtype=dtype)
    dim = draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(0, 4), min_size=dim, max_size=dim))
    strides = draw(st.lists(st.integers(0, 24), min_size=dim, max_size=dim))
    if draw(st.booleans()):  # dense, in any order
        order = draw(st.permutations(range(dim)))
        step = 1
        for place in order:
            strides[place] = step
            step *= max(shape[place], 1)
    return storage.as_strided(shape, strides, draw(st.integers(0, 100)))


def bytes_of(tensor: Tensor) -> set[int]:
    """Every byte of every element, by its address."""
    width = tensor.element_size()
    addresses = np.zeros(tuple(tensor.shape), np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = size
        addresses = addresses + (np.arange(size) * stride * width).reshape(shape)
    starts = addresses.reshape(-1) + tensor.data_ptr()
    return {int(start) + i for start in starts for i in range(width)}


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {address for start, end in spans for address in range(start, end)}


@given(tensors())
@settings(max_examples=budget(2000), deadline=None)
def test_spans_are_the_bytes_of_the_elements(tensor: Tensor) -> None:
    assert covered(spans_of([tensor])) == bytes_of(tensor)


@given(tensors())
@settings(max_examples=budget(500), deadline=None)
def test_first_and_last_byte_are_numpys(tensor: Tensor) -> None:
    if tensor.numel() and tensor.dtype != torch.bfloat16:
        low, high = np.lib.array_utils.byte_bounds(tensor.numpy())
        spans = spans_of([tensor])
        assert (min(a for a, _ in spans), max(b for _, b in spans)) == (low, high)


@given(st.data())
@settings(max_examples=budget(2000), deadline=None)
def test_tensors_meet_that_share_a_byte(data: Any) -> None:
    storage = torch.zeros(SIZE)
    one, other = data.draw(tensors(storage)), data.draw(tensors(storage))
    shared = bool(bytes_of(one) & bytes_of(other))
    assert meet(spans_of([one]), spans_of([other])) == shared
    assert meet(spans_of([other]), spans_of([one])) == shared


@given(
    *(
        st.lists(
            st.tuples(st.integers(0, 400), st.integers(1, 5)).map(lambda x: (x[0], x[0] + x[1])),
            max_size=40,
        )
        for _ in range(2)
    )
)
@settings(max_examples=budget(1000), deadline=None)
def test_many_spans_meet_as_few_do(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    """Many are sorted, few are compared each with each."""
    assert meet(some, others) == bool(covered(some) & covered(others))


@given(tensors())
@settings(max_examples=budget(1000), deadline=None)
def test_dense_tensors_fill_their_memory(tensor: Tensor) -> None:
    addresses = bytes_of(tensor)
    count = tensor.numel() * tensor.element_size()
    fills = not addresses or (
        len(addresses) == count and max(addresses) - min(addresses) + 1 == count
    )
    if tensor.numel():
        starts = tensor.data_ptr() == min(addresses, default=0)
        assert is_dense(tensor) == (fills and starts)
    else:
        assert is_dense(tensor) or tensor.dim()


def test_a_tensor_of_many_pieces_is_one_span() -> None:
    column = torch.zeros(RUNS + 1, 3)[:, 1]
    [(start, end)] = spans_of([column])
    assert start == column.data_ptr() and end == start + 4 * (3 * RUNS + 1)
    assert len(spans_of([torch.zeros(RUNS, 3)[:, 1]])) == RUNS


def test_tensors_without_memory_have_no_spans() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    tensors = [
        torch.zeros(0),
        torch.zeros(3, 0, 2),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.zeros(3, device="meta"),
        fake,
        freed(),
    ]
    assert spans_of(tensors) == []
    assert spans_of([]) == [] and not meet([], [(0, 1)])


def freed() -> Tensor:
    x = torch.zeros(3)
    x.untyped_storage().resize_(0)
    return x


def test_nested_tensors_are_their_storage() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    [(start, end)] = spans_of([nested.transpose(1, 2)])
    assert (start, end - start) == (nested.data_ptr(), 4 * 18)
    assert not is_dense(nested.transpose(1, 2))


def test_formats_of_memory_are_dense() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert is_dense(x.to(memory_format=torch.channels_last)) and is_dense(x.permute(3, 1, 0, 2))
    assert is_dense(torch.zeros(())) and is_dense(torch.zeros(1, 5).t())
    assert not is_dense(x[..., 1:]) and not is_dense(torch.zeros(1).expand(3))
