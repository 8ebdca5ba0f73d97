"""Wire: what a value is rounded to on its way from one replica to another."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from gpusim.fallback.formats import FormatInfo, check_float
from gpusim.fallback.wires import NVFP4, WireInfo, fixed_point

from .formats import (
    NAMED_FORMATS,
    Format,
    FormatLike,
    as_format,
    format_name,
    kernel_format,
    rounding_name,
)

__all__ = ["Wire", "as_wire", "wire_info"]

#: Formats without a dtype that folds take, by the names of ml_dtypes and of the MX specification.
NAMED: dict[str, Format | FormatInfo] = {
    **NAMED_FORMATS,
    "int8": fixed_point(8),
    "int4": fixed_point(4),
    "mxint8": fixed_point(8, 6),
}
E2M1, NVFP4_BLOCK = "float4_e2m1fn", 16
_MX = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int8")


@dataclass(frozen=True, repr=False)
class Wire:
    """A wire format: values that a replica sends are rounded to it, often with a scale by block.

    The documentation's page on numerics says, under "On the wire", what is sent, and the bits.

    **Arguments**

    - `format`: a floating-point dtype; a `Format`; or a name: that of a dtype, "float6_e2m3fn",
      "float6_e3m2fn" or "float4_e2m1fn", "int8" or "int4" (integers up to 127 or 7), or "mxint8"
      (multiples of 1/64 below 2). "nvfp4" is "float4_e2m1fn" with scales of two levels, for each 16
      elements and for the message. Short names stand for others: bf16, fp16, fp32, fp8, fp4.
    - `scale`: None: values are rounded as they are. Else how the scale of a block follows from its
      largest magnitude: "amax" (float32; it becomes the format's largest number), or as a power of
      two, "floor", "ceil" or "even"; "nvfp4": of two levels. Or a number, which all elements have
      (see `DelayedScaling`).
    - `block`: the number of consecutive elements that share a scale, "row" for those of the last
      axis, or None for all that a message holds.
    - `rounding`: "nearest" or "stochastic" ("sr"), by the seed of the Reduction.
    - `at`: what is rounded: "hops" (each partial sum that is sent, and the result), "ends" (each
      member's value, and the result), "members" or "result".

    Wires are immutable, hashable and compare by value. TypeError for a format that is not
    floating-point, ValueError for a field outside these, for a scale of a format of 32 bits or
    more, and for a block without a scale.

    >>> import gpusim, numpy as np
    >>> wire = gpusim.Wire("int8", scale="amax", block=64, at="ends")
    >>> wire
    Wire('int8', scale='amax', block=64, at='ends')
    >>> x = np.array([[1.0, 0.3], [1.0, 0.004]], np.float32)
    >>> ring = gpusim.Reduction(wire=wire)
    >>> gpusim.collectives.psum(x, reduction=ring).value
    array([2.        , 0.31496063], dtype=float32)
    >>> gpusim.Wire("nvfp4").bits, gpusim.Wire("bf16"), gpusim.Wire("fp8", scale=0.25)
    (4, Wire('bfloat16'), Wire('float8_e4m3fn', scale=0.25))
    """

    format: DTypeLike | FormatLike
    scale: str | float | None = None
    block: int | str | None = None
    rounding: str = "nearest"
    at: str = "hops"

    def __post_init__(self) -> None:
        if isinstance(self.format, str) and self.format == NVFP4:
            self._set_nvfp4()
        object.__setattr__(self, "format", _format(self.format))
        object.__setattr__(self, "rounding", rounding_name(self.rounding))
        if self.scale == NVFP4 and self.format != E2M1:
            raise ValueError(f"wire scale='nvfp4': expected the format {E2M1!r}, got {self.format}")
        info = self.info  # which checks all fields
        object.__setattr__(self, "block", info.block)
        object.__setattr__(self, "scale", info.scale)

    def _set_nvfp4(self) -> None:
        """Make the name the fields that it stands for."""
        if self.scale not in (None, NVFP4):
            raise ValueError(f"wire 'nvfp4', scale={self.scale!r}: expected no scale beside it")
        object.__setattr__(self, "format", E2M1)
        object.__setattr__(self, "scale", NVFP4)
        if self.block is None:
            object.__setattr__(self, "block", NVFP4_BLOCK)

    @property
    def is_nvfp4(self) -> bool:
        """Whether the name "nvfp4" stands for its format, scales and block.

        >>> Wire("nvfp4", at="ends").is_nvfp4, Wire("nvfp4", block=32).is_nvfp4
        (True, False)
        """
        return self.scale == NVFP4 and self.block == NVFP4_BLOCK

    @classmethod
    def mx(cls, format: DTypeLike | FormatLike, scale: str = "floor", **others: Any) -> Wire:
        """The wire of an MX format (OCP specification 1.0): blocks of 32, power-of-two scales.

        **Arguments**:

        - `format`: "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn",
          "float4_e2m1fn", or "int8", which are MX's fixed-point numbers, "mxint8".
        - `scale`, `others`: as for Wire.

        **Raises**: ValueError for any other format; and as Wire.

        >>> Wire.mx("float4_e2m1fn", "even")
        Wire('float4_e2m1fn', scale='even', block=32)
        """
        format = format_name(format)
        name = format if isinstance(format, str) else _name(_format(format))
        if name not in _MX:
            expected = ", ".join(map(repr, _MX))
            raise ValueError(f"Wire.mx({name!r}): expected one of {expected}")
        return cls("mxint8" if name == "int8" else name, scale, **{"block": 32, **others})

    @property
    def info(self) -> WireInfo:
        """The wire as the kernels take it."""
        found = NAMED.get(self.format) if isinstance(self.format, str) else self.format
        if not isinstance(found, FormatInfo):
            found = kernel_format(cast(Any, found))
        assert found is not None
        return WireInfo(found, self.scale, self.block, self.rounding, self.at)

    @property
    def bits(self) -> int:
        """The bits of an element on the wire.

        >>> Wire("float6_e3m2fn").bits, Wire("bfloat16").bits
        (6, 16)
        """
        if isinstance(self.format, str):
            named = NAMED[self.format]
            return named.bits if isinstance(named, Format) else (4 if self.format == "int4" else 8)
        if isinstance(self.format, Format):
            return self.format.bits
        return 8 * np.dtype(cast(DTypeLike, self.format)).itemsize

    @property
    def scale_bits(self) -> int:
        """The bits of a block's scale: 32, or 8 for a power of two and for "nvfp4"; 0 without one,
        and where it is given.

        >>> Wire("int8", "amax").scale_bits, Wire.mx("int8").scale_bits
        (32, 8)
        """
        if self.scale is None or isinstance(self.scale, float):
            return 0
        return 32 if self.scale == "amax" else 8

    @property
    def message_bits(self) -> int:
        """The bits of a message's own scale: 32 for "nvfp4", 0 for others.

        >>> Wire("nvfp4").message_bits, Wire("int8", "amax").message_bits
        (32, 0)
        """
        return 32 if self.scale == NVFP4 else 0

    def __repr__(self) -> str:
        shown = [repr(NVFP4 if self.is_nvfp4 else _name(self.format))]
        for each in fields(self)[1:]:
            if self.is_nvfp4 and each.name in ("scale", "block"):
                continue
            value = getattr(self, each.name)
            if value != each.default:
                shown.append(f"{each.name}={value!r}")
        return f"Wire({', '.join(shown)})"


def as_wire(given: Any) -> Wire | None:
    """A Wire for a format; Wires and None as they are."""
    return given if given is None or isinstance(given, Wire) else Wire(given)


def wire_info(given: Any) -> WireInfo | None:
    """A Wire, or a format, as the kernels take it."""
    wire = as_wire(given)
    return None if wire is None else wire.info


def _format(given: Any) -> Any:
    """A dtype, a Format, or a name of `NAMED`."""
    given = format_name(given)
    name = given if isinstance(given, str) else _dtype_name(given)
    if name in NAMED:
        return name
    general = as_format(given)
    if general is not None:
        return general
    names = ", ".join(map(repr, NAMED))
    try:
        dtype = np.dtype(given)
    except TypeError:
        raise TypeError(
            f"wire {given!r:.200}: expected a floating-point dtype, a Format, or one of {names}"
        ) from None
    check_float("wire", dtype, f", a Format, or one of {names}")
    return dtype


def _dtype_name(given: Any) -> str | None:
    try:
        return None if given is None else np.dtype(given).name
    except TypeError:
        return None


def _name(format: Any) -> Any:
    return format.name if isinstance(format, np.dtype) else format
