"""Every batched rule gives each replica the bits that NumPy gives it alone, and errors in its
own shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.replicated import OVER, Operand, check, normal, outcome, sizes_of

DTYPES = ("f2", "f4", "f8", "i4", "?", "F", ml_dtypes.bfloat16)
SHAPES = ((), (0,), (7,), (1, 4), (3, 0), (2, 3, 5))
Call = Callable[..., Any]


def operand(shape: tuple[int, ...], over: str | None, dtype: Any = "f8", seed: int = 0) -> Operand:
    return normal(np.random.default_rng([seed, *shape]), shape, over, dtype)


def with_nans(item: Operand) -> Operand:
    data = np.array(item.data)
    if data.dtype.kind in "fc":
        data[np.random.default_rng(1).random(data.shape) < 0.3] = np.nan
    return Operand(data, item.over)


def each(table: dict[str, Call]) -> Any:
    """One test for each row, named after it; functions that this NumPy lacks are left out."""
    return pytest.mark.parametrize("call", [pytest.param(c, id=name) for name, c in table.items()])


def named(names: str) -> dict[str, Call]:
    return {name: getattr(np, name) for name in names.split() if hasattr(np, name)}


# Reductions.

REDUCTIONS = named(
    "sum prod mean std var max min amax amin all any ptp count_nonzero median average argmax "
    "argmin nansum nanprod nanmean nanstd nanvar nanmax nanmin nanmedian nanargmax nanargmin"
)
ONE_AXIS = {"argmax", "argmin", "nanargmax", "nanargmin"}


def axes_of(ndim: int, one: bool) -> list[Any]:
    several = [] if one or ndim < 2 else [(0, -1), (1, 0)]
    return [None, *range(-ndim, ndim), *several] + ([] if one else [()])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@each(REDUCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_reductions_have_the_bits_of_one_replica(call: Call, dtype: Any) -> None:
    one = call.__name__ in ONE_AXIS
    for shape in SHAPES:
        for number, axis in enumerate(axes_of(len(shape), one)):
            for keepdims in (False, True):
                item = operand(shape, OVER[(number + len(shape)) % 4], dtype)
                check(lambda x, a=axis, k=keepdims: call(x, axis=a, keepdims=k), item, batched=None)


@pytest.mark.parametrize("dtype", ("f2", "f4", "f8", "i4"))
@each(REDUCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_reductions_of_ordinary_arrays_are_batched(call: Call, dtype: Any) -> None:
    if call is np.nanmedian and dtype == "f2":
        return
    nans = call.__name__.startswith("nan") and "arg" not in call.__name__
    for shape, axis in (((7,), None), ((7,), 0), ((4, 5), None), ((4, 5), -1), ((4, 5), 0)):
        for over in ("i", "j", "ij", ""):
            item = operand(shape, over, dtype)
            check(lambda x, a=axis: call(x, axis=a), with_nans(item) if nans else item)


LONG = {
    "sum": lambda x: np.sum(x),
    "sum of rows": lambda x: np.sum(x, -1),
    "sum of columns": lambda x: np.sum(x, 0),
    "sum in float64": lambda x: np.sum(x, dtype=np.float64),
    "sum of columns in float64": lambda x: np.sum(x, 0, dtype=np.float64),
    "prod": lambda x: np.prod(x, -1),
    "mean": lambda x: np.mean(x),
    "mean of rows": lambda x: np.mean(x, -1),
    "std": lambda x: np.std(x),
    "var of columns": lambda x: np.var(x, 0, ddof=1),
    "nansum": lambda x: np.nansum(x),
    "nanmean": lambda x: np.nanmean(x),
    "nanstd": lambda x: np.nanstd(x, -1),
    "norm": lambda x: np.sqrt((x * x).sum()),
    "transposed": lambda x: np.sum(x.T, 0),
    "transposed all": lambda x: np.mean(x.T),
    "sliced": lambda x: np.sum(x[..., ::2]),
    "reversed": lambda x: np.sum(np.flip(x)),
    "broadcast": lambda x: np.sum(np.broadcast_to(x, (2, *x.shape)), 0),
    "trapezoid": lambda x: np.trapezoid(x),
    "cumsum": lambda x: np.cumsum(x),
    "average": lambda x: np.average(x, weights=x * x),
    "logaddexp": lambda x: np.logaddexp.reduce(x, None),
    "masked": lambda x: np.sum(x, where=x > 0),
}


@pytest.mark.parametrize("dtype", ("f2", "f4", "f8", "i4"))
@each(LONG)
@pytest.mark.filterwarnings("ignore")
def test_long_reductions_have_the_bits_of_one_replica(call: Call, dtype: str) -> None:
    for shape in ((9001,), (3, 4500), (140, 77), (9001, 1)):
        spread = operand(shape, "i", "f8").data * 10 ** operand(shape, "i", "f8", 5).data
        check(call, Operand(spread.astype(dtype), "i"))


def interleaved(item: Operand, last: int = 1) -> Operand:
    """The same values in a layout whose mapped axes have smaller strides than the first visible
    ones."""
    mapped = len(item.over or "")
    ndim = item.data.ndim
    if ndim == mapped:
        return item
    first = ndim - min(last, ndim - mapped)
    forward = [*range(mapped, first), *range(mapped), *range(first, ndim)]
    moved = np.ascontiguousarray(np.transpose(item.data, forward))
    return Operand(np.transpose(moved, np.argsort(forward)), item.over)


@pytest.mark.parametrize("last", (0, 1))
@each(LONG)
@pytest.mark.filterwarnings("ignore")
def test_interleaved_replicas_are_reduced_in_one_replicas_order(call: Call, last: int) -> None:
    for dtype in ("f2", "f4"):
        for shape in ((1201,), (13, 150), (150, 3, 7)):
            check(call, interleaved(operand(shape, "ij", dtype), last), batched=None)


def test_interleaved_replicas_are_summed_along_one_axis_without_the_route() -> None:
    for last in (0, 1):
        check(lambda x: np.sum(x, 0), interleaved(operand((150, 40), "ij", "f4"), last))
        check(lambda x: np.max(x, 0), interleaved(operand((150, 40), "ij", "f4"), last))


def test_signed_zeros_survive_max_and_min_in_any_layout() -> None:
    for dtype in ("f2", "f4", "f8"):
        for last in (0, 1, 2):
            zeros = operand((9, 17), "ij", dtype, 3).data * 0
            for call in (np.max, np.min, np.fmax.reduce, np.minimum.accumulate):
                check(lambda x, c=call: c(x, axis=0), interleaved(Operand(zeros, "ij"), last))


MASKED = {
    "sum": lambda x, m: np.sum(x, where=m),
    "sum of rows": lambda x, m: np.sum(x, axis=-1, where=m, keepdims=True),
    "mean": lambda x, m: np.mean(x, where=m),
    "mean of columns": lambda x, m: np.mean(x, 0, where=m),
    "std": lambda x, m: np.std(x, where=m),
    "max": lambda x, m: np.max(x, initial=-9, where=m),
    "any": lambda x, m: np.any(x, where=m),
    "nansum": lambda x, m: np.nansum(x, where=m),
    "add.reduce": lambda x, m: np.add.reduce(x, where=m),
    "unmapped mask": lambda x, m: np.sum(x, where=np.array([True, False, True, True, False])),
    "method": lambda x, m: x.sum(0, where=m),
}


@each(MASKED)
@pytest.mark.filterwarnings("ignore")
def test_masked_reductions(call: Call) -> None:
    for dtype in ("f2", "f4", "i4"):
        for over, mask_over in (("i", "j"), ("ij", "i"), ("", "ij"), ("j", "j"), (None, "i")):
            for mask_shape in ((4, 5), (5,), (4, 1)):
                if over is None and call is MASKED["method"]:
                    continue
                if over is None and call is MASKED["unmapped mask"]:
                    continue
                check(call, operand((4, 5), over, dtype), operand(mask_shape, mask_over, "?"))


OPTIONS = {
    "sum initial": lambda x: np.sum(x, 0, initial=3),
    "prod dtype": lambda x: np.prod(x, -1, dtype="f8", keepdims=True),
    "mean dtype": lambda x: np.mean(x, dtype="f8"),
    "var correction": lambda x: np.var(x, 0, ddof=1),
    "std of given mean": lambda x: np.std(x, 0, mean=np.mean(x, 0, keepdims=True)),
    "argmax keepdims": lambda x: np.argmax(x, keepdims=True),
    "quantile": lambda x: np.quantile(x, 0.3),
    "quantiles": lambda x: np.quantile(x, [0.25, 0.5, 1.0], axis=0, keepdims=True),
    "quantiles of all": lambda x: np.quantile(x, np.array([[0.25, 0.5]]), method="nearest"),
    "percentile": lambda x: np.percentile(x, [10, 50], axis=-1, method="lower"),
    "percentile over two": lambda x: np.percentile(x, 35, axis=(0, 1)),
    "nanpercentile": lambda x: np.nanpercentile(x, [10, 50], axis=-1),
    "nanquantile": lambda x: np.nanquantile(x, 0.5),
    "median overwriting": lambda x: np.median(x, overwrite_input=True) + x,
    "weighted": lambda x: np.average(x, axis=-1, weights=[1, 2, 3, 4.0, 5]),
    "weighted columns": lambda x: np.average(x, axis=0, weights=[1, 2, 3, 4], keepdims=True),
    "axis by name": lambda x: np.sum(a=x, axis=1),
    "axis from an array": lambda x: np.sum(x, axis=np.int8(1)),
    "count_nonzero": lambda x: np.count_nonzero(x, axis=1, keepdims=True),
    "trace": lambda x: np.trace(x, 1),
    "max of all": lambda x: np.max(x, (0, 1)),
}
CUMULATIVE = {
    "cumsum": lambda x: np.cumsum(x, -1),
    "cumsum of all": lambda x: np.cumsum(x),
    "cumprod": lambda x: np.cumprod(x, 0, dtype="f8"),
    "nancumsum": lambda x: np.nancumsum(x, 0),
    "nancumprod": lambda x: np.nancumprod(x),
    "cumulative_sum": lambda x: np.cumulative_sum(x, axis=1, include_initial=True),
    "cumulative_prod": lambda x: np.cumulative_prod(np.ravel(x)),
    "diff": lambda x: np.diff(x),
    "second diff": lambda x: np.diff(x, 2, 0),
    "diff with edges": lambda x: np.diff(x, axis=0, prepend=x[:1], append=7),
    "ediff1d": lambda x: np.ediff1d(x),
    "gradient": lambda x: np.gradient(x),
    "gradient along one": lambda x: np.gradient(x, 2.0, axis=1, edge_order=2),
    "gradient between points": lambda x: np.gradient(x, [0, 1, 3, 4.0], [0, 1, 2, 5, 9.0]),
    "trapezoid": lambda x: np.trapezoid(x, dx=0.5, axis=0),
    "trapezoid between points": lambda x: np.trapezoid(x, [0, 1, 3, 4.0, 6]),
    "trapezoid between own points": lambda x: np.trapezoid(x, np.cumsum(x, 0), axis=0),
    "trapezoid of a constant": lambda x: np.trapezoid(np.ones((2, 5)), x[0]),
    "unwrap": lambda x: np.unwrap(x, axis=0),
}
NEWER = {"cumulative_sum", "cumulative_prod"}
SHAPING = {
    "reshape": lambda x: np.reshape(x, (2, -1)),
    "reshape in columns": lambda x: np.reshape(x, (5, 4), order="F"),
    "reshape as it lies": lambda x: np.reshape(x.T, -1, order="A"),
    "reshape to one number": lambda x: np.reshape(x, 20),
    "ravel": lambda x: np.ravel(x),
    "ravel columns": lambda x: np.ravel(x, "F"),
    "ravel as it lies": lambda x: np.ravel(x.T, "K"),
    "resize": lambda x: np.resize(x, (3, 9)),
    "expand_dims": lambda x: np.expand_dims(x, (0, -1)),
    "squeeze": lambda x: np.squeeze(x[:1, None]),
    "squeeze one": lambda x: np.squeeze(x[:1, None], 1),
    "broadcast_to": lambda x: np.broadcast_to(x, (2, 4, 5)),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x, x[0], 3.0),
    "atleast_1d": lambda x: np.atleast_1d(x[0, 0], x),
    "atleast_2d": lambda x: np.atleast_2d(x[0, 0], x[0], x),
    "atleast_3d": lambda x: np.atleast_3d(x[0, 0], x[0], x),
    "transpose": lambda x: np.transpose(x),
    "permute_dims": lambda x: np.permute_dims(x[None], (1, -1, 0)),
    "matrix_transpose": lambda x: np.matrix_transpose(x[None]),
    "moveaxis": lambda x: np.moveaxis(x[None], (0, 2), (-1, 0)),
    "swapaxes": lambda x: np.swapaxes(x, 0, -1),
    "rollaxis": lambda x: np.rollaxis(x[None], 2, -2),
    "flip": lambda x: np.flip(x),
    "flip one": lambda x: np.flip(x, -1),
    "flipud": lambda x: np.flipud(x),
    "fliplr": lambda x: np.fliplr(x),
    "rot90": lambda x: np.rot90(x, 3),
    "rot90 back": lambda x: np.rot90(x[None], axes=(-1, 0)),
    "roll": lambda x: np.roll(x, 3),
    "roll two": lambda x: np.roll(x, (1, -2), (0, -1)),
    "roll twice": lambda x: np.roll(x, (1, 2), (0, 0)),
    "tile": lambda x: np.tile(x, 2),
    "tile more": lambda x: np.tile(x, (2, 1, 3)),
    "repeat": lambda x: np.repeat(x, 2),
    "repeat rows": lambda x: np.repeat(x, [1, 0, 2, 1], axis=0),
    "pad": lambda x: np.pad(x, 2),
    "pad constants": lambda x: np.pad(x, ((1, 0), (2, 1)), constant_values=((1, 2), (3, 1))),
    "pad edge": lambda x: np.pad(x, (1, 2), "edge"),
    "pad reflect": lambda x: np.pad(x, 3, "reflect"),
    "pad wrap": lambda x: np.pad(x, ((0, 0), (2, 2)), "wrap"),
    "pad mean": lambda x: np.pad(x, 1, "mean", stat_length=2),
    "copy": lambda x: np.copy(x),
    "diagonal": lambda x: np.diagonal(x[None], 1, -2, -1),
    "diag of a matrix": lambda x: np.diag(x, -1),
    "diag of a vector": lambda x: np.diag(x[0], 2),
    "diagflat": lambda x: np.diagflat(x, -1),
    "tril": lambda x: np.tril(x, 1),
    "triu of a vector": lambda x: np.triu(x[0]),
}
JOINING = {
    "concatenate": lambda x: np.concatenate([x, x], -1),
    "concatenate all": lambda x: np.concatenate([x, 1 + x[0]], None),
    "concatenate rows of one": lambda x: np.concatenate(x),
    "concatenate dtypes": lambda x: np.concatenate([x, np.ones((1, 5), "f8")], dtype="f8"),
    "stack": lambda x: np.stack([x, x], -1),
    "vstack": lambda x: np.vstack([x[0], x]),
    "hstack": lambda x: np.hstack([x, x[:, :1]]),
    "hstack vectors": lambda x: np.hstack([x[0], 1.0]),
    "dstack": lambda x: np.dstack([x, x]),
    "column_stack": lambda x: np.column_stack([x[:, 0], x]),
    "split": lambda x: np.split(x, 2),
    "split at": lambda x: np.split(x, [1, 3], axis=-1),
    "array_split": lambda x: np.array_split(x, 3, axis=1),
    "hsplit": lambda x: np.hsplit(x, [2]),
    "vsplit": lambda x: np.vsplit(x, 2),
    "dsplit": lambda x: np.dsplit(x[None], 5),
    "unstack": lambda x: np.unstack(x, axis=1),
    "block": lambda x: np.block([[x, x[:, :1]], [np.ones((1, 6))]]),
    "block of a row": lambda x: np.block([x[0], 3.0, x[1]]),
    "append": lambda x: np.append(x, 1),
    "append rows": lambda x: np.append(x, x[:1], axis=0),
    "insert": lambda x: np.insert(x, 1, 7, axis=1),
    "insert a row": lambda x: np.insert(x, -1, x[0], axis=0),
    "insert several": lambda x: np.insert(x, [0, 3, 3], x[:, :3], axis=1),
    "insert into all": lambda x: np.insert(x, [2, 4], [8, 9]),
    "delete": lambda x: np.delete(x, 1, 0),
    "delete of all": lambda x: np.delete(x, [0, -1]),
}
ORDERING = {
    "sort": lambda x: np.sort(x, 0),
    "sort all": lambda x: np.sort(x, None),
    "stable sort": lambda x: np.sort(x, stable=True),
    "argsort": lambda x: np.argsort(x, kind="stable"),
    "partition": lambda x: np.partition(x, 2, 0)[2],
    "argpartition": lambda x: np.take_along_axis(x, np.argpartition(x, [1, 3]), 1)[:, 1],
    "lexsort": lambda x: np.lexsort((x[0], x[1])),
    "lexsort of rows": lambda x: np.lexsort(x, axis=0),
    "searchsorted": lambda x: np.searchsorted([-0.5, 0.0, 0.7], x, "right"),
    "searchsorted rows": lambda x: np.searchsorted(np.sort(x[0]), x),
    "searchsorted constant": lambda x: np.searchsorted(np.sort(x[0]), 0.25, side="right"),
    "searchsorted by sorter": lambda x: np.searchsorted(x[0], x, sorter=np.argsort(x[0])),
    "digitize": lambda x: np.digitize(x, [-1, 0.0, 1]),
    "bincount": lambda x: np.bincount((x[0] > 0).astype("i8"), minlength=4),
    "bincount weights": lambda x: np.bincount(np.array([0, 1, 1, 0, 3]), x[1]),
    "histogram": lambda x: np.histogram(x, [-1, -0.5, 0.0, 1.5])[0],
    "histogram range": lambda x: np.histogram(x, 7, (-1, 1))[0],
    "histogram density": lambda x: np.histogram(x, 3, (-5, 5), density=True)[0],
}
ELEMENTWISE = {
    "where": lambda x: np.where(x > 0, x, -1),
    "where of 0-d": lambda x: np.where(x[0, 0] > 0, x, 2.5),
    "select": lambda x: np.select([x > 1, x > 0], [x, 2 * x], -1),
    "clip": lambda x: np.clip(x, 0, 1),
    "clip below": lambda x: np.clip(x, x[0], None),
    "clip by names": lambda x: np.clip(x, min=-1, max=1),
    "round": lambda x: np.round(x, 1),
    "around": lambda x: np.around(x),
    "fix": lambda x: np.fix(x),
    "real": lambda x: np.real(x),
    "imag": lambda x: np.imag(x * 1j),
    "angle": lambda x: np.angle(x + 1j),
    "conj": lambda x: np.conj(x),
    "isclose": lambda x: np.isclose(x, x[0], atol=0.5),
    "allclose": lambda x: np.allclose(x, x[0], atol=2.5),
    "array_equal": lambda x: np.array_equal(x, np.abs(x)),
    "array_equal with nan": lambda x: np.array_equal(np.sqrt(x), np.sqrt(x), equal_nan=True),
    "array_equal of shapes": lambda x: np.array_equal(x, x[0]) | np.False_,
    "array_equiv": lambda x: np.array_equiv(x, x[0]),
    "nan_to_num": lambda x: np.nan_to_num(np.sqrt(x), nan=7.0),
    "isreal": lambda x: np.isreal(x),
    "iscomplex": lambda x: np.iscomplex(x + 0j),
    "sinc": lambda x: np.sinc(x),
    "i0": lambda x: np.i0(x),
    "interp": lambda x: np.interp(x, [-1, 0, 2.0], [3, 1, 0.5]),
    "isin": lambda x: np.isin(np.round(x), [0, 1]),
    "result_type": lambda x: str(np.result_type(x, np.float32)),
    "common_type": lambda x: str(np.common_type(x)),
    "isposinf": lambda x: np.isposinf(x) | np.isneginf(x),
}
CREATION = {
    "zeros_like": lambda x: np.zeros_like(x),
    "ones_like": lambda x: np.ones_like(x, dtype="i2", shape=(2, 2)),
    "full_like": lambda x: np.full_like(x, 3),
    "full_like mapped": lambda x: np.full_like(x, x[0]),
    "full_like converting": lambda x: np.full_like(np.ones(5), x[0], dtype="i4"),
    "zeros like": lambda x: np.zeros((2, 3), like=x),
    "array like": lambda x: np.array([x[0], x[1]], dtype="f4", like=x),
    "asarray like": lambda x: np.asarray(x, like=x),
    "arange like": lambda x: np.arange(4, like=x),
}
FAMILIES = OPTIONS | CUMULATIVE | SHAPING | JOINING | ORDERING | ELEMENTWISE | CREATION
FAMILIES = {
    name: call
    for name, call in FAMILIES.items()
    if not (name in NEWER | {"unstack"} and not hasattr(np, name))
}


@each(FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_rules_have_the_bits_of_one_replica_and_are_batched(call: Call) -> None:
    for over in OVER:
        for dtype in ("f4", "f8", "i4"):
            if dtype == "i4" and call in (FAMILIES["bincount weights"], FAMILIES["argpartition"]):
                continue
            check(call, operand((4, 5), over, dtype), batched=True if over else None)


@each(FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_rules_serve_other_dtypes_or_leave_them_to_the_route(call: Call) -> None:
    for dtype in ("f2", "F", "?", "u1", ml_dtypes.bfloat16, ">f4"):
        check(call, operand((4, 5), "ij", dtype), batched=None)


@each(FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_rules_meet_nans_interleaved_layouts_and_unusual_shapes(call: Call) -> None:
    check(call, with_nans(operand((4, 5), "ij", "f4")), batched=None)
    if call not in (FAMILIES["reshape as it lies"], FAMILIES["ravel as it lies"]):
        for last in (
            0,
            1,
        ):  # (what lies how after x.T is not the same on the route, which stacks copies)
            check(call, interleaved(operand((4, 5), "ij", "f4"), last), batched=None)
    for shape in ((), (0,), (1,), (5,), (0, 5), (1, 1), (2, 3, 5)):
        check(call, operand(shape, "j", "f4"), batched=None)


PAIRS = {
    "where": lambda x, y, z: np.where(x > 0, y, z),
    "select": lambda x, y, z: np.select([x > 0, y > 0], [y, z], x),
    "clip": lambda x, y, z: np.clip(x, y, z),
    "isclose": lambda x, y, z: np.isclose(x, y, atol=abs(z)),
    "allclose": lambda x, y, z: np.allclose(x, y, atol=2),
    "array_equal": lambda x, y, z: np.array_equal(x, y) == np.array_equiv(y, z),
    "concatenate": lambda x, y, z: np.concatenate([x, y, z]),
    "stack": lambda x, y, z: np.stack([x, y, z], 1),
    "column_stack": lambda x, y, z: np.column_stack([x, y]),
    "block": lambda x, y, z: np.block([[x, y], [z, x]]),
    "append": lambda x, y, z: np.append(x, y),
    "insert": lambda x, y, z: np.insert(x, [1, 2], y[..., :2]),
    "lexsort": lambda x, y, z: np.lexsort((np.round(x), y)),
    "searchsorted": lambda x, y, z: np.searchsorted(np.sort(np.ravel(x)), y, "right"),
    "searchsorted nan": lambda x, y, z: np.searchsorted(np.sort(np.sqrt(np.ravel(x))), np.sqrt(y)),
    "bincount": lambda x, y, z: np.bincount(np.ravel(x > 0) * 1, np.ravel(y), minlength=3),
    "broadcast_arrays": lambda x, y, z: np.broadcast_arrays(x, y[..., :1], z),
    "trapezoid": lambda x, y, z: np.trapezoid(x, y),
    "diff": lambda x, y, z: np.diff(x, prepend=y[..., :1], append=z[..., -1:]),
    "average": lambda x, y, z: np.average(x, weights=y * y),
    "average of rows": lambda x, y, z: np.average(x, axis=-1, weights=abs(np.ravel(y))[:5]),
    "full_like": lambda x, y, z: np.full_like(x, y[..., 0, None]),
    "array like": lambda x, y, z: np.array([[x, y], [z, x]], like=x),
    "interp": lambda x, y, z: np.interp(x, np.sort(np.ravel(y)), np.ravel(z)),
    "isin": lambda x, y, z: np.isin(np.round(x), np.round(y)),
}
ON_THE_ROUTE = {"interp", "isin"}
OVERS = (("i", "j", None), ("j", "ij", "i"), (None, "i", ""), ("", "", "j"), ("ij", "", "ij"))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.filterwarnings("ignore")
def test_operands_over_different_axes_meet(name: str) -> None:
    for overs in OVERS:
        for dtype, shape in (("f4", (5,)), ("f8", (2, 5)), ("i4", (2, 5))):
            items = [operand(shape, over, dtype, seed) for seed, over in enumerate(overs)]
            if name == "array like" and overs[0] is None:
                continue
            check(PAIRS[name], *items, batched=None if name in ON_THE_ROUTE else True)


# Errors, and what must not happen.

ERRORS: dict[str, tuple[Call, type[Exception], str]] = {
    "sum": (
        lambda x: np.sum(x, 2),
        np.exceptions.AxisError,
        "axis 2 is out of bounds .* dimension 2",
    ),
    "mean": (lambda x: x.mean(-3), np.exceptions.AxisError, "axis -3 .* dimension 2"),
    "sort": (lambda x: np.sort(x, 5), np.exceptions.AxisError, "axis 5 .* dimension 2"),
    "argmax": (lambda x: x.argmax(2), np.exceptions.AxisError, "axis 2 .* dimension 2"),
    "cumsum": (lambda x: np.cumsum(x, 2), np.exceptions.AxisError, "axis 2 .* dimension 2"),
    "concatenate": (lambda x: np.concatenate([x, x], 2), np.exceptions.AxisError, "dimension 2"),
    "stack": (lambda x: np.stack([x, x], 3), np.exceptions.AxisError, "dimension 3"),
    "flip": (lambda x: np.flip(x, 2), np.exceptions.AxisError, "dimension 2"),
    "add.reduce": (lambda x: np.add.reduce(x, 2), np.exceptions.AxisError, "dimension 2"),
    "twice": (lambda x: np.sum(x, (0, 0)), ValueError, "duplicate"),
    "reshape": (lambda x: x.reshape(3, -1), ValueError, r"size 20 into shape \(3,"),
    "transpose": (lambda x: x.transpose(0), ValueError, "axes don't match"),
    "broadcast_to": (lambda x: np.broadcast_to(x, (3, 5)), ValueError, r"\(4,5\)"),
    "shapes": (lambda x: x + np.ones(4), ValueError, r"\(4,5\) \(4,\)"),
    "matmul": (lambda x: x @ x, ValueError, "mismatch"),
    "empty max": (lambda x: np.max(x[:0]), ValueError, "zero-size"),
    "split": (lambda x: np.split(x, 3), ValueError, "equal division"),
    "bincount": (lambda x: np.bincount(x[0]), TypeError, "safe"),
    "unequal": (lambda x: np.bincount(np.argsort(x[:, 0])[:2]), ValueError, "different shape"),
    "out": (lambda x: np.sum(x, 0, None, np.zeros(5)), TypeError, r"plain .*out=.*like=x"),
    "out by method": (lambda x: x.clip(0, 1, np.zeros((4, 5))), TypeError, r"plain .*like=x"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_numpys_in_one_replicas_shapes(name: str) -> None:
    call, kind, message = ERRORS[name]
    for over in ("ij", "j", ""):
        if name == "unequal" and over != "ij":
            continue
        if "out" in name and not over:
            continue  # the result is the same on all replicas and fits a plain array
        error = outcome(call, (operand((4, 5), over),)).error
        assert type(error) is kind
        with pytest.raises(kind, match=message):
            raise error


def test_nothing_writes_into_its_operands() -> None:
    item = operand((4, 5), "i")
    before = item.data.copy()
    for call in (
        lambda x: np.nan_to_num(x, copy=False),
        lambda x: np.median(x, overwrite_input=True),
        lambda x: np.percentile(x, 5, overwrite_input=True),
    ):
        outcome(call, (item,))
        assert (item.data == before).all()


def test_fills_and_shapes_carry_no_mapped_axis() -> None:
    def f(x: Any) -> list[tuple[Any, ...]]:
        made = (np.zeros_like(x), np.ones(3, like=x), np.full_like(x, 2), np.empty_like(x))
        return [array.mapped_axes for array in made] + [np.full_like(x, x[0]).mapped_axes]

    assert outcome(lambda x: f(x) == [()] * 4 + [("i",)], (operand((4, 5), "i"),)).leaves == (True,)


@pytest.mark.parametrize("force", (False, True))
def test_shapes_and_dtypes_are_plain_values_on_either_route(force: bool) -> None:
    def f(x: Any) -> tuple[Any, ...]:
        known = (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1), np.can_cast(x, "f8"))
        return (*known, np.iscomplexobj(x), np.isrealobj(x), np.result_type(x, 1.0) == np.float32)

    found = outcome(f, (operand((4, 5), "ij", "f4"),), force)
    assert found.leaves == (4, 5, 2, 20, 5, True, False, True, True)


# Any arrays at all.


@st.composite
def operands(draw: Any) -> Operand:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    item = operand(
        shape, draw(st.sampled_from(OVER)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    )
    if draw(st.booleans()):
        item = with_nans(item)
    return interleaved(item, draw(st.integers(0, len(shape)))) if draw(st.booleans()) else item


@given(operands(), st.sampled_from(sorted(REDUCTIONS)), st.data())
@settings(max_examples=150)
@pytest.mark.filterwarnings("ignore")
def test_any_reduction_of_anything(item: Operand, name: str, data: Any) -> None:
    ndim = item.data.ndim - len(sizes_of(item.over))
    axis = data.draw(st.sampled_from(axes_of(ndim, name in ONE_AXIS)))
    check(lambda x: REDUCTIONS[name](x, axis=axis), item, batched=None)


@given(operands(), st.sampled_from(sorted(FAMILIES)))
@settings(max_examples=150)
@pytest.mark.filterwarnings("ignore")
def test_any_rule_on_anything(item: Operand, name: str) -> None:
    if not name.endswith("as it lies"):
        check(FAMILIES[name], item, batched=None)
