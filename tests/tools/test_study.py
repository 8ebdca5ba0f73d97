"""Precision studies: the exact reference, the figures, the inputs, and what theory says of them."""

from __future__ import annotations

import csv
import json
import math
import tracemalloc
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import Format
from gpusim.fallback import fold
from gpusim.fallback.threads import limited
from gpusim.study import sweep
from gpusim.tools.study import metrics, picture, planning, reference
from gpusim.tools.study import settings as study_settings
from gpusim.tools.study.settings import FORMATS
from gpusim.tools.study.sources import open_sources
from gpusim.tools.study.synthetic import SYNTHETIC, Synthetic
from tests.oracles.reference_fold import FLOATS, Number, codes_of, encode, round_number

UNIT = 2.0**-11  # float16's unit roundoff


floats = st.floats(-1e150, 1e150, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(floats, min_size=1, max_size=40), st.integers(1, 5))
def test_the_reference_is_exact(values: list[float], lanes: int) -> None:
    with mock.patch.object(reference, "LANES", lanes):
        exact = reference.exact_sum(np.array(values)[:, np.newaxis])
    total = sum(map(Fraction, values))
    assert exact.high[0] == float(total)  # Python rounds fractions correctly
    rest = total - Fraction(float(exact.high[0]))
    assert (exact.low[0] > 0) == (rest > 0) and (exact.low[0] < 0) == (rest < 0)
    assert math.isclose(exact.low[0], rest, rel_tol=2**-51) or rest == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.sampled_from(list(FORMATS)))
def test_the_best_result_is_correctly_rounded(seed: int, members: int, name: str) -> None:
    """Ties and near-ties included: half of the values are a few units of very different size."""
    draw = np.random.default_rng(seed)
    values = draw.integers(-4, 5, (members, 6)) * 2.0 ** draw.integers(-60, 8, (members, 6))
    exact = reference.exact_sum(values)
    totals = [sum(map(Fraction, column)) for column in values.T.tolist()]
    best = exact.rounded(FORMATS[name])
    expected = [
        encode(round_number(Number(t < 0, abs(t)), FLOATS[name], None), FLOATS[name])
        for t in totals
    ]
    minus_zero = 1 << (FLOATS[name].bits - 1)
    codes = [code for (code,) in codes_of(best)]
    # The sign of a zero is of no interest here.
    assert [c if c != minus_zero else 0 for c in codes] == [
        c if c != minus_zero else 0 for c in expected
    ]


def test_infinite_and_undefined_sums_are_said_to_be() -> None:
    values = np.array([[1, np.inf, np.inf, np.nan], [2, 1, -np.inf, 0]], np.float16)
    exact = reference.exact_sum(values)
    assert np.array_equal(exact.high, [3, np.inf, np.nan, np.nan], equal_nan=True)


@pytest.mark.parametrize("name", list(FORMATS))
def test_ulp_is_the_formats_spacing(name: str) -> None:
    dtype = FORMATS[name]
    if dtype.itemsize > 2:
        values = np.array([1.0, 1.5, 3.0, 2.0**-100, 1e30], dtype)
        spacing = np.spacing(values).astype(np.float64)
    else:
        codes = np.arange(2 ** (8 * dtype.itemsize - 1), dtype=f"u{dtype.itemsize}").view(dtype)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            reals = codes.astype(np.float64)
        reals = reals[np.isfinite(reals)]
        values, spacing = reals[:-1], np.diff(reals)
    assert np.array_equal(metrics.ulp(values.astype(np.float64), dtype), spacing)


def test_figures_are_what_they_are_called() -> None:
    result = np.array([1.0, 2.0, -4.0, np.inf], np.float16)
    exact = reference.exact_sum(np.array([[1.0, 2.0, -4.0, 1.0], [0.0, 2.0**-9, 2.0**-8, 0.0]]))
    found = metrics.merged([metrics.measure(result, exact)])
    errors = np.array([0, -(2.0**-9), -(2.0**-8)])
    sums = np.array([1, 2 + 2.0**-9, -4 + 2.0**-8])
    assert found.relative_error == pytest.approx(np.linalg.norm(errors) / np.linalg.norm(sums))
    assert found.max_ulp == 2.0  # 4 - 2**-8 lies below 4, where an ulp is 2**-9
    assert found.mean_error == pytest.approx(errors.mean())
    assert found.bias == pytest.approx(errors.mean() / np.sqrt(np.mean(sums**2)))
    assert (found.correct, found.overflowed) == (0.25, 0.25)


