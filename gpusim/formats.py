"""Format: any binary floating-point format, described by its fields as IEEE 754 and gfloat do.
Where a dtype is expected as accumulator or target of rounding, a Format serves too."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from gpusim.fallback.formats import FormatInfo

__all__ = [
    "ALIASES",
    "NAMED_FORMATS",
    "ROUNDINGS",
    "Format",
    "FormatLike",
    "as_format",
    "format_name",
    "kernel_format",
    "rounding_name",
]

#: Short names of formats, wherever a name of one is read.
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
}
#: Short names of roundings, wherever one is read.
ROUNDINGS = {"sr": "stochastic", "rne": "nearest"}
#: Short names that stand for more than one format, and these.
_AMBIGUOUS = {
    **dict.fromkeys(("fp6", "float6"), ("float6_e2m3fn", "float6_e3m2fn")),
    **dict.fromkeys(("float8", "f8"), ("float8_e4m3fn", "float8_e5m2")),
    "fp8_fnuz": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "float4": ("float4_e2m1fn", "nvfp4"),
}

_WIDTHS = {"exponent_bits": 11, "mantissa_bits": 52}  # float64's: more do not fit into it
_FLAGS = (
    "has_infinities",
    "has_subnormals",
    "has_negative_zero",
    "is_signed",
    "is_twos_complement",
)


class GfloatInfo(Protocol):
    """The attributes of gfloat's FormatInfo that are read; gfloat itself is not imported."""

    name: str
    k: int
    precision: int
    bias: int
    is_signed: bool
    domain: Any
    has_nz: bool
    num_high_nans: int
    has_subnormals: bool
    is_twos_complement: bool


