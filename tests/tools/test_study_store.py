"""The store of a sweep: what is written stays, and a sweep that is resumed is the same sweep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gpusim.study import sweep
from gpusim.tools.study import planning, windows
from gpusim.tools.study.store import Store

OPTIONS: dict[str, Any] = {"replicas": [2, 8], "seeds": [0, 1], "elements": 200, "threads": 1}


def interrupted(path: Path, after: int, **options: Any) -> None:
    """A sweep that Ctrl-C ends after so many measurements."""
    put, calls = Store.put, 0

    def counted(store: Store, *arguments: Any) -> None:
        nonlocal calls
        if calls == after:
            raise KeyboardInterrupt
        calls += 1
        put(store, *arguments)

    with mock.patch.object(Store, "put", counted), pytest.raises(KeyboardInterrupt):
        sweep("normal", store=path, **{**OPTIONS, **options})


@pytest.mark.parametrize("after", [0, 1, 7, 17])
def test_a_resumed_sweep_equals_one_that_was_never_interrupted(after: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with mock.patch.object(planning, "WINDOW", 8 * 2 * 104):
        expected = sweep("normal", store=whole, **OPTIONS)
        interrupted(broken, after)
        assert len(broken.read_bytes().splitlines()) == 1 + after
        found = sweep("normal", store=broken, resume=True, **OPTIONS)
    assert found.measurements == expected.measurements
    assert broken.read_bytes() == whole.read_bytes()


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    expected = sweep("normal", store=tmp_path / "s", **OPTIONS)
    with mock.patch.object(windows, "fold", side_effect=AssertionError):
        assert sweep("normal", store=tmp_path / "s", resume=True, **OPTIONS).rows == expected.rows


def test_a_resumed_sweep_may_ask_for_more(tmp_path: Path) -> None:
    sweep("normal", store=tmp_path / "s", **OPTIONS)
    more = {**OPTIONS, "replicas": [2, 8, 16], "seeds": [1, 2]}
    found = sweep("normal", store=tmp_path / "s", resume=True, **more)
    assert found.measurements == sweep("normal", **more).measurements


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    expected = sweep("normal", store=path, **OPTIONS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert sweep("normal", store=path, resume=True, **OPTIONS).rows == expected.rows
    assert path.read_bytes() == whole


def test_a_store_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="is not the store of a sweep"):
        sweep("normal", store=path, **OPTIONS)
    assert path.read_text() == "precious"
    path.unlink()
    sweep("normal", store=path, **OPTIONS)
    said = r"holds a sweep already, of gpusim study --input normal .*: go on with it .* delete"
    with pytest.raises(FileExistsError, match=said):
        sweep("normal", store=path, **OPTIONS)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("precious", "is not the store of a sweep"),
        ("precious\n", "line 1: not a line of a sweep's store"),
        ("[1]\n", "line 1: not a line of a sweep's store"),
        ('{"gpusim study": 99}\n', "not the store of a sweep of this version"),
        ('{"gpusim study": 1, "input": {}}\n', "of this version, 3, but of 1: remove it"),
        ('{"gpusim study": 3, "input": {"kind": "cauchy"}}\n', "another input: its kind 'cauchy'"),
    ],
)
def test_what_is_no_store_of_this_input_is_refused_and_kept(
    content: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        sweep("normal", store=path, resume=True, **OPTIONS)
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"replicas": 2}'])
def test_a_spoiled_line_is_named_and_kept(line: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    sweep("normal", store=path, **OPTIONS)
    content = path.read_text().splitlines(keepends=True)
    spoiled = "".join([*content[:3], line + "\n", *content[3:]])
    path.write_text(spoiled)
    with pytest.raises(ValueError, match="line 4"):
        sweep("normal", store=path, resume=True, **OPTIONS)
    assert path.read_text() == spoiled


def test_another_scale_or_seed_is_another_input(tmp_path: Path) -> None:
    sweep("normal", store=tmp_path / "s", **OPTIONS)
    with pytest.raises(ValueError, match=r"its scale 1\.0, not 2\.0"):
        sweep("normal", store=tmp_path / "s", resume=True, scale=2, **OPTIONS)
    with pytest.raises(ValueError, match="its seed 0, not 5"):
        sweep("normal", store=tmp_path / "s", resume=True, input_seed=5, **OPTIONS)


def test_another_array_is_another_input(tmp_path: Path) -> None:
    x = np.arange(6.0).reshape(2, 3)
    sweep(x, store=tmp_path / "s")
    sweep(x.copy(order="F"), store=tmp_path / "s", resume=True)
    with pytest.raises(ValueError, match="another input: its digest"):
        sweep(x + 1, store=tmp_path / "s", resume=True)


def test_two_sweeps_do_not_write_one_store(tmp_path: Path) -> None:
    planned = planning.plan("normal", elements=8)
    with Store(planned.identity, tmp_path / "s"):
        with pytest.raises(BlockingIOError, match="in use"):
            Store(planned.identity, tmp_path / "s", resume=True)


def test_an_input_that_fails_leaves_no_store(tmp_path: Path) -> None:
    """Also where windows before the one with the NaN were measured."""
    x = np.ones((8, 300))
    x[5, 280] = np.nan
    path = tmp_path / "s"
    with mock.patch.object(planning, "WINDOW", 8 * 2 * 104):
        with pytest.raises(ValueError, match="element 280 of replica 5 is nan; a study needs"):
            sweep(x, replicas=[2, 8], store=path)
        assert list(tmp_path.iterdir()) == []
        sweep(x, replicas=[2], store=path)
        kept = path.read_bytes()
        with pytest.raises(ValueError, match="replica 5 is nan"):
            sweep(x, replicas=[2, 8], store=path, resume=True)
    assert path.read_bytes()[: len(kept)] == kept  # the user's own store stays
    assert sweep(x, replicas=[2], store=path, resume=True).rows


@pytest.mark.parametrize("errors", ["null", "[]", '["a", 1, 2]', "[1, 2]"])
def test_a_spoiled_histogram_is_named(errors: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    sweep("normal", store=path, **OPTIONS)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = re.sub(r'"errors": \[.*?\]', f'"errors": {errors}', lines[1])
    path.write_text("".join(lines))
    with pytest.raises(ValueError, match="line 2: errors: expected a list of integers"):
        sweep("normal", store=path, resume=True, **OPTIONS)


def test_a_store_holds_sums_and_means(tmp_path: Path) -> None:
    sums = sweep("normal", store=tmp_path / "s", **OPTIONS)
    both = sweep("normal", store=tmp_path / "s", resume=True, ops="sum,mean", **OPTIONS)
    assert [row for row in both.rows if row.setting.op == "sum"] == sums.rows
    assert len(both.rows) == 2 * len(sums.rows)
