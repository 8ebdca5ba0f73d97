"""`gpusim study train`: several seeds, Ctrl-C, files, and the options of steps."""

from __future__ import annotations

import csv
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusim.study import train
from gpusim.tools import cli, digits
from gpusim.tools.study import training
from gpusim.tools.study.intervals import mean_interval
from gpusim.tools.study.runs import FIGURES

WORDS = ["study", "train", "--epochs", "2", "--replicas", "3"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_figures_of_several_seeds_are_means_with_intervals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*WORDS, "--formats", "bf16,bf16:sr", "--seed", "4", "--seeds", "3"]
    files = ["--csv", "x.csv", "--json", "x.json", "--picture", "x.svg", "--page", "x.html"]
    assert cli.main([*words, *files]) == 0
    shown = capsys.readouterr().out
    assert "3 seeds" in shown.splitlines()[0] and "bfloat16, stochastic" in shown
    alone = [train(["bf16", "bf16:sr"], epochs=2, replicas=3, seed=seed) for seed in (4, 5, 6)]
    with open("x.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["format"] for row in rows] == ["float32", "bfloat16", "bfloat16, stochastic"]
    for place, row in enumerate(rows):
        assert row["seeds"] == "3"
        for figure, bounds in FIGURES.items():
            values = [each.table[place][figure] for each in alone]
            low, high = mean_interval(values, 0.95, bounds)
            assert float(row[figure]) == pytest.approx(np.mean(values), rel=1e-15)
            assert [float(row[f"{figure} {end}"]) for end in ("low", "high")] == [low, high]
            assert low <= np.mean(values) <= high
    low, high = float(rows[1]["progress low"]), float(rows[1]["progress high"])
    assert f"{float(rows[1]['progress']):.1%} [{low:.1%}, {high:.1%}]" in shown
    found = json.loads(Path("x.json").read_text())
    assert [(run["seed"], run["name"]) for run in found["runs"]] == [
        (seed, name) for seed in (4, 5, 6) for name in (row["format"] for row in rows)
    ]
    for k, run in enumerate(found["runs"]):
        here = alone[k // 3]
        assert run["loss"] == here.runs[k % 3].losses.tolist()
        assert run["progress"] == here.ways[k % 3].tolist()
    assert "confidence intervals of the mean" in Path("x.html").read_text()
    # The command that the files name gives the same bits.
    assert cli.main([*shlex.split(found["command"])[1:], "--json", "again.json"]) == 0
    assert Path("again.json").read_text() == Path("x.json").read_text()


def test_one_seed_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--formats", "bf16", "--csv", "x.csv"]) == 0
    assert "[" not in capsys.readouterr().out
    heading = Path("x.csv").read_text().splitlines()[0]
    assert heading == "format,test accuracy,final loss,progress,unchanged"


def test_options_of_steps_reach_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--optimizer", "adam", "--state-format", "m=bf16:sr+v=fp16,fp32"]
    words += ["--formats", "bf16", "--master", "fp32", "--clip", "0.02", "--error-feedback"]
    assert cli.main([*words, "--clip-norm", "linear accumulate=bfloat16", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimizer"] == "adam" and found["rate"] == 0.001 and found["master"] == "float32"
    assert found["clip"] == 0.02 and found["clip_norm"] == "linear accumulate=bfloat16"
    assert [run["states"] for run in found["runs"]] == [
        {"m": "float32", "v": "float32"},
        {"m": "bfloat16:stochastic", "v": "float16"},
        {"m": "float32", "v": "float32"},
    ]
    assert all(0 < share <= 1 for run in found["runs"] for share in run["clipped"])
    assert cli.main([*shlex.split(found["command"])[1:], "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ctrl-C in an epoch."""

    def at(epoch: int) -> None:
        before, count = digits.accuracy, [0]

        def accuracy(*given: Any) -> float:
            count[0] += 1
            if count[0] == epoch:
                raise KeyboardInterrupt
            return before(*given)

        monkeypatch.setattr(digits, "accuracy", accuracy)

    return at


def test_ctrl_c_keeps_what_was_computed(ctrl_c: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ctrl_c(6)  # in the third run
    words = [*WORDS, "--formats", "bf16,bf16:sr,fp8", "--csv", "x.csv", "--picture", "x.png"]
    assert cli.main(words) == 130
    said = capsys.readouterr()
    assert "gpusim study: interrupted: 2 of 4 trainings are complete" in said.err
    with open("x.csv") as file:
        assert [row["format"] for row in csv.DictReader(file)] == ["float32", "bfloat16"]
    assert Path("x.png").stat().st_size > 1000 and "bfloat16" in said.out


def test_ctrl_c_in_a_later_seed_keeps_its_runs_too(ctrl_c: Any) -> None:
    ctrl_c(8)  # each seed has two runs of two epochs; the second run of the second seed is cut
    with pytest.raises(training.TrainingInterrupted) as caught:
        train(["bf16"], epochs=2, replicas=3, seeds=3)
    found = caught.value.training
    assert found is not None and (caught.value.complete, caught.value.total) == (3, 6)
    assert [row["seeds"] for row in found.table] == [2, 1]
    assert math.isnan(found.table[1]["progress low"])
    json.loads(found.json_text())


def test_ctrl_c_in_the_first_run_leaves_nothing(
    ctrl_c: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctrl_c(1)
    assert cli.main([*WORDS, "--formats", "bf16", "--csv", "x.csv"]) == 130
    said = capsys.readouterr()
    assert said.out == "" and "0 of 2 trainings" in said.err and "Traceback" not in said.err
    assert not list(folder.iterdir())


def test_a_run_that_diverges_leaves_the_axes_and_the_legend_says_so() -> None:
    from gpusim.tools.study import training_output

    found = train(state_formats="bf16,fp16", optimizer="adam", epochs=2)
    with training_output.drawn(found) as figure:
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        tops = [axes.get_ylim()[1] for axes in figure.axes]
    assert names == [
        "float32", "float32; states bfloat16", "float32; states float16 (leaves the axes)",
    ]  # fmt: skip
    assert tops[0] == pytest.approx(1.5 * found.runs[0].losses.max()) and tops[2] == 1.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--formats", "bf17"], "--formats 'bf17': "),
        (["--state-format", "bf16"], "state_formats needs an optimizer with states"),
        (["--optimizer", "adam", "--state-format", "x=bf16"], "--state-format 'x=bf16': adam has"),
        (["--clip", "0"], "argument --clip: a finite number above 0 is needed, got '0'"),
        (["--clip", "1", "--clip-norm", "rng"], "did you mean 'ring'"),
        (["--seeds", "0"], "argument --seeds: a whole number of at least 1 is needed"),
        (["--master", "fp64"], "--master 'fp64': expected float32 or narrower"),
        (["--rate", "nan"], "argument --rate: a finite number above 0 is needed"),
        (["--gradients", "--master", "fp32"], "--master 'fp32': expected weights in the format"),
    ],
)
def test_wrong_options_end_with_2(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main([*WORDS, *words, "--csv", "x.csv"])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert not list(folder.iterdir())
