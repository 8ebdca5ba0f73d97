"""Outputs of studies: artefacts that are marked, DataFrames in and out, and axes of one's own."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusim import as_reduction, optional
from gpusim.study import ArtefactWarning, Study, sweep
from gpusim.tools import cli
from gpusim.tools.study import picture, table
from gpusim.tools.study.frames import is_frame
from gpusim.tools.study.sources import open_sources
from gpusim.tools.study.traffic import traffic_of
from tests.tools.test_study_pictures import points

HOW: dict[str, Any] = {"roundings": "nearest", "dtypes": "float32"}
SHORT = "--input lognormal --elements 256 --order ring --wire none,int8:amax:64 --rounding nearest"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Artefacts


@pytest.mark.parametrize(
    ("reduction", "members", "elements", "shortest", "more"),
    [
        ("ring wire=int8:amax:64", 64, 4096, None, False),
        ("ring wire=int8:amax:64", 65, 4096, 63, False),
        ("ring wire=int8:amax:64", 2048, 4096, 2, False),
        ("ring wire=int8:amax:64", 4096, 4096, 1, True),
        ("ring wire=int8:amax:64", 4096, 100, 1, True),  # most of the messages are empty
        ("ring wire=int8:amax:64@ends", 1000, 4097, 4, False),
        ("tree wire=int8:amax:64", 4096, 4096, None, False),
        ("tree wire=int8:amax:64", 4096, 50, 50, False),
        ("tree wire=int8:amax:64", 1, 50, None, False),  # nothing is sent
        ("ring wire=int8:amax", 1024, 4096, None, False),  # no number of elements is named
        ("ring wire=bfloat16", 4096, 4096, None, False),
        ("ring wire=float64", 4, 100, None, True),
        ("ring wire=nvfp4", 512, 4096, 8, False),
        ("ring wire=mx:float8_e4m3fn", 8, 255, 31, False),
        ("ring groups_of=8 across ring wire=int8:amax:64", 64, 4096, None, False),
        ("ring groups_of=8 across ring wire=int8:amax:64", 128, 4096, 32, False),
        ("ring groups_of=8 wire=int8:amax:64 across tree", 4096, 4096, None, False),
    ],
)
def test_short_blocks_and_more_bytes_are_known(
    reduction: str, members: int, elements: int, shortest: int | None, more: bool
) -> None:
    found = traffic_of(as_reduction(reduction), members, elements, "float32")
    assert (found.shortest, found.more_bytes) == (shortest, more)
    assert found.short_blocks == (shortest is not None)
    assert len(found.problems) == found.short_blocks + more


def test_an_artefact_is_said_once_and_marked_everywhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--csv", "a.csv", "--json", "a.json", "--plot", "a.svg", "--report", "a.html"]
    replicas = ["--replicas", "2..256", "--dtype", "float32"]
    assert cli.main(["study", *SHORT.split(), *replicas, *files]) == 0
    shown = capsys.readouterr()
    said = [line for line in shown.err.splitlines() if "artefact" in line]
    assert len(said) == 1
    assert said[0].startswith("gpusim study: 6 of 16 rows are artefacts of short messages")
    assert "at 256 replicas: messages of 1 element are shorter than the wire's blocks" in said[0]
    assert "sends 1.25 times the bytes of unrounded values" in said[0]
    lines = [line for line in shown.out.splitlines() if "float32 added" in line]
    rows = [line for line in lines if "e-" in line]
    assert [line.count("*") for line in rows] == [0, 0, 0, 0] + 6 * [0, 1]
    assert sum(line.startswith("* float32 added in") for line in lines) == 1
    with open(folder / "a.csv", newline="") as file:
        written = list(csv.DictReader(file))
    marked = [(int(row["replicas"]), row["shortest_message"]) for row in written if row["wire"]]
    assert marked == [(2, ""), (4, ""), *((n, str(256 // n)) for n in (8, 16, 32, 64, 128, 256))]
    assert [row["short_blocks"] for row in written] == [
        str(bool(row["shortest_message"])) for row in written
    ]
    assert [row["more_bytes"] for row in written] == ["False"] * 15 + ["True"]
    assert float(written[-1]["bytes_sent"]) > float(written[-1]["bytes_unrounded"])
    found = json.loads((folder / "a.json").read_text())["rows"]
    assert [len(row["problems"]) for row in found] == [0] * 4 + [0, 1] * 5 + [0, 2]
    for name in ("a.svg", "a.html"):
        assert "ringed: messages shorter" in (folder / name).read_text() or name == "a.html"
    assert "an artefact at 8, 16, 32, 64, 128, 256 replicas" in (folder / "a.html").read_text()


def test_python_warns_once_and_only_of_artefacts() -> None:
    how: dict[str, Any] = {**HOW, "orders": "ring", "elements": 64}
    with pytest.warns(ArtefactWarning, match="2 of 4 rows are artefacts") as caught:
        found = sweep("normal", wires="none,int8:amax:64", replicas=[2, 32], **how)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [bool(row.problems) for row in found.rows] == [False, True] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = sweep("normal", wires="none,int8:amax:2", replicas=[2, 32], **how)
    assert clean.problems == []


@pytest.mark.filterwarnings("ignore::gpusim.study.ArtefactWarning")
@pytest.mark.parametrize("replicas", [[4, 32], [32]])
@pytest.mark.parametrize("against", ["replicas", "bytes"])
def test_marks_of_artefacts_are_ringed(replicas: list[int], against: str) -> None:
    how: dict[str, Any] = {**HOW, "orders": "ring", "elements": 64, "replicas": replicas}
    rings = []
    for block in (2, 16):
        study = sweep("normal", wires=f"none,int8:amax:{block}", **how)
        drawn = picture.trade_off if against == "bytes" else picture.drawn
        with drawn(study, "relative_error") as figure:
            axes = figure.axes[0]
            marks = [line for line in axes.get_lines() if line.get_markersize() == 10]
            rings.append(sum(len(line.get_xdata()) for line in marks))
            texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
            assert (picture.RINGED in texts) == (block == 16)
    assert rings == [0, 1]


def test_arrays_of_one_file_are_flagged_alone(folder: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 600)).astype(np.float32)
    given = {"long": x, "short": x[:, :40].copy()}
    with pytest.warns(ArtefactWarning):
        study = sweep(given, replicas=8, orders="ring", wires="int8:amax:16", **HOW)
    assert {row.tensor: row.traffic.shortest for row in study.rows} == {
        None: 5,
        "long": None,
        "short": 5,
    }


# DataFrames


@pytest.fixture
def study() -> Study:
    return sweep("normal", elements=30, replicas=[2, 5], dtypes="float16", seeds=[0, 1])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_rows_are_a_frame(library: str, study: Study, folder: Path) -> None:
    pytest.importorskip(library)
    frame = study.to_frame(library)
    with open(study.to_csv(folder / "a.csv"), newline="") as file:
        written = list(csv.DictReader(file))
    assert list(frame.columns) == list(written[0]) and frame.shape[0] == len(written)
    assert [float(row["relative_error"]) for row in written] == frame["relative_error"].to_list()
    assert frame["replicas"].to_list() == [row.replicas for row in study.rows]
    assert str(frame["relative_error"].dtype).lower() == "float64"
    assert frame["order"].to_list() == [row["order"] for row in written]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_is_an_input(library: str) -> None:
    frames = pytest.importorskip(library)
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    columns = {f"c{k}": x[:, k] for k in range(4)}
    frame = frames.DataFrame(columns)
    assert is_frame(frame)
    how: dict[str, Any] = {"replicas": 6, "orders": "tree", "roundings": "nearest"}
    assert sweep(frame, **how).rows == sweep(x, **how).rows
    assert sweep({"a": frame}, **how).rows == sweep(x, **how).rows
    third = 1 / 3
    columns_of_objects = {"a": [third, 2.0], "b": [1.0, third]}
    objects = frames.DataFrame(columns_of_objects)
    if library == "pandas":
        objects = objects.astype(object)
    (source,) = open_sources(objects).values()
    assert source.block(2, range(2), 0, 2).tolist() == [[third, 1], [2, third]]
    mixed = frames.DataFrame({**columns, "name": list("abcdef"), "other": [None] * 6})
    with pytest.raises(ValueError, match="columns without numbers, or with missing ones: name"):
        sweep(mixed, **how)


def test_a_library_that_is_missing_is_named(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    for library in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, library, None)
        said = f"a DataFrame of {library} needs {library}: pip install {library}"
        with pytest.raises(ModuleNotFoundError, match=said):
            study.to_frame(library)
    with pytest.raises(ValueError, match="library='dask': expected one of pandas, polars"):
        study.to_frame("dask")


# Axes


@pytest.mark.parametrize("replicas", [[2, 5], [5]])
def test_a_study_is_drawn_into_axes(replicas: list[int], folder: Path) -> None:
    from matplotlib.figure import Figure

    study = sweep("normal", elements=30, replicas=replicas, dtypes="float16", seeds=[0, 1])
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert study.plot(ax=left) is left and study.plot(ax=right, metric="correct") is right
    for axes, metric in ((left, "relative_error"), (right, "correct")):
        drawn = {value for x, y, *_ in points(axes) for value in (x, y)}
        for row in study.rows:
            assert getattr(row.mean, metric) in drawn
        labels = axes.get_legend_handles_labels()[1]
        assert labels == [setting.name for setting in study.settings]
        assert axes.get_title() == "" and axes.get_legend() is None
    assert figure.legends == [] and list(folder.iterdir()) == []
    figure.savefig(folder / "a.png")
    bytes_axes = Figure().subplots()
    assert study.plot(ax=bytes_axes, against="bytes") is bytes_axes
    assert bytes_axes.get_xlabel() == "bytes that each replica sends"


def test_a_plot_has_a_path_or_axes(study: Study, folder: Path) -> None:
    from matplotlib.figure import Figure

    plot: Any = study.plot
    for arguments in ((), (folder / "a.svg", "bias", "replicas")):
        axes = {"ax": Figure().subplots()} if arguments else {}
        with pytest.raises(ValueError, match="expected either a path or ax="):
            plot(*arguments, **axes)
    with pytest.raises(ValueError, match="metric='mood'"):
        plot(ax=Figure().subplots(), metric="mood")


# The table


def test_the_default_columns_are_defined_where_sums_cancel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Elements of the exact sum 0: relative errors and ulp have no size there."""
    x = np.random.default_rng(0).standard_normal((64, 200))
    x = np.concatenate([x, -x[::-1]])
    study = sweep(x, replicas=128, dtypes="float32", orders="ring", roundings="nearest")
    assert study.rows[0].mean.max_ulp > 1e30
    study.show()
    shown = capsys.readouterr().out
    assert "e+" not in shown and "ulp" not in shown
    for name in ("backward_p50", "backward_p99", "backward_max"):
        assert name in table.MAIN and 0 < getattr(study.rows[0].mean, name) < 127 * 2**-24


def test_the_error_over_the_magnitudes_has_its_known_bound() -> None:
    """At most gamma = n u / (1 - n u), for n additions one after the other; at large values too."""
    for scale in (1.0, 2.0**1000):
        x = np.random.default_rng(1).standard_normal((100, 300)) * scale
        x[50:] = -x[:50] * (1 + 2.0**-20)
        study = sweep(x, replicas=100, dtypes="float64", orders="linear", roundings="nearest")
        gamma = 99 * 2.0**-53 / (1 - 99 * 2.0**-53)
        assert 0 < study.rows[0].mean.backward_p50 < study.rows[0].mean.backward_max <= gamma
        if scale == 1.0:
            small = study.rows[0].mean
    assert study.rows[0].mean.backward_max == small.backward_max
    x = np.full((8, 3), 1.7e308)
    x[::2] *= -1
    (row,) = sweep(x, replicas=8, dtypes="float64", orders="linear", roundings="nearest").rows
    assert (row.mean.backward_max, row.mean.overflowed) == (0.0, 0.0)
