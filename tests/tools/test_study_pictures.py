"""Pictures and pages of studies: what is drawn, and that a page says how to repeat it."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpusim
import gpusim.study
from gpusim import Format
from gpusim.fallback.orders import COMPENSATED, ORDERS
from gpusim.study import Study, sweep, train
from gpusim.tools import cli
from gpusim.tools.study import picture, table
from gpusim.tools.study.metrics import METRICS
from gpusim.twins import TWINS
from tests.oracles.budget import slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overflowing(replicas: str) -> Study:
    """float16: 1 of 4 elements overflows from 4 replicas on, all do from 8 on."""
    x = np.full((8, 4), 10000.0)
    x[0, 0] = 40000
    x[7] = 60000
    return sweep(x, replicas=replicas, orders="linear,tree", roundings="nearest")


def test_twins_have_markers_and_colours_of_their_own() -> None:
    assert len(set(picture.MARKERS.values())) == len(picture.MARKERS)
    assert set(picture.MARKERS) == {*ORDERS, *COMPENSATED, *TWINS}
    study = sweep("normal", replicas="2,4", orders=list(TWINS), roundings="nearest", elements=16)
    styles = list(picture._styles(study.settings).values())
    for part in ("color", "marker", "label"):
        assert len({str(style[part]) for style in styles}) == len(TWINS)


def test_many_settings_are_told_apart_by_their_markers() -> None:
    study = sweep(
        "normal",
        replicas="2,4",
        dtypes="float16,bfloat16,e5m6,float32",
        orders="linear,reverse,ring,tree",
        roundings="nearest",
        elements=16,
    )
    styles = list(picture._styles(study.settings).values())
    assert len({(style["color"], style["marker"]) for style in styles}) == len(study.settings) == 16


def test_many_wires_and_levels_are_told_apart() -> None:
    study = sweep(
        "normal",
        replicas="16,32",
        orders="ring",
        roundings="nearest",
        wires="none,bfloat16,float16,int8:amax:32,float8_e4m3fn:amax:32,int4:amax:32",
        hierarchies="none,4,8:tree",
        elements=64,
    )
    styles = list(picture._styles(study.settings).values())
    assert len({(style["color"], style["marker"]) for style in styles}) == len(study.settings) >= 18


def points(axes: Any) -> Iterator[tuple[float, float, Any, str]]:
    """Every mark that is drawn: x, y, its marker and its face."""
    for line in axes.get_lines():
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            if np.isfinite(y) and line.get_marker() not in ("None", "|"):
                yield float(x), float(y), line.get_marker(), str(line.get_markerfacecolor())


def test_lines_are_drawn_where_the_figures_are() -> None:
    study = sweep("normal", replicas="2..32", orders="linear,tree", seeds="0,1", elements=64)
    for metric in ("relative_error", "bias", "cosine", "correct", "error_p99"):
        with picture.drawn(study, metric) as figure:
            drawn = {(round(x), y) for x, y, _, _ in points(figure.axes[0])}
        for row in study.rows:
            value = getattr(row.mean, metric)
            shown = 1 - value if metric == "cosine" else abs(value)
            assert (row.replicas, shown) in drawn, (metric, row.setting)


def test_equal_lines_stand_side_by_side() -> None:
    study = sweep("normal", replicas="2..8", orders="mpich,tree,ring", roundings="nearest")
    shifts = list(picture._shifts(study, "relative_error").values())
    assert shifts[0] < 1 < shifts[1] and shifts[2] == 1.0 and shifts[1] / shifts[0] < 1.2


def test_one_number_of_replicas_is_drawn_as_dots() -> None:
    study = sweep("normal", replicas=64, dtypes="float16,bfloat16", seeds="0,1", elements=64)
    for metric in ("relative_error", "correct", "sign_flips", "mean_error"):
        with picture.drawn(study, metric) as figure:
            (axes,) = figure.axes
            labels = [text.get_text() for text in axes.get_yticklabels()]
            assert labels == [setting.name for setting in study.settings]
            assert axes.get_title(loc="left") == "Sum of 64 replicas: normal, 64 elements"
            assert METRICS[metric] in axes.get_xlabel()
            drawn = {(x, y) for x, y, _, _ in points(axes)}
        for place, row in enumerate(study.rows):
            value = abs(getattr(row.mean, metric))
            assert (value, place) in drawn


def test_arrays_of_a_file_are_rows_of_dots(folder: Path) -> None:
    np.savez(folder / "x.npz", a=np.full((4, 3), 0.1), b=np.full((4, 5), 0.7))
    study = sweep("x.npz", tensor="*", replicas=4, dtypes="bfloat16", preset="engines")
    with picture.drawn(study, "input_error") as figure:
        (axes,) = figure.axes
        assert [text.get_text() for text in axes.get_yticklabels()] == ["all", "a", "b"]
        assert len(list(points(axes))) == 3 * len(study.settings)
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
    assert names == [setting.name for setting in study.settings]


def test_overflow_is_drawn_as_overflow() -> None:
    study = overflowing("2..8")
    assert [row.mean.overflowed for row in study.of(study.settings[0])] == [0.0, 0.25, 1.0]
    with picture.drawn(study, "relative_error") as figure:
        above, axes = figure.axes
        shares = {y for _, y, _, _ in points(above)}
        marks = list(points(axes))
        assert shares == {0.0, 0.25, 1.0} and above.get_ylabel() == "overflow"
        crosses = [round(x) for x, _, marker, _ in marks if marker == picture.OVERFLOW]
        assert crosses == [8, 8]
    with picture.drawn(study, "correct") as figure:
        hollow = [round(x) for x, _, _, face in points(figure.axes[1]) if face == "white"]
        assert hollow.count(4) == 2 and 2 not in hollow
    clean = sweep("normal", replicas="2,4", elements=16)
    with picture.drawn(clean, "relative_error") as figure:
        assert len(figure.axes) == 1


def test_overflow_of_one_number_of_replicas_is_drawn_and_said() -> None:
    for replicas, text, cross in (("4", "25% overflow", False), ("8", "100% overflow", True)):
        with picture.drawn(overflowing(replicas), "relative_error") as figure:
            (axes,) = figure.axes
            assert [t.get_text() for t in axes.texts].count(text) == 2
            crosses = [m for _, _, m, _ in points(axes) if m == picture.OVERFLOW]
            assert len(crosses) == 2 * cross


def test_zeros_and_infinities_are_marked_at_the_edges() -> None:
    x = np.array([[2048.0], [1.0], [-2048.0], [-1.0]])  # exactly 0; float16 gives -1, one by one
    study = sweep(x, replicas=4, orders="linear,tree", roundings="nearest")
    assert [row.mean.relative_error for row in study.rows] == [np.inf, 0.0]
    with picture.drawn(study, "relative_error") as figure:
        assert [t.get_text() for t in figure.axes[0].texts] == ["infinite", "0"]
    study = sweep(x, replicas="2,4", orders="linear", roundings="nearest")
    with picture.drawn(study, "relative_error") as figure:
        marks = [(round(x), m) for x, _, m, _ in points(figure.axes[0])]
    assert (4, picture.OVERFLOW) in marks


def test_a_figure_that_is_zero_everywhere_has_a_picture(folder: Path) -> None:
    for replicas in ("2", "2,4"):
        study = sweep(np.ones((4, 3)), replicas=replicas)
        for metric in ("relative_error", "sign_flips"):
            assert study.plot(folder / "a.svg", metric).stat().st_size > 1000


def command_of(page: str) -> str:
    """The command on a page, as a reader copies it."""
    (found,) = re.findall(r"<h2>To repeat it</h2><pre>(.*?)</pre>", page, re.DOTALL)
    return html.unescape(found)


COMMANDS = [
    "--input normal --replicas 3,5,7 --seeds 4,6 --order ring,gloo-ring --elements 40",
    "--input normal --replicas 2..8 --preset engines --dtype bfloat16,e5m6 --op sum,mean",
    "--input lognormal --replicas 2 --scale 0.3 --input-seed 9 --accumulate contract,e4m3,wire",
    "--input 'a b.npz' --tensor 'w*' --replicas 2 --rounding stochastic --seeds 1..5",
    *slow("--input gradients --replicas 2 --epoch 1 --elements 30 --order tree"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_sweep_says_how_to_repeat_it(command: str, folder: Path) -> None:
    np.savez(folder / "a b.npz", w1=np.eye(4), w2=np.eye(4) / 3, v=np.eye(2))
    assert cli.main(["study", *shlex.split(command), "--json", "a.json"]) == 0
    text = (folder / "a.json").read_text()
    program, subcommand, *again = shlex.split(json.loads(text)["command"])
    assert (program, subcommand) == ("gpusim", "study")
    assert cli.main(["study", *again, "--json", "b.json"]) == 0
    assert (folder / "b.json").read_text() == text


def test_what_no_command_says_is_repeated_from_python(folder: Path) -> None:
    array = np.random.default_rng(0).normal(size=(4, 9))
    small = Format(4, 3, has_infinities=False)
    study = sweep(array, replicas=4, dtypes=[small], orders="tree", seeds=[0, 2], ops="mean")
    call = command_of(study.report(folder / "a.html").read_text())
    assert call.startswith("gpusim.study.sweep(array, replicas=[4], ")
    assert eval(call, {"gpusim": gpusim, "array": array}).rows == study.rows


def test_a_page_has_every_figure_and_its_accumulators(folder: Path) -> None:
    study = sweep("normal", replicas=4, dtypes="bfloat16", preset="engines", elements=50)
    page = study.report(folder / "a.html").read_text()
    assert {*table.MAIN, *table.DETAILS} | {"mean_error", *table.IF_ANY} == set(METRICS)
    for chosen in (table.MAIN, table.DETAILS):
        for name in chosen:
            assert f"<th>{table.COLUMNS[name].heading}</th>" in page
        for row in table.cells(study, chosen):
            for cell in row:
                assert f">{cell}</td>" in page
    assert "gcl-ring does not add bfloat16: left out." in page
    assert "bfloat16 added in float32, mpich" in page


def test_the_table_shows_the_figures_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--input", "normal", "--replicas", "8", "--order", "ring", "--seeds", "0,1"]
    figures = "cosine,error_p50,error_max,sign_flips"
    assert cli.main(["study", *options, "--figures", figures]) == 0
    shown = capsys.readouterr().out
    assert "1 - cosine  median  largest  sign flipped" in re.sub("  +", "  ", shown)
    (row, _) = sweep("normal", replicas=8, orders="ring", seeds=[0, 1]).rows
    for value in (f"{1 - row.mean.cosine:.1e}", f"{row.mean.error_p50:.1e}"):
        assert value in shown
    with pytest.raises(ValueError, match="figures: 'mood' given"):
        sweep("normal", replicas=2, elements=2).show(["mood"])


def test_a_training_page_says_how_to_repeat_it(folder: Path) -> None:
    first = train("e5m6:stochastic", epochs=1, gradients=False, rate=0.01, seed=3)
    words = shlex.split(command_of(first.report(folder / "a.html").read_text()))
    assert words[:3] == ["gpusim", "study", "train"] and "--weights" in words
    assert cli.main([*words[1:], "--json", "b.json"]) == 0
    first.to_json(folder / "a.json")
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()
