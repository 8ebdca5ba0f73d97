"""Every figure of a study against exact arithmetic, and the settings that its figures depend on."""

from __future__ import annotations

import csv
import json
import math
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusim import Format, collectives
from gpusim.fallback import round_to
from gpusim.fallback.formats import FormatInfo
from gpusim.formats import kernel_format
from gpusim.study import Setting, sweep
from gpusim.tools.study import metrics, planning, reference
from gpusim.tools.study.metrics import LIMIT, METRICS, QUANTILES, RESOLUTION
from gpusim.tools.study.settings import carrier, value_format
from gpusim.tools.study.synthetic import Synthetic
from gpusim.twins import TWINS
from tests.tools.test_study_command import safetensors

FIELDS = {"float16": "5m10", "bfloat16": "8m7", "e5m6": "5m6", "float32": "8m23"}


def exponent(value: Fraction) -> int:
    """The exponent of the power of two at or below |value|."""
    found = abs(value.numerator).bit_length() - value.denominator.bit_length()
    return found - (abs(value) < Fraction(2) ** found)


def spacing(value: Fraction, info: FormatInfo) -> Fraction:
    least = info.min_exponent
    return Fraction(2) ** ((max(exponent(value), least) if value else least) - info.fraction_bits)


def nearest(value: Fraction, info: FormatInfo) -> Fraction:
    """To nearest, ties to even, as Python rounds fractions."""
    unit = spacing(value, info)
    return round(value / unit) * unit


def root(value: Fraction | int) -> Decimal:
    return (Decimal(value.numerator) / Decimal(value.denominator)).sqrt()


def direct(x: np.ndarray, setting: Setting) -> dict[str, float]:
    """The figures of one reduction, computed from fractions; none of its elements overflows."""
    info = value_format(f"e{FIELDS[setting.record['dtype']]}").info
    members = round_to(x, kernel_format(setting.dtype))
    reduced = collectives.pmean if setting.op == "mean" else collectives.psum
    result = reduced(members, reduction=setting.reduction(0)).value
    result = round_to(result, kernel_format(setting.dtype)).astype(np.float64)

    def exact(values: np.ndarray) -> list[Fraction]:
        sums = [sum(map(Fraction, column)) for column in values.astype(np.float64).T.tolist()]
        return [Fraction(s) / (len(x) if setting.op == "mean" else 1) for s in sums]

    found, sums, inputs = list(map(Fraction, result.tolist())), exact(members), exact(x)
    errors = [r - s for r, s in zip(found, sums, strict=True)]
    relative = sorted(
        float(abs(e / s)) if s else math.inf if e else 0.0
        for e, s in zip(errors, sums, strict=True)
    )
    magnitudes = exact(np.abs(members))
    backward = sorted(float(abs(e) / m) for e, m in zip(errors, magnitudes, strict=True))
    count = len(sums)
    size = sum(s * s for s in sums)
    with localcontext(prec=60):
        norm = root(size)
        figures = {
            "relative_error": root(sum(e * e for e in errors)) / norm,
            "input_error": root(sum((r - s) ** 2 for r, s in zip(found, inputs, strict=True)))
            / root(sum(s * s for s in inputs)),
            "bias": root(sum(errors) ** 2) / count / (norm / Decimal(count).sqrt()),
            "cosine": 1
            - root(sum(r * s for r, s in zip(found, sums, strict=True)) ** 2)
            / (root(sum(r * r for r in found)) * norm),
        }
    signed = math.copysign(1, sum(errors))
    return {
        **{name: float(value) for name, value in figures.items()},
        "bias": signed * float(figures["bias"]),
        "mean_error": float(sum(errors) / count),
        "max_ulp": max(float(abs(e) / spacing(s, info)) for e, s in zip(errors, sums, strict=True)),
        "error_max": relative[-1],
        **{f"error_{n}": relative[math.ceil(p * count) - 1] for n, p in QUANTILES.items()},
        **{f"backward_{n}": backward[math.ceil(QUANTILES[n] * count) - 1] for n in ("p50", "p99")},
        "backward_max": backward[-1],
        "sign_flips": sum(r * s < 0 for r, s in zip(found, sums, strict=True)) / count,
        "correct": sum(r == nearest(s, info) for r, s in zip(found, sums, strict=True)) / count,
        "overflowed": 0.0,
        "infinite_input": 0.0,
    }


