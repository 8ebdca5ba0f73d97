"""Intervals and tests of studies: against SciPy, by simulation, and in exact arithmetic."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.study import Study, sweep
from gpusim.tools import cli
from gpusim.tools.study import intervals, picture
from gpusim.tools.study.intervals import holm, mean_interval, sign_flips, student_quantile
from gpusim.tools.study.metrics import METRICS, bounds

stats = pytest.importorskip("scipy.stats")

HOW: dict[str, Any] = {"elements": 64, "replicas": [8, 32], "dtypes": "bfloat16"}


@pytest.mark.parametrize("freedom", [*range(1, 12), 30, 99, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.9999])
def test_the_quantile_is_scipys(freedom: int, confidence: float) -> None:
    expected = stats.t.ppf(0.5 + confidence / 2, freedom)
    assert student_quantile(confidence, freedom) == pytest.approx(expected, rel=1e-10)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30).filter(lambda v: len(set(v)) > 1),
    st.sampled_from([0.8, 0.95]),
)
def test_the_interval_is_scipys(values: list[float], confidence: float) -> None:
    low, high = mean_interval(values, confidence)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    size = max(map(abs, values))
    assert low == pytest.approx(expected.low, rel=1e-9, abs=1e-9 * size)
    assert high == pytest.approx(expected.high, rel=1e-9, abs=1e-9 * size)


def test_intervals_end_where_figures_do() -> None:
    values = [0.0, 0.0, 1.0, 0.0]
    assert mean_interval(values, 0.95)[0] < 0 and mean_interval(values, 0.95, (0.0, 0.5)) == (
        0.0,
        0.5,
    )
    assert [bounds(name) for name in ("bias", "correct", "max_ulp", "cosine")] == [
        (-math.inf, math.inf),
        (0.0, 1.0),
        (0.0, math.inf),
        (-1.0, 1.0),
    ]
    assert set(map(bounds, METRICS)) == {*map(bounds, ("bias", "correct", "max_ulp", "cosine"))}
    for few in ([], [1.0], [1.0, math.inf], [1.0, math.nan]):
        assert all(map(math.isnan, mean_interval(few, 0.95)))


def covered(draw: Any, mean: float, count: int, trials: int) -> float:
    """The share of trials whose 90 percent interval holds the mean."""
    ends = [mean_interval(row, 0.9) for row in draw((trials, count)).tolist()]
    return sum(low <= mean <= high for low, high in ends) / trials


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_intervals_of_normal_values_cover_as_often_as_they_say(count: int) -> None:
    """4,000 trials: the standard error of the share is 0.5 percent."""
    generator = np.random.Generator(np.random.Philox(count))
    assert covered(generator.standard_normal, 0.0, count, 4000) == pytest.approx(0.9, abs=0.02)


def test_intervals_of_a_sweep_cover_the_mean_of_many() -> None:
    """Over inputs and over seeds: the mean of 400 units stands for the true one."""
    how: dict[str, Any] = {**HOW, "replicas": 16, "orders": "ring", "roundings": "stochastic"}
    by_input = sweep("lognormal", input_seed=range(400), seeds=[0], **how)
    by_seed = sweep("lognormal", seeds=range(400), **how)
    for found in (by_input, by_seed):
        for name in ("relative_error", "bias", "backward_p99", "correct"):
            values = [getattr(m.metrics, name) for m in found.measurements]
            assert len(values) == 400
            true = math.fsum(values) / 400
            ends = [mean_interval(values[k : k + 8], 0.95, bounds(name)) for k in range(0, 400, 8)]
            share = sum(low <= true <= high for low, high in ends) / 50
            assert share >= 0.84, name  # 0.95, less 3.5 standard errors of 50 trials


# The sign-flip test


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=8))
def test_flips_are_counted_as_exact_arithmetic_does(numbers: list[int]) -> None:
    """Tenths, whose sums are rounded: ties stay ties."""
    values = [number / 10 for number in numbers]
    exact = [Fraction(number, 10) for number in numbers]
    far = sum(
        abs(sum(s * v for s, v in zip(signs, exact, strict=True))) >= abs(sum(exact))
        for signs in itertools.product((1, -1), repeat=len(exact))
    )
    assert sign_flips(values) == (far / 2 ** len(exact), 2 ** len(exact))


@pytest.mark.parametrize("count", [2, 5, 9, 12])
def test_the_p_value_is_scipys(count: int) -> None:
    values = np.random.Generator(np.random.Philox(count)).normal(0.4, 1, count)
    expected = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=math.inf
    ).pvalue
    assert sign_flips(values.tolist())[0] == pytest.approx(expected, rel=1e-12)


def test_many_pairs_are_flipped_at_random_and_always_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.Generator(np.random.Philox(1)).normal(0.5, 1, 14).tolist()
    exact, ways = sign_flips(values)
    assert ways == 2**14
    monkeypatch.setattr(intervals, "EXACT", 4)
    drawn = sign_flips(values)
    assert drawn == sign_flips(values) and drawn[1] == 100_000
    assert drawn[0] == pytest.approx(exact, abs=4 * math.sqrt(exact / 1e5))
    least, _ = sign_flips([1.0] * 60)
    assert least == 1e-5  # the measured choice counts itself


def test_the_test_errs_as_often_as_it_says_and_finds_what_there_is() -> None:
    """2,000 trials of 8 pairs. Of equal settings 5 percent are below 0.05, 4.7 of all 2**8 ways."""
    generator = np.random.Generator(np.random.Philox(0))
    same = generator.standard_normal((2000, 8))
    share = np.mean([sign_flips(row)[0] <= 0.05 for row in same.tolist()])
    assert share == pytest.approx(12 / 256, abs=0.015)
    power = np.mean([sign_flips(row)[0] <= 0.05 for row in (same + 1.5).tolist()])
    against = np.mean(stats.ttest_1samp(same + 1.5, 0, axis=1).pvalue <= 0.05)
    assert power > 0.9 and power > against - 0.05
    skewed = generator.exponential(size=(2000, 8)) - generator.exponential(size=(2000, 8))
    share = np.mean([sign_flips(row)[0] <= 0.05 for row in skewed.tolist()])
    assert share == pytest.approx(12 / 256, abs=0.015)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holms_correction_is_its_definition(p_values: list[float]) -> None:
    """The k-th smallest is rejected at a level if it and all smaller ones pass level / (m - k)."""
    found = holm(p_values)
    assert all(f >= p for f, p in zip(found, p_values, strict=True)) and max(found) <= 1
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for level in (0.01, 0.05, 0.3, 0.9):
        rejected = set()
        for rank, place in enumerate(order):
            if (len(order) - rank) * p_values[place] > level:
                break
            rejected.add(place)
        assert {k for k, p in enumerate(found) if p <= level} == rejected


# Studies


@pytest.fixture(scope="module")
def study() -> Study:
    how: dict[str, Any] = {**HOW, "orders": "ring,tree", "input_seed": range(6), "seeds": [0, 1, 2]}
    return sweep("lognormal", **how)


def test_units_are_inputs_and_else_seeds(study: Study) -> None:
    for row in study.rows:
        several = [
            m for m in study.measurements if (m.setting, m.replicas) == (row.setting, row.replicas)
        ]
        assert len(several) == 6 * (3 if row.setting.stochastic else 1)
        values = [
            math.fsum(m.metrics.bias for m in several if m.input_seed == k)
            / sum(m.input_seed == k for m in several)
            for k in range(6)
        ]
        assert row.mean.bias == pytest.approx(math.fsum(values) / 6, rel=1e-13)
        assert row.spread.bias == pytest.approx(np.std(values, ddof=1), rel=1e-12)
        assert row.low is not None and row.high is not None
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (row.low.bias, row.high.bias) == pytest.approx((expected.low, expected.high))
        alone = sweep(
            "lognormal", **{**HOW, "input_seed": 4, "seeds": [0, 1, 2], "orders": "ring,tree"}
        )
    (other,) = [r for r in alone.rows if (r.setting, r.replicas) == (row.setting, row.replicas)]
    seeds = [
        m.metrics.bias
        for m in alone.measurements
        if (m.setting, m.replicas) == (row.setting, row.replicas)
    ]
    assert other.mean.bias == pytest.approx(math.fsum(seeds) / len(seeds), rel=1e-13)
    assert seeds == [m.metrics.bias for m in several if m.input_seed == 4]


def test_one_value_has_no_interval(tmp_path: Path) -> None:
    found = sweep("normal", orders="tree", roundings="nearest,stochastic", seeds=[0, 1], **HOW)
    with open(found.to_csv(tmp_path / "a.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        has = row["rounding"] == "stochastic"
        ends = [row[f"relative_error_{end}"] for end in ("low", "high")]
        assert (ends != ["", ""]) == has
        if has:
            assert float(ends[0]) <= float(row["relative_error"]) <= float(ends[1])
    wide = sweep("normal", orders="tree", seeds=[0, 1], confidence=0.99, **HOW)
    narrow, wider = (
        next(row for row in each.rows if row.setting.stochastic) for each in (found, wide)
    )
    assert narrow.mean == wider.mean and narrow.low and wider.low
    assert wider.low.bias < narrow.low.bias


def test_a_test_pairs_inputs(study: Study) -> None:
    ring, tree = (s for s in study.settings if not s.stochastic)
    found = study.test(ring, tree.name)
    values = [
        [
            m.metrics.relative_error
            for m in study.measurements
            if (m.setting, m.replicas) == (setting, 32)
        ]
        for setting in (ring, tree)
    ]
    assert (found.replicas, found.unit, found.pairs, found.ways) == (32, "input", 6, 64)
    expected = stats.permutation_test(
        (np.subtract(*values),), np.sum, permutation_type="samples", n_resamples=math.inf
    ).pvalue
    assert found.p_value == found.adjusted == expected == found.least_p_value == 2 / 64
    assert found.mean_a == pytest.approx(np.mean(values[0]))
    assert found.ratio == pytest.approx(np.mean(values[0]) / np.mean(values[1]))
    interval = stats.ttest_rel(*values).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    turned = study.test(tree, ring)
    assert turned.p_value == found.p_value and turned.difference == -found.difference


def test_seeds_of_one_input_are_pairs() -> None:
    found = sweep("lognormal", orders="ring", seeds=range(7), **HOW)
    nearest, stochastic = found.settings
    test = found.test(nearest, stochastic.text, "bias", replicas=8)
    constant, *drawn = (m.metrics.bias for m in found.measurements if m.replicas == 8)
    assert (test.unit, test.pairs, test.replicas) == ("seed", 7, 8)
    assert test.p_value == sign_flips([constant - value for value in drawn])[0]
    assert test.mean_a == pytest.approx(constant, rel=1e-14)


def test_several_tests_are_corrected_together(study: Study) -> None:
    names = [setting.name for setting in study.settings]
    pairs = [(names[0], names[1]), (names[2], names[3]), (names[0], names[2])]
    found = study.tests(pairs)
    assert [(t.a.name, t.b.name, t.replicas) for t in found] == [
        (a, b, n) for a, b in pairs for n in (8, 32)
    ]
    assert [t.adjusted for t in found] == holm([t.p_value for t in found])
    assert found[1].p_value == study.test(*pairs[0]).p_value
    assert len(study.tests(pairs, replicas=[8], metric="correct")) == 3


@pytest.mark.parametrize(
    ("a", "b", "options", "said"),
    [
        (0, "ring", {}, "b='ring': expected a setting of this study, such as \\['bfloat16 added"),
        (0, 0, {}, "a and b are both 'bfloat16 added in bfloat16, ring': expected two settings"),
        (0, 1, {"metric": "mood"}, "metric='mood': expected one of relative_error"),
        (0, 1, {"replicas": 3}, "replicas=3: expected one of 8, 32"),
        (0, 1, {"tensor": "x"}, "tensor='x': expected one of None"),
    ],
)
def test_a_test_that_makes_no_sense_is_named(
    study: Study, a: Any, b: Any, options: dict[str, Any], said: str
) -> None:
    chosen = [study.settings[each] if isinstance(each, int) else each for each in (a, b)]
    with pytest.raises(ValueError, match=said):
        study.test(*chosen, **options)


def test_a_test_needs_pairs_and_finite_figures() -> None:
    found = sweep("normal", orders="ring,tree", roundings="nearest", **HOW)
    with pytest.raises(ValueError, match="at least two pairs: expected several inputs"):
        found.test(*found.settings)
    said = "compare: one value of each setting; expected several inputs"
    names = [setting.name for setting in found.settings]
    with pytest.raises(ValueError, match=said):
        sweep("normal", orders="ring,tree", roundings="nearest", compare=[names], **HOW)
    twice = sweep("normal", orders="ring", roundings="nearest", **{**HOW, "dtypes": "bf16,fp16"})
    with pytest.raises(ValueError, match="expected a setting of this study, such as"):
        twice.test("ring accumulate=float32", twice.settings[0])
    large = np.full((8, 4), 60000.0)
    over = sweep(large, orders="ring", dtypes="float16", replicas=8, seeds=[0, 1])
    with pytest.raises(ValueError, match="metric='relative_error': it is not finite everywhere"):
        over.test(*over.settings)


def test_a_command_compares_and_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = (f"bfloat16 added in bfloat16, {order}" for order in ("ring", "tree"))
    words = ["study", "--input", "lognormal", "--elements", "64", "--replicas", "8,64"]
    words += [
        "--dtype",
        "bf16",
        "--order",
        "ring,tree",
        "--rounding",
        "rne",
        "--input-seed",
        "0..4",
    ]
    compared = ["--compare", a, b, "--compare-metric", "bias", "--intervals", "--json", "a.json"]
    assert cli.main([*words, *compared, "--report", "a.html"]) == 0
    shown = capsys.readouterr().out
    assert "Paired sign-flip tests" in shown and "5 inputs" in shown and "bf16" not in shown
    assert " [" in shown.splitlines()[3]
    text = (tmp_path / "a.json").read_text()
    answer = json.loads(text)
    assert [test["replicas"] for test in answer["tests"]] == [8, 64]
    assert {test["metric"] for test in answer["tests"]} == {"bias"}
    assert "Paired sign-flip tests" in (tmp_path / "a.html").read_text()
    again = shlex.split(answer["command"])[1:]
    assert cli.main([*again, "--json", "b.json"]) == 0
    assert (tmp_path / "b.json").read_text() == text
    assert cli.main([*words, "--compare", a, "tree"]) == 2
    assert "compare='tree': expected a setting of this study" in capsys.readouterr().err
    assert cli.main([*words, "--confidence", "95"]) == 2
    assert "confidence=95.0: expected a number between 0 and 1" in capsys.readouterr().err


def test_bands_are_the_intervals() -> None:
    found = sweep("lognormal", orders="ring", roundings="nearest", input_seed=range(5), **HOW)
    for metric in ("relative_error", "correct", "cosine", "bias"):
        with picture.drawn(found, metric) as figure:
            (band,) = figure.axes[0].collections
            ys = sorted({float(y) for path in band.get_paths() for _, y in path.vertices})
        for row in found.rows:
            ends = [getattr(end, metric) for end in (row.low, row.high)]
            if metric == "cosine":
                ends = [1 - end for end in ends]
            if metric == "bias":
                ends = [abs(end) for end in ends]
            top = max(ends)
            assert any(y == pytest.approx(top) for y in ys), metric
