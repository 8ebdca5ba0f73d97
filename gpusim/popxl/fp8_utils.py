"""8-bit floats on the host: conversions, and the scale with the least loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusim.rounding import round_to

from . import dtypes

__all__ = [
    "CandidateConfig",
    "FpDef",
    "calculate_candidate_metric",
    "calculate_metric_mse",
    "find_exponential_range",
    "host_fp8_mse_scale",
    "host_fp8_mse_scale_pb",
    "host_pow2scale_cast_from_fp8",
    "host_pow2scale_cast_to_fp8",
    "log_histogram",
]

min_scaling_bias, max_scaling_bias = -31, 31  # the range of the IPU's six bits of scale


class FpDef(NamedTuple):
    """A floating-point format, as far as scales depend on it."""

    num_exp_bits: int
    num_mantissa_bits: int
    fix_exponent_bias: int
    include_denorm: bool  #: whether numbers below the least normal one count
    has_nans: bool  #: whether the highest exponent is taken by infinities and NaNs


ieee_fp32_no_denorms = FpDef(8, 23, 127, False, True)
ieee_fp16_denorms = FpDef(5, 10, 15, True, True)
float8_152_def = FpDef(5, 2, 16, True, False)
float8_143_def = FpDef(4, 3, 8, True, False)

_FORMATS = {dtypes.float8_143: float8_143_def, dtypes.float8_152: float8_152_def}
_WIDE = (dtypes.float16, dtypes.float32, dtypes.float64)


def find_exponential_range(fp_def: FpDef) -> tuple[int, int]:
    """The least and the greatest exponent of a format's numbers.

    >>> find_exponential_range(float8_143_def)
    (-10, 7)
    """
    lowest = 1 - fp_def.fix_exponent_bias
    if fp_def.include_denorm:
        lowest -= fp_def.num_mantissa_bits
    return lowest, (1 << fp_def.num_exp_bits) - 1 - fp_def.has_nans - fp_def.fix_exponent_bias


def log_histogram(src: NDArray[Any], ftype: FpDef) -> tuple[NDArray[Any], list[float]]:
    """Count the magnitudes between neighbouring powers of two.

    **Arguments**: `ftype`: the format whose exponents the powers have.

    **Returns** the counts and the powers. There is one more count; zeros are in the first one.

    >>> counts, limits = log_histogram(np.array([1.5, -3.0, 0.0]), float8_143_def)
    >>> counts[[0, limits.index(1.0) + 1, limits.index(2.0) + 1]].tolist()
    [1.0, 1.0, 1.0]
    """
    lowest, highest = find_exponential_range(ftype)
    limits = [math.ldexp(1.0, exponent) for exponent in range(lowest, highest)]
    magnitudes = np.abs(np.asarray(src, np.float64).reshape(-1))
    bins = np.searchsorted(np.array(limits), magnitudes, side="right")
    return np.bincount(bins, minlength=len(limits) + 1).astype(np.float64), limits


class CandidateConfig:
    """The loss of a source's numbers in an 8-bit format: its span, and its rounding."""

    def __init__(self, format: Any, src_ftype: FpDef, dest_ftype: FpDef, src_type: Any) -> None:
        self.format = format
        self.exponent_size = dest_ftype.num_exp_bits
        self.mantissa_size = dest_ftype.num_mantissa_bits
        self.fix_exponent_bias = dest_ftype.fix_exponent_bias
        source = ieee_fp32_no_denorms if src_type == np.float32 else ieee_fp16_denorms
        # the share that PopXL has for rounding, less than the format's own
        self.quantisation_error = 2.0 ** (-2 * (source.num_mantissa_bits - self.mantissa_size))
        lowest, highest = find_exponential_range(dest_ftype)
        first, last = find_exponential_range(src_ftype)
        self.format_span = highest - lowest + 1
        #: where in the source's powers the format's least number lies, for the first and last scale
        self.min_src_exp_index = max(0, lowest + min_scaling_bias - first)
        self.max_src_exp_index = min(lowest + max_scaling_bias - first, last - first)
        self.num_exp_src = self.max_src_exp_index - self.min_src_exp_index + 1