@pytest.mark.parametrize("source", ["normal", "lognormal", "cancelling"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_every_figure_is_what_exact_arithmetic_gives(source: str, op: str) -> None:
    x = Synthetic(source, 150, seed=2).block(11, range(11), 0, 150)
    study = sweep(
        x,
        replicas=11,
        dtypes="float32,float16,bfloat16,e5m6",
        accumulators="wire,float32",
        orders="linear,tree,mpich",
        roundings="nearest",
        ops=op,
    )
    assert len(study.rows) == 3 * 4 * 2 - 3 - 2  # float32 is its own wire; mpich's is float32 too
    for row in study.rows:
        expected, found = direct(x, row.setting), row.mean
        assert set(expected) == set(METRICS)
        assert 1 - found.cosine == pytest.approx(expected.pop("cosine"), rel=1e-3, abs=3e-16)
        for name in [f"error_{n}" for n in QUANTILES] + ["backward_p50", "backward_p99"]:
            assert getattr(found, name) == pytest.approx(expected.pop(name), rel=RESOLUTION)
        for name in ("sign_flips", "correct", "overflowed", "infinite_input"):
            assert getattr(found, name) == expected.pop(name)
        for name, value in expected.items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-9), (name, row.setting)


def test_a_sign_that_flips_is_counted() -> None:
    x = np.ones((5, 2))
    x[:, 0] = 2048, 0.75, 0.75, 1, -2050  # each of the small ones is lost: -2, and exactly 0.5
    (row,) = sweep(x, replicas=5, orders="linear", roundings="nearest").rows
    assert (row.mean.sign_flips, row.mean.correct) == (0.5, 0.5)
    assert (row.mean.error_p50, row.mean.error_max) == (0.0, 5.0)


floats = st.floats(-1e150, 1e150, allow_nan=False)


@settings(max_examples=200, deadline=None)
@example([8.183476519740355e149, 3.7392407170130057e-174], 1)
@given(st.lists(floats, min_size=1, max_size=20), st.integers(1, 3000))
def test_exact_means_are_exact(values: list[float], count: int) -> None:
    mean = reference.exact_sum(np.array(values)[:, np.newaxis]).divided(count)
    exact = sum(map(Fraction, values)) / Fraction(count)
    if 0 < abs(exact) < Fraction(2) ** -900:
        return  # the remainder has no place in float64
    assert mean.high[0] == float(exact)
    rest = exact - Fraction(mean.high.item())
    assert (mean.low[0] > 0) == (rest > 0) and (mean.low[0] < 0) == (rest < 0)
    assert abs(Fraction(mean.low.item()) - rest) <= abs(exact) / 2**104


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_blocks_of_rows_add_up_in_any_order(seed: int, blocks: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(24, 5)) * 2.0 ** draw.integers(-200, 200, (24, 5))
    x[draw.integers(24), 0] = np.inf
    whole = reference.exact_sum(x)
    sums = reference.ExactSum(5)
    for rows in np.array_split(draw.permutation(24), blocks):
        sums.add(x[rows])
    total = sums.total()
    assert np.array_equal(total.high, whole.high) and np.array_equal(total.low, whole.low)
    assert sums.infinite.tolist() == [True, False, False, False, False]


def test_quantiles_need_bounded_memory_and_no_window() -> None:
    """Errors of every size: outer buckets collect what is too small or too large."""
    errors = 2.0 ** np.arange(-1000.0, 1000.0)
    histogram = metrics._histogram(np.concatenate([errors, [0.0, np.inf, np.inf]]))
    assert histogram[:2] == (1, 2) and sum(histogram[3:]) == 2000
    assert len(histogram) <= 3 + 2 * LIMIT * 2**metrics.BITS
    draw = np.random.default_rng(0)
    values = np.abs(draw.normal(size=5000)) ** 5
    values[:100] = 0
    whole = metrics._quantiles([metrics._histogram(values)])
    assert whole == metrics._quantiles(
        [metrics._histogram(part) for part in values.reshape(10, -1)]
    )
    for name, share in QUANTILES.items():
        expected = np.quantile(values, share, method="inverted_cdf")
        assert whole[name] == pytest.approx(expected, rel=RESOLUTION)
    assert metrics._quantiles([metrics._histogram(np.zeros(3))])["p99"] == 0.0
    infinite = metrics._quantiles([metrics._histogram(np.array([1.0, np.inf]))])
    assert infinite["p50"] == pytest.approx(1.0, rel=RESOLUTION)
    assert infinite["p99"] == math.inf


def test_windows_change_no_quantile_and_no_draw() -> None:
    options: dict[str, Any] = {
        "replicas": 16,
        "dtypes": "float16,e5m6",
        "accumulators": "wire,float32",
        "ops": "sum,mean",
        "seeds": "0,5",
        "elements": 300,
        "orders": "ring",
    }
    whole = sweep("heavy-tailed", **options)
    with mock.patch.object(planning, "WINDOW", 16 * 2 * 56):
        parts = sweep("heavy-tailed", **options)
    for one, other in zip(whole.measurements, parts.measurements, strict=True):
        for name in METRICS:
            expected = getattr(one.metrics, name)
            same = getattr(other.metrics, name) == expected
            assert same or name in ("relative_error", "input_error", "bias", "mean_error", "cosine")
            assert getattr(other.metrics, name) == pytest.approx(expected, rel=1e-12)


def test_a_bfloat16_ring_adds_in_bfloat16() -> None:
    """As real rings do; gpusim's own default, float32, has to be asked for by name."""
    options: dict[str, Any] = {"dtypes": "bfloat16", "orders": "ring", "roundings": "nearest"}
    study = sweep("lognormal", replicas=1024, elements=512, **options)
    (row,) = study.rows
    assert row.setting.name == "bfloat16 added in bfloat16, ring"
    assert row.mean.relative_error > 0.05
    x = round_to(
        Synthetic("lognormal", 512, 0).block(1024, range(1024), 0, 512), ml_dtypes.bfloat16
    )
    ring = collectives.psum(x, reduction=row.setting.reduction(0)).value.astype(np.float64)
    exact = x.astype(np.float64).sum(axis=0)
    error = np.linalg.norm(ring - exact) / np.linalg.norm(exact)
    assert row.mean.relative_error == pytest.approx(error, rel=1e-9)
    (contract,) = sweep(
        "lognormal", replicas=1024, elements=512, accumulators="contract", **options
    ).rows
    assert contract.setting.name == "bfloat16 added in float32, ring"
    assert contract.mean.relative_error < row.mean.relative_error / 30


def test_the_old_name_of_the_default_accumulator_works_and_warns() -> None:
    options: dict[str, Any] = {
        "dtypes": "bfloat16",
        "replicas": 8,
        "elements": 64,
        "orders": "ring",
    }
    with pytest.warns(DeprecationWarning, match="'own' is now 'contract'") as caught:
        old = sweep("normal", accumulators=["own"], **options)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    for same in ("contract", [None]):
        assert sweep("normal", accumulators=same, **options).rows == old.rows
    assert {row.setting.record["accumulate"] for row in old.rows} == {"float32"}


def test_wire_is_what_engines_send() -> None:
    study = sweep(
        "normal",
        replicas=4,
        dtypes="bfloat16,float8_e4m3fn",
        orders="linear,reverse,ring,tree,xla-cpu,mpich",
        roundings="nearest",
        elements=8,
    )
    used = {(r["dtype"], r["order"]): r["accumulate"] for r in (row.record for row in study.rows)}
    for dtype, contract in (("bfloat16", "float32"), ("float8_e4m3fn", "float16")):
        for order in ("linear", "reverse", "ring", "tree"):
            assert used[dtype, order] == dtype
        assert used[dtype, "xla-cpu"] == used[dtype, "mpich"] == contract


@pytest.mark.parametrize(
    ("dtype", "missing"), [("bfloat16", ["gcl-ring"]), ("float32", []), ("e5m6", None)]
)
def test_presets_say_what_they_leave_out(
    dtype: str, missing: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    study = sweep("normal", dtypes=dtype, preset="engines", replicas=4, elements=16)
    orders = [setting.order for setting in study.settings]
    if missing is None:  # engines of dtypes only
        missing = ["gloo-ring", "nccl-ring", "nccl-tree", "gcl-ring"]
    assert set(orders) <= set(TWINS) and not set(orders) & set(missing)
    assert study.about["notes"] == [f"{name} does not add {dtype}: left out" for name in missing]
    study.show()
    assert all(note in capsys.readouterr().out for note in study.about["notes"][-1:])
    if missing:
        with pytest.raises(TypeError, match=dtype):
            sweep("normal", dtypes=dtype, orders=missing, replicas=4)


def test_strings_and_single_values_are_lists() -> None:
    expected = sweep(
        "normal",
        replicas=[4, 8],
        dtypes=["bfloat16"],
        accumulators=["float32"],
        orders=["ring"],
        roundings=["stochastic"],
        seeds=[3],
        elements=32,
    )
    options: dict[str, Any] = {"orders": "ring", "roundings": "stochastic", "elements": 32}
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        for accumulate in ("float32", np.float32, Format(8, 23)):
            found = sweep(
                "normal",
                replicas="4..8",
                dtypes=dtype,
                accumulators=accumulate,
                seeds=3,
                **options,
            )
            for one, other in zip(found.rows, expected.rows, strict=True):
                assert one.mean == other.mean
    single = sweep("normal", replicas=8, dtypes=Format(5, 6), seeds="0..1", **options)
    assert single.rows[0].setting.name == "e5m6 added in e5m6, ring, stochastic"
    assert single.rows[0].seeds == (0, 1)


def test_formats_are_values_too() -> None:
    """e5m10 is float16: the same figures where partial sums have the same formats."""
    options: dict[str, Any] = {"replicas": 32, "seeds": "0,1", "elements": 200, "ops": "sum,mean"}
    for order in ("linear", "tree", "ring"):
        native = sweep("lognormal", orders=order, **options)
        general = sweep("lognormal", dtypes="e5m10", orders=order, **options)
        for one, other in zip(native.rows, general.rows, strict=True):
            # The mean's last rounding draws from its own stream.
            if one.setting.op == "sum" or not one.setting.stochastic:
                assert one.mean == other.mean, one.setting
    native = sweep("normal", dtypes="float32", **options)
    assert [r.mean for r in native.rows] == [
        r.mean for r in sweep("normal", dtypes="e8m23", **options).rows
    ]


def test_values_of_a_format_are_rounded_once_more_without_bias() -> None:
    study = sweep(
        "lognormal",
        replicas=8,
        dtypes="e4m2",
        accumulators="float32",
        orders="tree",
        roundings="stochastic",
        seeds=range(16),
        elements=2000,
    )
    (row,) = study.rows
    assert 0.1 < row.mean.correct < 0.9 and row.mean.max_ulp <= 1
    assert abs(row.mean.bias) < 5 * row.spread.bias / 4
    assert row.spread.bias < 0.01


def test_formats_without_a_short_name_are_told_apart(tmp_path: Path) -> None:
    """Two formats of one name would share their lines of the store."""
    names = [Format(4, 3, name="x"), Format(4, 3, has_infinities=False, name="x")]
    study = sweep("lognormal", dtypes=names, replicas=64, elements=50, store=tmp_path / "s")
    found = {row.record["dtype"] for row in study.rows}
    assert found == {"e4m3", "e4m3+has_infinities=false"}
    again = sweep(
        "lognormal", dtypes=names, replicas=64, elements=50, store=tmp_path / "s", resume=True
    )
    assert again.rows == study.rows


def test_infinite_inputs_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.ones((4, 8))
    x[1, 0], x[2, 1], x[3, 1] = np.inf, -np.inf, np.inf
    x[:, 2] = 60000  # overflows in float16 after two
    study = sweep(x, replicas=4, orders="linear", roundings="nearest")
    (row,) = study.rows
    assert (row.mean.infinite_input, row.mean.overflowed) == (2 / 8, 1 / 8)
    assert (row.mean.correct, row.mean.relative_error) == (1.0, 0.0)  # infinity is the best there
    study.show()
    shown = capsys.readouterr().out
    assert "25.00% of the elements have an infinite input, and enter no error" in shown
    assert "infinite input" in shown and "12.50%" in shown
    with open(study.to_csv(tmp_path / "a.csv"), newline="") as file:
        (written,) = csv.DictReader(file)
    assert (written["infinite_input"], written["overflowed"]) == ("0.25", "0.125")
    assert (written["dtype"], written["accumulate"], written["op"]) == ("float16", "float16", "sum")
    only = sweep(np.full((2, 3), -np.inf), replicas=2, roundings="nearest", orders="tree").rows[0]
    assert (only.mean.infinite_input, only.mean.overflowed) == (1.0, 0.0)
    assert math.isnan(only.mean.relative_error)


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i4", ">u2"])
def test_big_endian_arrays_are_read(kind: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 1000, (4, 6)).astype(kind)
    native = x.astype(x.dtype.newbyteorder("="))
    np.save(tmp_path / "x.npy", x)
    assert np.load(tmp_path / "x.npy").dtype == np.dtype(kind)
    expected = sweep(native, replicas=4, seeds=0, store=tmp_path / "s")
    for values in (x, tmp_path / "x.npy"):
        assert sweep(values, replicas=4, seeds=0, store=tmp_path / "s", resume=True).rows == (
            expected.rows
        )


ARRAYS = {
    "layer1.weight": np.random.default_rng(1).normal(size=(8, 3, 5)).astype(np.float32),
    "layer2.weight": np.random.default_rng(2).normal(size=(8, 40)).astype(np.float32) * 100,
    "bias": np.random.default_rng(3).lognormal(size=(8, 7)).astype(np.float32),
}


@pytest.fixture(params=["x.npz", "x.safetensors"])
def several(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    if path.suffix == ".npz":
        arrays: dict[str, Any] = dict(ARRAYS)
        np.savez(path, **arrays)
    else:
        safetensors(path, **{name: ("F32", values) for name, values in ARRAYS.items()})
    return path


def test_each_array_of_a_file_has_rows(several: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"replicas": "2..8", "orders": "ring", "seeds": "0,1"}
    study = sweep(several, tensor="*", store=tmp_path / "s", **options)
    assert study.tensors == list(ARRAYS) and study.input == f"{several.name}, 3 arrays, 62 elements"
    for setting in study.settings:
        for name, values in ARRAYS.items():
            alone = sweep(values, **options)
            assert [row.mean for row in study.of(setting, name)] == [
                row.mean for row in alone.of(setting)
            ]
        for k, row in enumerate(study.of(setting)):
            parts = [study.of(setting, name)[k].mean for name in ARRAYS]
            sizes = [15, 40, 7]
            for figure in ("correct", "mean_error"):
                mean = np.average([getattr(part, figure) for part in parts], weights=sizes)
                assert getattr(row.mean, figure) == pytest.approx(mean)
            assert setting.stochastic or row.mean.max_ulp == max(p.max_ulp for p in parts)
    with open(study.to_csv(tmp_path / "a.csv"), newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["tensor"] for row in written[:4]] == ["", *ARRAYS]
    again = sweep(several, tensor="*", store=tmp_path / "s", resume=True, **options)
    assert again.rows == study.rows
    some = sweep(several, tensor="layer*", elements=20, **options)
    assert some.tensors == ["layer1.weight", "layer2.weight"]
    assert some.input == f"{several.name}, 2 arrays, 35 elements"


def test_arrays_of_unequal_replicas_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones((8, 2)), b=np.ones((3, 2)))
    assert sweep(tmp_path / "x.npz", tensor="*").rows[-1].replicas == 2
    with pytest.raises(ValueError, match=r"replicas: 8 asked for, but x\.npz b has 3"):
        sweep(tmp_path / "x.npz", tensor="*", replicas=8)
    with pytest.raises(ValueError, match=r"has no array 'c\*'"):
        sweep(tmp_path / "x.npz", tensor="c*")


def test_json_has_every_figure_by_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones((4, 2)), b=np.ones((4, 3)))
    study = sweep(tmp_path / "x.npz", tensor="*", replicas=4, seeds=[1, 2], orders="tree")
    found = json.loads(study.to_json(tmp_path / "a.json").read_text())
    assert found["figures"] == METRICS
    assert [(m["tensor"], m["seed"]) for m in found["measurements"]] == [
        (tensor, seed) for seed in (0, 1, 2) for tensor in (None, "a", "b")
    ]


def test_carriers_hold_formats() -> None:
    assert carrier(Format(5, 6)) == np.float32 and carrier(Format(11, 30)) == np.float64