@dataclass(frozen=True, repr=False)
class Format:
    """A binary floating-point format whose values float64 can all hold.

    The codes of one sign count up from zero: subnormal numbers while the exponent's field is zero,
    then normal ones, then infinity, then NaNs.

    **Arguments**

    - `exponent_bits`, `mantissa_bits`: the widths of the two fields; the hidden bit is in neither.
    - `bias`: of the exponent; None is IEEE's, 2**(exponent_bits - 1) - 1.
    - `has_infinities`: whether a code is infinity. Where none is, what is too large becomes NaN,
      also in formats that have no code for NaN.
    - `high_nans`: how many of the highest codes of each sign are NaN. None is IEEE's
      2**mantissa_bits - 1 with infinities, and 1 without them (0 if -0's code is NaN).
    - `has_subnormals`: if False, the field zero is an exponent like others, except in code 0.
    - `has_negative_zero`: if False, the code of -0 is NaN, and a zero is always +0. None is True
      for formats with a sign bit.
    - `is_signed`: if False, there is no sign bit, and negative values become NaN.
    - `is_twos_complement`: fixed-point numbers of no exponent bits, in two's complement.
    - `name`: for people; it plays no part in comparisons.

    Formats are immutable, hashable and compare by their fields. Stochastic rounding applies to
    those of fewer than 32 bits; rounding to all others is to nearest.
    TypeError and ValueError for fields that do not describe such a format.

    >>> import gpusim, numpy as np
    >>> gpusim.Format(4, 3, has_infinities=False)  # float8_e4m3fn
    Format(4, 3, has_infinities=False)
    >>> tiny = gpusim.Format(3, 2, has_infinities=False, high_nans=0, name="e3m2")
    >>> tiny.bits, tiny.smallest, tiny.max
    (6, 0.0625, 28.0)
    >>> gpusim.round_to(np.array([0.1, 2.7, 29.0, 30.0]), tiny)
    array([ 0.125,  2.5  , 28.   ,    nan], dtype=float32)
    >>> gpusim.Reduction(order="tree", accumulate=gpusim.Format(5, 6))
    Reduction(op='sum', order='tree', accumulate=Format(5, 6))
    """

    exponent_bits: int
    mantissa_bits: int
    _: KW_ONLY
    bias: int | None = None
    has_infinities: bool = True
    high_nans: int | None = None
    has_subnormals: bool = True
    has_negative_zero: bool | None = None
    is_signed: bool = True
    is_twos_complement: bool = False
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for width, most in _WIDTHS.items():
            self._settle(width, _integer)
            if not 0 <= getattr(self, width) <= most:
                raise ValueError(f"{width}={getattr(self, width)}: expected 0 to {most}")
        for attribute in ("bias", "has_negative_zero", "high_nans"):  # the last needs the second
            if getattr(self, attribute) is None:
                object.__setattr__(self, attribute, self._default(attribute))
        for attribute in ("bias", "high_nans"):
            self._settle(attribute, _integer)
        for attribute in _FLAGS:
            self._settle(attribute, lambda _, given: bool(given))
        self._check()

    def _settle(self, attribute: str, convert: Callable[[str, Any], Any]) -> None:
        object.__setattr__(self, attribute, convert(attribute, getattr(self, attribute)))

    @classmethod
    def from_gfloat(cls, info: GfloatInfo) -> Format:
        """The format that a FormatInfo of gfloat describes.

        TypeError for anything else (a BlockFormatInfo too), ValueError for formats without a zero.
        """
        if not _is_format_info(info):
            raise TypeError(f"{info!r}: expected a gfloat.FormatInfo")
        return cls(
            info.k - (info.precision - 1) - bool(info.is_signed),
            info.precision - 1,
            bias=info.bias,
            has_infinities=info.domain.name == "Extended",
            high_nans=info.num_high_nans,
            has_subnormals=info.has_subnormals,
            has_negative_zero=info.has_nz,
            is_signed=info.is_signed,
            is_twos_complement=info.is_twos_complement,
            name=info.name,
        )

    @property
    def bits(self) -> int:
        """The width of a code."""
        return self.exponent_bits + self.mantissa_bits + self.is_signed

    @property
    def precision(self) -> int:
        """How many significant bits a normal number has, the hidden one among them."""
        return self.mantissa_bits + 1

    @property
    def max(self) -> float:
        """The largest finite value."""
        return self.info.largest

    @property
    def min(self) -> float:
        """The most negative finite value."""
        return self.info.lowest

    @property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return self.info.smallest

    @property
    def eps(self) -> float:
        """The distance of 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def carrier(self) -> np.dtype[Any]:
        """The dtype in which values of the format are held: float32 if it holds all, or float64."""
        return self.info.carrier

    @cached_property
    def info(self) -> FormatInfo:
        """The format as the kernels take it."""
        significand, exponent = self._number(self._largest_code)
        largest = math.ldexp(significand, exponent)
        lowest = -largest if self.is_signed else 0.0
        if self.is_twos_complement:
            lowest -= math.ldexp(1.0, exponent)
        return FormatInfo(
            fraction_bits=self.mantissa_bits,
            min_exponent=self._min_exponent,
            smallest=math.ldexp(*self._number(1)),
            largest=largest,
            lowest=lowest,
            has_infinity=self.has_infinities,
            has_negative_zero=bool(self.has_negative_zero),
            sub_32_bit=self.bits < 32,
        )

    def __repr__(self) -> str:
        shown = [str(self.exponent_bits), str(self.mantissa_bits)]
        for entry in fields(self)[2:]:
            value = getattr(self, entry.name)
            if value != (self._default(entry.name) if entry.default is None else entry.default):
                shown.append(f"{entry.name}={value!r}")
        return f"Format({', '.join(shown)})"

    def _default(self, attribute: str) -> Any:
        """The value that None stands for."""
        if attribute == "bias":
            return (1 << self.exponent_bits >> 1) - 1 if self.exponent_bits else 0
        if attribute == "has_negative_zero":
            return bool(self.is_signed and not self.is_twos_complement)
        if attribute == "high_nans":
            if self.has_infinities:
                return (1 << self.mantissa_bits) - 1
            return int(bool(self.has_negative_zero or not self.is_signed))
        return None

    @property
    def _min_exponent(self) -> int:
        assert self.bias is not None
        return (1 if self.has_subnormals else 0) - self.bias

    @property
    def _largest_code(self) -> int:
        assert self.high_nans is not None
        codes = 1 << (self.exponent_bits + self.mantissa_bits)
        return codes - 1 - self.high_nans - self.has_infinities

    def _number(self, code: int) -> tuple[int, int]:
        """The finite value of a code without its sign, as (m, e): m * 2**e."""
        exponent, significand = divmod(code, 1 << self.mantissa_bits)
        assert self.bias is not None
        if exponent or not self.has_subnormals:
            significand += 1 << self.mantissa_bits
        else:
            exponent = 1
        return significand, exponent - self.bias - self.mantissa_bits

    def _check(self) -> None:
        assert self.high_nans is not None
        if self.has_negative_zero and (not self.is_signed or self.is_twos_complement):
            raise ValueError("has_negative_zero=True: expected False without a sign bit")
        if not self.has_subnormals and not self.mantissa_bits:
            raise ValueError(
                "has_subnormals=False, mantissa_bits=0: this format has no zero, which sums need"
            )
        if self.is_twos_complement and (
            self.exponent_bits or self.has_infinities or self.high_nans or not self.is_signed
        ):
            raise ValueError(
                "is_twos_complement=True: expected is_signed, exponent_bits=0, high_nans=0 and "
                "has_infinities=False"
            )
        if self.high_nans < 0 or self._largest_code < 1:
            raise ValueError(
                f"high_nans={self.high_nans}: no finite value above zero is left among the "
                f"{1 << (self.exponent_bits + self.mantissa_bits)} codes of a sign"
            )
        significand, exponent = self._number(self._largest_code)
        if significand.bit_length() + exponent > 1024 or self._number(1)[1] < -1074:
            raise ValueError(
                f"exponent_bits={self.exponent_bits}, bias={self.bias}: float64 does not hold "
                "every value of this format"
            )


FormatLike = Format | GfloatInfo


def format_name(given: Any) -> Any:
    """The name that a short name of a format stands for; anything else as it is.

    **Raises**: ValueError for a short name of several formats, which names them.

    >>> format_name("bf16"), format_name("fp8"), format_name("int8"), format_name(None)
    ('bfloat16', 'float8_e4m3fn', 'int8', None)
    >>> format_name("fp6")
    Traceback (most recent call last):
    ...
    ValueError: 'fp6' is the name of several formats: expected 'float6_e2m3fn' or 'float6_e3m2fn'
    """
    if not isinstance(given, str):
        return given
    if given in _AMBIGUOUS:
        expected = " or ".join(map(repr, _AMBIGUOUS[given]))
        raise ValueError(f"{given!r} is the name of several formats: expected {expected}")
    return ALIASES.get(given, given)


def rounding_name(given: Any) -> Any:
    """The name that a short name of a rounding stands for; anything else as it is.

    >>> rounding_name("sr"), rounding_name("nearest")
    ('stochastic', 'nearest')
    """
    return ROUNDINGS.get(given, given) if isinstance(given, str) else given


def as_format(given: Any) -> Format | None:
    """A Format, a gfloat FormatInfo, or a name of one without a dtype; None for anything else."""
    if isinstance(given, Format):
        return given
    if isinstance(given, str):
        return NAMED_FORMATS.get(format_name(given))
    return Format.from_gfloat(given) if _is_format_info(given) else None


def kernel_format(given: Any) -> Any:
    """A Format as the kernels take it; a dtype, and what only NumPy knows to be one, as it is."""
    given = format_name(given)
    general = as_format(given)
    return given if general is None else general.info


def _is_format_info(given: Any) -> bool:
    names = GfloatInfo.__annotations__
    return not isinstance(given, type) and all(hasattr(given, name) for name in names)


def _integer(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name}={given!r}: expected an integer") from None


#: Formats of fewer than 8 bits that have names, which are those of ml_dtypes.
NAMED_FORMATS = {
    name: Format(exponent, mantissa, has_infinities=False, high_nans=0, name=name)
    for name, exponent, mantissa in (
        ("float6_e2m3fn", 2, 3),
        ("float6_e3m2fn", 3, 2),
        ("float4_e2m1fn", 2, 1),
    )
}