def calculate_metric_mse(
    histogram: NDArray[Any],
    limits: Sequence[float],
    src_bias_starting_indices: Sequence[int],
    candidate: CandidateConfig,
) -> tuple[float, int]:
    """The least mean squared error, and its scaling bias; the middle one of several.

    Numbers below the format's range, and those above it, are lost; those within are rounded. The
    terms are added in PopXL's order: which errors are equal depends on it.
    """
    counts = np.asarray(histogram, np.float64)[1:]
    used = np.flatnonzero(counts).tolist()
    errors = []
    for number, start in enumerate(src_bias_starting_indices):
        end = start + candidate.format_span
        highest = limits[number + candidate.format_span - 1]  # not the format's greatest number
        error = (limits[0] / 2) ** 2 if start > 0 else 0.0
        for index in used:
            count = float(counts[index])
            if index < start:
                error += limits[index] ** 2 * count
            elif index < end:
                error += limits[index] ** 2 * count * candidate.quantisation_error
            else:
                error += (highest - limits[index]) ** 2 * count
        errors.append(error)
    least = min(errors)
    best = [index for index, error in enumerate(errors) if error == least]
    return least, best[len(best) // 2] + min_scaling_bias


def calculate_candidate_metric(
    hist_norm: NDArray[Any],
    limits: Sequence[float],
    candidate: CandidateConfig,
    metric_type: str | None = None,
) -> tuple[float, int]:
    """`calculate_metric_mse` for all scales; RuntimeError for a metric other than "MSE"."""
    if metric_type != "MSE":
        raise RuntimeError("Only MSE metric is supported.")
    first = candidate.min_src_exp_index
    starts = range(first, first + candidate.num_exp_src)
    return calculate_metric_mse(hist_norm, limits, starts, candidate)


def host_fp8_mse_scale(src: NDArray[Any], dtype: dtypes.dtype | None = None) -> tuple[float, int]:
    """The `log2_scale` with the least loss in a cast to an 8-bit float, by a histogram.

    **Arguments**

    - `src`: numbers of float16 or float32.
    - `dtype`: `popxl.float8_143`, the default, or `popxl.float8_152`.

    **Returns**: the mean squared error, and the scale.

    **Raises**: RuntimeError: for other dtypes.

    >>> host_fp8_mse_scale(np.full(4, 2.0**-20, np.float32), dtypes.float8_143)[1]
    18
    """
    if src.dtype not in (np.float16, np.float32):
        raise RuntimeError(f"dtype {src.dtype} not currently supported.")
    target = _FORMATS[dtype] if dtype in _FORMATS else float8_143_def
    histogram, limits = log_histogram(src, ieee_fp32_no_denorms)
    candidate = CandidateConfig(dtype, ieee_fp32_no_denorms, target, src.dtype)
    normalised = histogram / histogram.sum()
    metric, bias = calculate_candidate_metric(normalised, limits, candidate, "MSE")
    return metric, -bias


def host_fp8_mse_scale_pb(src: Any, dtype: dtypes.dtype | None = None) -> int:
    """The scale of `host_fp8_mse_scale`, for torch tensors and lists too. The dtype is required.

    **Raises**: RuntimeError: for other dtypes.
    """
    _check_float8(dtype)
    return host_fp8_mse_scale(_numbers(src), dtype)[1]


def host_pow2scale_cast_to_fp8(
    src: Any,
    dtype: dtypes.dtype | None = None,
    log2_scale: int = 0,
    nan_on_overflow: bool = True,
) -> NDArray[Any]:
    """``src * 2 ** log2_scale`` as an 8-bit float, rounded once.

    **Arguments**

    - `src`: float16, float32 or float64 as an array, a torch tensor or lists.
    - `dtype`: `popxl.float8_143` or `popxl.float8_152`.
    - `log2_scale`: -32 to 31.
    - `nan_on_overflow`: whether too large numbers become NaN, or else the greatest number.

    The array has ml_dtypes' dtype of the format.

    **Raises**: RuntimeError: for other dtypes.

    >>> host_pow2scale_cast_to_fp8(np.array([0.5, 1000.0]), dtypes.float8_143, 1).tolist()
    [1.0, nan]
    >>> saturated = host_pow2scale_cast_to_fp8([1e4], dtypes.float8_143, nan_on_overflow=False)
    >>> saturated.tolist(), saturated.dtype.name
    ([240.0], 'float8_e4m3fnuz')
    """
    numbers = _numbers(src)
    target = _check_float8(dtype)
    if numbers.dtype not in (np.float16, np.float32, np.float64):
        raise RuntimeError(f"src.dtype {numbers.dtype} not currently supported.")
    scaled = np.ldexp(numbers.astype(np.float64), log2_scale)
    if not nan_on_overflow:
        scaled = np.clip(scaled, -_GREATEST[target], _GREATEST[target])
    rounded: NDArray[Any] = round_to(scaled, target.as_numpy())
    return rounded


def host_pow2scale_cast_from_fp8(
    src: NDArray[Any], dtype: dtypes.dtype | None = None, log2_scale: int = 0
) -> NDArray[Any]:
    """8-bit floats times ``2 ** log2_scale``, rounded once.

    **Arguments**: `dtype`: `popxl.float16`, `popxl.float32` or `popxl.float64`.

    **Raises**: RuntimeError: for other dtypes.

    >>> eighths = host_pow2scale_cast_to_fp8(np.array([0.5, 3.0]), dtypes.float8_152)
    >>> host_pow2scale_cast_from_fp8(eighths, dtypes.float16, 1)
    array([1., 6.], dtype=float16)
    """
    if src.dtype not in [float8.as_numpy() for float8 in _FORMATS]:
        raise RuntimeError(f"src.dtype {src.dtype} not currently supported.")
    if dtype is None or dtype not in _WIDE:
        raise RuntimeError(f"dtype {dtype} not currently supported.")
    scaled = np.ldexp(src.astype(np.float64), log2_scale)
    rounded: NDArray[Any] = round_to(scaled, dtype.as_numpy())
    return rounded


_GREATEST = {dtypes.float8_143: 240.0, dtypes.float8_152: 57344.0}


def _check_float8(dtype: dtypes.dtype | None) -> dtypes.dtype:
    if dtype is None or dtype not in _FORMATS:
        raise RuntimeError(f"dtype {dtype} not currently supported.")
    return dtype


def _numbers(src: Any) -> NDArray[Any]:
    """An array, also of a torch tensor that requires a gradient."""
    if type(src).__module__ == "torch":
        src = src.detach().cpu().numpy()
    return np.ascontiguousarray(src).reshape(np.shape(src))
