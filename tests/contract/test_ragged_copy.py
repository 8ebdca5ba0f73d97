"""ragged_copy: segments of rows, by slices or by indices, against a loop over single rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim.fallback import ragged, ragged_copy


def row_by_row(sources: Any, output: Any, segments: np.ndarray) -> None:
    for source, start, destination, to, rows in segments.tolist():
        for row in range(rows):
            output[destination][to + row] = sources[source][start + row]


def random_segments(random: np.random.Generator, replicas: int, rows: int, most: int) -> np.ndarray:
    """For every destination, pieces that do not overlap, from anywhere, in any order."""
    segments = []
    for destination in range(replicas):
        to = 0
        while to < rows:
            length = int(random.integers(0, min(most, rows - to) + 1))
            start = int(random.integers(0, rows - length + 1))
            segments.append((int(random.integers(replicas)), start, destination, to, length))
            to += length + int(random.integers(1, 3))
    return random.permutation(np.array(segments, np.int64))


@pytest.mark.parametrize("row", [(), (3,), (2, 0), (2, 2)])
@pytest.mark.parametrize("most", [2, 200])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.complex128, bool])
def test_segments_arrive_where_they_are_sent(row: Any, most: int, dtype: Any) -> None:
    random = np.random.default_rng(most)
    sources = random.integers(0, 100, (3, 400, *row)).astype(dtype)
    output = random.integers(0, 100, (3, 400, *row)).astype(dtype)
    segments = random_segments(random, 3, 400, most)
    expected = output.copy()
    row_by_row(sources, expected, segments)
    for given in (sources, list(sources), np.broadcast_to(sources, (2, *sources.shape))[1]):
        for copies in (output.copy(), list(output.copy())):
            ragged_copy(given, copies, segments)
            assert np.array_equal(np.asarray(copies), expected)


def test_short_segments_are_copied_in_several_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "ROWS_AT_ONCE", 7)
    test_segments_arrive_where_they_are_sent((2,), 2, np.float32)


def test_members_of_a_list_may_differ_in_length() -> None:
    sources = [np.arange(3), np.arange(10, 15)]
    output = [np.zeros(6, int), np.zeros(1, int)]
    ragged_copy(sources, output, np.array([[1, 1, 0, 2, 3], [0, 2, 1, 0, 1]]))
    assert [array.tolist() for array in output] == [[0, 0, 11, 12, 13, 0], [2]]


def test_no_segments_and_empty_segments_leave_the_output_alone() -> None:
    output = np.ones((2, 3))
    for segments in (np.zeros((0, 5), np.int64), np.array([[0, 0, 1, 3, 0]])):
        ragged_copy(np.zeros((2, 3)), output, segments)
    assert output.tolist() == [[1, 1, 1], [1, 1, 1]]