def test_windows_of_a_study_are_merged_in_order() -> None:
    options: dict[str, Any] = {"replicas": [16], "seeds": [0, 5], "elements": 500}
    whole = sweep("heavy-tailed", **options)
    with mock.patch.object(planning, "WINDOW", 16 * 2 * 56):
        parts = sweep("heavy-tailed", **options)
    for one, other in zip(whole.measurements, parts.measurements, strict=True):
        assert one.metrics.relative_error == pytest.approx(other.metrics.relative_error, rel=1e-14)
        assert one.metrics.bias == pytest.approx(other.metrics.bias, rel=1e-12)
        for name in ("max_ulp", "correct", "overflowed"):
            assert getattr(one.metrics, name) == getattr(other.metrics, name)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    options: dict[str, Any] = {"replicas": [2, 9], "seeds": range(3), "elements": 300}
    assert sweep("normal", threads=threads, **options).measurements == (
        sweep("normal", threads=2, **options).measurements
    )


@pytest.mark.parametrize("name", list(SYNTHETIC))
def test_any_range_of_a_distribution_can_be_drawn_alone(name: str) -> None:
    source = Synthetic(name, 100, seed=3)
    for replicas in (1, 2, 7, 8):
        whole = source.block(replicas, range(replicas), 0, 100)
        assert whole.shape == (replicas, 100) and np.isfinite(whole).all()
        part = source.block(replicas, range(replicas // 2, replicas), 37, 22)
        assert part.tobytes() == whole[replicas // 2 :, 37:59].tobytes()
    assert not np.array_equal(whole, Synthetic(name, 100, seed=4).block(8, range(8), 0, 100))


def test_distributions_are_what_they_are_called() -> None:
    def drawn(name: str) -> np.ndarray:
        return Synthetic(name, 5000, 0).block(40, range(40), 0, 5000)

    normal, lognormal, heavy, cancelling = map(drawn, SYNTHETIC)
    assert abs(normal.mean()) < 0.012 and abs(normal.std() - 1) < 0.01
    assert np.allclose(np.corrcoef(normal) - np.eye(40), 0, atol=0.08)
    assert np.allclose(np.log(lognormal), normal, rtol=1e-13)
    # Student's t with two degrees of freedom: P(|t| > x) = 1 - x / sqrt(2 + x^2)
    for x in (1.0, 10.0, 100.0):
        expected = 1 - x / math.sqrt(2 + x * x)
        assert np.mean(np.abs(heavy) > x) == pytest.approx(expected, rel=0.25)
    assert np.linalg.norm(cancelling.sum(axis=0)) < 0.02 * np.linalg.norm(
        np.abs(cancelling).sum(axis=0)
    )


def slope(rows: list[Any], name: str = "relative_error") -> float:
    """The exponent p of figure ~ R**p."""
    replicas = np.log([row.replicas for row in rows])
    return float(np.polyfit(replicas, np.log([getattr(row.mean, name) for row in rows]), 1)[0])


SIZES = [16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_errors_of_random_sign_grow_as_the_square_root(rounding: str) -> None:
    """R**0.5 one after the other, sqrt(log R) in pairs; for stochastic rounding in float16."""
    narrow = rounding == "stochastic"
    study = sweep(
        "normal",
        replicas=SIZES,
        dtypes=["float16" if narrow else "float32"],
        orders=["linear", "reverse", "ring", "tree"],
        roundings=[rounding],
        seeds=range(2),
        elements=1024,
    )
    for setting in study.settings:
        rows = study.of(setting)
        if setting.order == "tree":
            errors = np.array([row.mean.relative_error for row in rows])
            shares = errors / np.sqrt(np.log2(SIZES))
            assert slope(rows) < 0.2
            assert shares.max() < 1.15 * shares.min()
        else:
            assert slope(rows) == pytest.approx(0.5, abs=0.05), setting.name


def test_the_worst_case_of_a_linear_sum_grows_as_the_number_of_replicas() -> None:
    """After a 1, each half ulp is a tie, and lost: R - 1 errors of the same sign."""
    x = np.full((1024, 4), UNIT)
    x[0] = 1
    study = sweep(x, replicas=SIZES, orders=["linear"], roundings=["nearest"])
    for row in study.rows:
        lost = (row.replicas - 1) * UNIT
        assert row.mean.relative_error == pytest.approx(lost / (1 + lost))
        assert row.mean.bias == pytest.approx(-lost / (1 + lost))
    absolute = [row.mean.mean_error for row in study.rows]
    assert absolute == [-(R - 1) * UNIT for R in SIZES]


def test_the_worst_case_of_a_tree_grows_as_its_logarithm() -> None:
    """Each right subtree sums to half an ulp of the 1 on the left: one error a level."""
    x = np.empty((1024, 4))
    x[0] = 1
    for level in range(10):
        x[2**level : 2 ** (level + 1)] = UNIT / 2**level
    study = sweep(x, replicas=SIZES, orders=["tree", "linear"], roundings=["nearest"])
    for row in study.rows:
        lost = math.log2(row.replicas) * UNIT
        assert row.mean.relative_error == pytest.approx(lost / (1 + lost))


@pytest.mark.parametrize("name", ["normal", "lognormal", "heavy-tailed", "cancelling"])
def test_no_error_exceeds_the_known_bounds(name: str) -> None:
    """|error| <= gamma * sum |x|, gamma = n u / (1 - n u); n = R - 1, or the levels of the tree."""
    source = Synthetic(name, 64, seed=1)
    for replicas in (2, 16, 128):
        x = source.block(replicas, range(replicas), 0, 64).astype(np.float16)
        exact = reference.exact_sum(x)
        sizes = np.abs(x.astype(np.float64)).sum(axis=0)
        for order in ("linear", "reverse", "ring", "tree"):
            steps = math.ceil(math.log2(replicas)) if order == "tree" else replicas - 1
            gamma = steps * UNIT / (1 - steps * UNIT)
            error = np.abs(fold(x, order=order).astype(np.float64) - exact.high)
            assert np.all(error <= gamma * sizes), (order, replicas)


def test_stochastic_rounding_has_no_bias_where_nearest_has() -> None:
    x = np.full((4097, 32), 2.0**-13)
    x[0] = 1
    study = sweep(x, replicas=[4097], orders=["linear"], seeds=range(8))
    nearest, stochastic = study.rows
    assert nearest.mean.bias == pytest.approx(-1 / 3)  # all of the half is lost
    error = stochastic.spread.bias / math.sqrt(8)
    assert abs(stochastic.mean.bias) < 5 * error < 0.01
    assert stochastic.seeds == tuple(range(8))


def test_one_setting_measured_alone_has_the_same_figures() -> None:
    many = sweep("normal", replicas=[4, 32], seeds=[3, 4], elements=64)
    one = sweep(
        "normal", replicas=[32], orders=["ring"], roundings=["stochastic"], seeds=[4], elements=64
    )
    assert one.measurements[0] in many.measurements


def test_a_study_repeats_what_fold_gives() -> None:
    x = np.random.default_rng(0).normal(size=(8, 40))
    study = sweep(
        x,
        replicas=[8],
        dtypes=["bfloat16"],
        accumulators=["float16"],
        orders=["tree"],
        roundings=["stochastic"],
        seeds=[7],
    )
    members = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    result = fold(members, order="tree", accumulate=np.float16, rounding="stochastic", seed=7)
    total = members.astype(np.float64).sum(axis=0)
    error = np.linalg.norm(result.astype(np.float64) - total) / np.linalg.norm(total)
    assert study.rows[0].mean.relative_error == pytest.approx(error, rel=1e-9)
    assert study.rows[0].setting.name == "bfloat16 added in float16, tree, stochastic"


def test_any_format_accumulates() -> None:
    x = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float16)
    options: dict[str, Any] = {"orders": ["tree"], "seeds": [3], "replicas": [8]}
    formats = ["float16", "e5m10", "e5m4", Format(4, 6, has_infinities=False)]
    rows = sweep(x, accumulators=formats, **options).rows
    assert [row.setting.name for row in rows[:4:2]] == [
        "float16 added in float16, tree",
        "float16 added in e5m10, tree",
    ]
    assert rows[0].mean == rows[2].mean and rows[1].mean == rows[3].mean
    result = fold(x, order="tree", accumulate=Format(5, 4).info)
    error = np.linalg.norm(result.astype(np.float64) - x.astype(np.float64).sum(axis=0))
    assert rows[4].mean.relative_error == pytest.approx(
        error / np.linalg.norm(x.astype(np.float64).sum(axis=0))
    )
    assert "e4m6+has_infinities=false" in rows[6].setting.name
    with pytest.raises(ValueError, match="exponent_bits=12: expected 0 to 11"):
        sweep(x, accumulators=["e12m3"])


def test_settings_that_are_the_same_are_swept_once() -> None:
    found = study_settings.grid(
        ["float16", np.float32, "bfloat16"], [None, "float32"], ["tree"], ["nearest", "stochastic"]
    )
    assert [setting.name for setting in found] == [
        "float16 added in float16, tree",
        "float16 added in float16, tree, stochastic",
        "float16 added in float32, tree",
        "float16 added in float32, tree, stochastic",
        "float32 added in float32, tree",
        "bfloat16 added in float32, tree",
        "bfloat16 added in float32, tree, stochastic",
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtypes": ["float12"]}, "dtype='float12': expected one of float64, float32, float16"),
        ({"dtypes": "e5m51"}, "dtype='e5m51': expected at most 50 bits of mantissa"),
        ({"ops": "median"}, "op='median': expected 'sum' or 'mean'"),
        ({"preset": "all"}, "preset='all': expected one of orders, engines, accumulators"),
        ({"orders": "openmpi", "replicas": "2..16"}, "order='openmpi': 16 members .* known for"),
        ({"replicas": "8..2"}, r"replicas: '8\.\.2' given, expected a range that rises"),
        ({"dtypes": ["int8"]}, "dtype='int8'"),
        ({"dtypes": [None]}, "dtype=None"),
        ({"accumulators": ["double trouble"]}, "accumulate='double trouble'"),
        ({"orders": ["butterfly"]}, "order='butterfly': expected one of 'linear'"),
        (
            {"wires": ["int9:amax"], "orders": ["ring"]},
            "wire='int9:amax': format='int9': expected one of float16, .*, .*, nvfp4, or",
        ),
        ({"roundings": ["up"], "dtypes": ["float32"]}, "rounding='up': expected one of 'nearest'"),
        ({"roundings": ["up"]}, "rounding='up'"),
        ({"dtypes": []}, "dtypes is empty"),
        ({"orders": []}, "orders is empty"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [0, -1]}, "seeds: -1 given, expected integers from 0"),
        ({"seeds": [2**64]}, "seeds: 18446744073709551616 given"),
        ({"seeds": [0.5]}, "seeds: 0.5 given"),
        ({"replicas": []}, "replicas is empty"),
        ({"replicas": [0]}, "replicas: 0 given, expected integers from 1"),
        ({"elements": 0}, "elements=0"),
        ({"tensor": "x"}, "tensor='x': expected a file as input"),
        ({"input": np.ones((2, 3)), "tensor": "*"}, r"tensor='\*': expected a file as input"),
        ({"scale": -1}, "scale=-1: expected a positive number"),
        ({"scale": math.nan}, "scale=nan"),
        ({"input_seed": -3}, "input_seed: -3 given"),
        ({"input": "gaussian"}, "input='gaussian': expected one of gradients, normal"),
        ({"input": "gradients", "epoch": -1}, "epoch=-1"),
        ({"input": "gradients", "replicas": [2000]}, "replicas: 2000 asked for, but .* has 1437"),
        ({"input": np.ones((3, 2), complex)}, "a study adds real numbers"),
        ({"input": np.array(["a"])}, "a study adds real numbers"),
        ({"input": np.array([object()])}, "a study adds real numbers"),
        ({"input": np.ones((0, 2))}, r"its shape is \(0, 2\)"),
        ({"input": np.array(1.0)}, r"its shape is \(\)"),
        ({"input": np.array([[1.0], [np.nan]])}, "element 0 of replica 1 is nan"),
        ({"input": np.ones((2, 3)), "elements": 4}, "elements=4: the input has 3"),
    ],
)
def test_what_makes_no_sense_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sweep(options.pop("input", "normal"), **{"elements": None, **options})


def test_gradients_are_those_of_one_image_each() -> None:
    source = open_sources("gradients", epoch=2)[None]
    assert (source.replicas, source.elements) == (1437, 4810)
    later = open_sources("gradients", epoch=3)[None]
    one, other = (each.block(1, range(1), 4100, 50) for each in (source, later))
    assert one.any() and not np.array_equal(one, other)


@pytest.fixture(scope="module")
def study() -> Any:
    return sweep(
        "heavy-tailed",
        replicas=[2, 16],
        dtypes=["float8_e5m2"],
        seeds=[0, 1],
        elements=200,
        scale=512,
    )


def test_csv_has_a_line_for_each_row(study: Any, tmp_path: Path) -> None:
    with open(study.to_csv(tmp_path / "a.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(study.rows) == 2 * 6
    assert rows[0]["relative_error"] == repr(study.rows[0].mean.relative_error)
    assert (rows[0]["relative_error_spread"], rows[0]["seeds"]) == ("", "")
    assert float(rows[1]["relative_error_spread"]) > 0 and rows[1]["seeds"] == "2"


def test_json_is_json_and_has_every_seed(study: Any, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = study.to_json(tmp_path / "a.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert len(found["rows"]) == 12 and len(found["measurements"]) == 2 * (3 + 6)
    assert found["input"]["kind"] == "heavy-tailed"


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_pictures_are_what_their_names_say(
    study: Any, name: str, magic: bytes, tmp_path: Path
) -> None:
    first = study.plot(tmp_path / name).read_bytes()
    assert first.startswith(magic)
    assert study.plot(tmp_path / name).read_bytes() == first  # no date, no random ids


def test_pictures_have_a_line_for_each_setting(study: Any) -> None:
    assert set(picture.pictures(study)) > set(picture.PICTURES)
    for metric in picture.pictures(study):
        with picture.drawn(study, metric) as figure:
            *above, axes = figure.axes
            assert [strip.get_ylabel() for strip in above] == (
                [] if metric == "overflowed" else ["overflow"]
            )
            names = axes.get_legend_handles_labels()[1]
            assert names == [setting.name for setting in study.settings]
            assert axes.get_xscale() == "log" and axes.get_xlabel() and axes.get_ylabel()


def test_a_page_needs_nothing_else(study: Any, tmp_path: Path) -> None:
    page = study.report(tmp_path / "a.html").read_text()
    assert page.count('src="data:image/svg+xml;base64,') == len(picture.pictures(study)) == 9
    assert "http" not in page and "<script" not in page and "<link" not in page
    for setting in study.settings:
        assert setting.name in page


def test_a_picture_of_an_unknown_kind_is_refused(study: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a name that ends in \.png"):
        study.plot(tmp_path / "a.jpeg")
    with pytest.raises(ValueError, match="metric='mood'"):
        study.plot(tmp_path / "a.png", metric="mood")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(study: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    with (
        mock.patch("gpusim.figures.save", side_effect=OSError("disk full")),
        pytest.raises(OSError, match="disk full"),
    ):
        study.plot(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_page_escapes_names(tmp_path: Path) -> None:
    np.save(tmp_path / "<b>.npy", np.ones((2, 3)))
    found = sweep(tmp_path / "<b>.npy", orders=["linear"], roundings=["nearest"])
    assert "<b>" not in found.report(tmp_path / "a.html").read_text()


@dataclass(frozen=True)
class Ones:
    """A source of any size that costs nothing."""

    elements: int
    replicas = None
    scale = 1.0
    title = "ones"

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "ones"}

    def block(self, replicas: int, rows: range, first: int, count: int) -> np.ndarray:
        return np.ones((len(rows), count))


def test_memory_does_not_grow_with_the_elements() -> None:
    """65,536 replicas; of the larger values, 512 MiB in float64, 1 of 8 is there."""
    peaks = []
    for elements in (256, 1024):
        # One thread: how many blocks exist at once is then no matter of timing.
        with mock.patch.object(planning, "WINDOW", 2**24), limited(1):
            tracemalloc.start()  # NumPy's arrays are counted
            try:
                sweep(
                    Ones(elements),
                    replicas=[65536],
                    dtypes=["float8_e5m2"],
                    orders=["linear", "ring"],
                    roundings=["nearest"],
                    threads=1,
                )
                peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
            finally:
                tracemalloc.stop()
    assert peaks[1] < 64
    assert peaks[1] - peaks[0] < 4


def test_memory_does_not_grow_with_the_elements_of_few_replicas() -> None:
    """Exact sums, of which each element has several, are those of a window."""
    peaks = []
    for elements in (2**14, 2**16):
        with mock.patch.object(planning, "WIDTH", 2**12), limited(1):
            tracemalloc.start()
            try:
                sweep(Ones(elements), replicas=2, orders="tree", roundings="nearest", threads=1)
                peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
            finally:
                tracemalloc.stop()
    assert peaks[1] < 12 and peaks[1] - peaks[0] < 1


def test_orders_may_be_those_of_engines() -> None:
    """Where nothing else is said, partial results are rounded as the engine does."""
    options: dict[str, Any] = {"replicas": [6], "dtypes": ["bfloat16"], "elements": 500}
    found = sweep("lognormal", orders=["mpich", "gloo-ring"], roundings=["nearest"], **options)
    names = [row.setting.name for row in found.rows]
    assert names == [
        "bfloat16 added in float32, mpich",
        "bfloat16 added in bfloat16, gloo-ring",
    ]
    mpich, gloo = (row.mean.relative_error for row in found.rows)
    assert mpich < gloo
