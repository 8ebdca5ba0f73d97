"""The numerics contract by definition: one number at a time, in exact arithmetic.

It shares no code with the kernels. It is slow, and written to be read beside docs/numerics.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Float:
    """A binary format by its definition. `style` gives the meaning of its highest codes."""

    exponent_bits: int
    fraction_bits: int
    style: str = "ieee"  # "fn": all ones is NaN, no infinity; "fnuz": the code of -0 is NaN

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - (0 if self.style == "fnuz" else 1)

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias

    @property
    def largest_code(self) -> int:
        every = 2 ** (self.bits - 1) - 1
        return {"ieee": every - 2**self.fraction_bits, "fn": every - 1, "fnuz": every}[self.style]

    @property
    def largest(self) -> Fraction:
        return self.magnitude(self.largest_code)

    def magnitude(self, code: int) -> Fraction:
        exponent, fraction = divmod(code, 2**self.fraction_bits)
        if exponent == 0:
            return Fraction(fraction) * two(self.min_exponent - self.fraction_bits)
        whole = 2**self.fraction_bits + fraction
        return Fraction(whole) * two(exponent - self.bias - self.fraction_bits)


def two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


FLOATS = {
    "float64": Float(11, 52),
    "float32": Float(8, 23),
    "float16": Float(5, 10),
    "bfloat16": Float(8, 7),
    "float8_e5m2": Float(5, 2),
    "float8_e4m3fn": Float(4, 3, "fn"),
    "float8_e5m2fnuz": Float(5, 2, "fnuz"),
    "float8_e4m3fnuz": Float(4, 3, "fnuz"),
}


@dataclass(frozen=True)
class Number:
    """A sign and an exact magnitude: a Fraction, or "inf", or "nan"."""

    negative: bool
    magnitude: Any

    @property
    def finite(self) -> bool:
        return isinstance(self.magnitude, Fraction)

    @property
    def value(self) -> Fraction:
        return -self.magnitude if self.negative else self.magnitude


NAN = Number(False, "nan")


def decode(bits: int, fmt: Float) -> Number:
    negative, code = divmod(bits, 2 ** (fmt.bits - 1))
    if fmt.style == "fnuz" and negative and code == 0:
        return NAN
    if code <= fmt.largest_code:
        return Number(bool(negative), fmt.magnitude(code))
    if fmt.style == "ieee" and code == fmt.largest_code + 1:
        return Number(bool(negative), "inf")
    return NAN


def floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if two(guess) <= x else guess - 1


def round_number(x: Number, fmt: Float, lane: int | None) -> Number:
    """Round to `fmt`: stochastically with a lane, otherwise to nearest, ties to even."""
    if x.magnitude == "inf" and fmt.style != "ieee":
        return NAN
    if not x.finite:
        return x
    if x.magnitude == 0:
        return Number(x.negative and fmt.style != "fnuz", x.magnitude)
    ulp = two(max(floor_log2(x.magnitude), fmt.min_exponent) - fmt.fraction_bits)
    steps = x.magnitude / ulp
    low = math.floor(steps)
    share = steps - low
    if lane is None:
        up = share > Fraction(1, 2) or (share == Fraction(1, 2) and low % 2 == 1)
    else:
        up = lane < math.floor(share * 2**32)
    rounded = (low + up) * ulp
    if rounded > fmt.largest:
        return Number(x.negative, "inf") if fmt.style == "ieee" else NAN
    return Number(x.negative and not (rounded == 0 and fmt.style == "fnuz"), rounded)


def encode(x: Number, fmt: Float) -> int | None:
    """Return the code of a number of `fmt`; None for NaN, which has many."""
    sign = int(x.negative) << (fmt.bits - 1)
    if x.magnitude == "nan":
        return None
    if x.magnitude == "inf":
        return sign + fmt.largest_code + 1
    if x.magnitude == 0:
        return sign
    exponent = max(floor_log2(x.magnitude), fmt.min_exponent)
    units = x.magnitude / two(exponent - fmt.fraction_bits)
    assert units.denominator == 1
    return sign + int(units) + (exponent - fmt.min_exponent) * 2**fmt.fraction_bits


def add(x: Number, y: Number) -> Number:
    if "nan" in (x.magnitude, y.magnitude):
        return NAN
    if "inf" in (x.magnitude, y.magnitude):
        if x.magnitude == y.magnitude and x.negative != y.negative:
            return NAN
        return x if x.magnitude == "inf" else y
    total = x.value + y.value
    return Number(total < 0 or (total == 0 and x.negative and y.negative), abs(total))


def multiply(x: Number, y: Number) -> Number:
    if "nan" in (x.magnitude, y.magnitude):
        return NAN
    negative = x.negative != y.negative
    if "inf" in (x.magnitude, y.magnitude):
        return NAN if 0 in (x.magnitude, y.magnitude) else Number(negative, "inf")
    return Number(negative, x.magnitude * y.magnitude)


def negate(x: Number) -> Number:
    return Number(not x.negative, x.magnitude)


def rank(x: Number) -> tuple[Any, ...]:
    """Return a key that sorts as max and min do: -0 below +0."""
    if x.magnitude == "inf":
        return (-1 if x.negative else 1, 0, 0)
    return (0, x.value, 0 if x.negative else 1)


def greater(x: Number, y: Number) -> Number:
    return NAN if "nan" in (x.magnitude, y.magnitude) else max(x, y, key=rank)


def lesser(x: Number, y: Number) -> Number:
    return NAN if "nan" in (x.magnitude, y.magnitude) else min(x, y, key=rank)


def philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011: one block of four 64-bit words."""
    mask = 2**64 - 1
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k, right & mask, (left >> 64) ^ d ^ m, left & mask
        k, m = (k + 0x9E3779B97F4A7C15) & mask, (m + 0xBB67AE8584CAA73B) & mask
    return [a, b, c, d]


def lane(seed: int, step: int, call: int, place: int, index: int) -> int:
    words = philox((seed, 0), (1 + index // 8, step, call, place))
    word = words[index % 8 // 2]
    return word >> 32 if index % 2 else word & 0xFFFF_FFFF


Element = tuple[Number, ...]  # one real, or a real and an imaginary part
Apply = Callable[[Element, Element, int], Element]
#: Of an element of the flattened value: its additions. Members are nodes 0..R-1, and the k-th
#: addition, of two nodes, makes node R + k.
Additions = Callable[[int], Sequence[tuple[int, int]]]


def fold_element(
    xs: Sequence[Element], order: str | Sequence[tuple[int, int]], start: int, apply: Apply
) -> Element:
    """Fold one element; the order numbers its additions from step 1."""
    if not isinstance(order, str):
        nodes = list(xs)
        for step, (left, right) in enumerate(order, 1):
            nodes.append(apply(nodes[left], nodes[right], step))
        return nodes[-1]
    if order == "tree":
        level, step = list(xs), 0
        while len(level) > 1:
            above = []
            for left in range(0, len(level) - 1, 2):
                step += 1
                above.append(apply(level[left], level[left + 1], step))
            level = above + level[len(above) * 2 :]
        return level[0]
    turned = list(xs[::-1]) if order == "reverse" else list(xs[start:]) + list(xs[:start])
    total = turned[0]
    for step, x in enumerate(turned[1:], 1):
        total = apply(total, x, step)
    return total


def ring_start(index: tuple[int, ...], shape: tuple[int, ...], members: int, cut: Any) -> int:
    """Return the ring block of an element, which is the member that its fold starts with."""
    if cut is not None:
        return index[cut] // (shape[cut] // members)
    flat, size = int(np.ravel_multi_index(index, shape)) if shape else 0, math.prod(shape)
    longer = size % members
    lengths = [size // members + (block < longer) for block in range(members)]
    block = 0
    while flat >= lengths[block]:
        flat -= lengths[block]
        block += 1
    return block


OPERATIONS = {"sum": add, "prod": multiply, "max": greater, "min": lesser}


def reference_fold(
    members: Sequence[np.ndarray],
    *,
    op: str = "sum",
    order: str | Additions = "linear",
    accumulate: Any = None,
    out_dtype: Any = None,
    divisor: int | None = None,
    batch_ndim: int = 0,
    cut_axis: int | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    call: int = 0,
    places: Any = 0,
) -> list[tuple[int | None, ...]]:
    """Return the codes of the result's parts (None: NaN), element by element in C order."""
    first = np.asarray(members[0])
    parts = 2 if first.dtype.kind == "c" else 1
    source = part_name(first.dtype)
    out = part_name(np.dtype(first.dtype if out_dtype is None else out_dtype))
    narrow = {"bfloat16": "float32", **{n: "float16" for n in FLOATS if n.startswith("float8")}}
    default = out if order == "exact" else narrow.get(source, source)
    acc = default if accumulate is None else part_name(np.dtype(accumulate))
    selects = op in ("max", "min")
    computing = "float64" if "float64" in ((source,) if selects else (source, acc)) else "float32"
    batch, value = first.shape[:batch_ndim], first.shape[batch_ndim:]
    spread = np.broadcast_to(np.asarray(places), batch)
    codes = [part_codes(np.asarray(member)) for member in members]
    results = []
    for where in product(*map(range, first.shape)):
        entry, index = where[:batch_ndim], where[batch_ndim:]
        flat = int(np.ravel_multi_index(index, value)) if value else 0
        place = int(spread[entry])

        def rounded(
            x: Number, name: str, step: int, flat: int = flat, place: int = place
        ) -> Number:
            drawn = rounding == "stochastic" and parts == 1 and FLOATS[name].bits < 32
            u = lane(seed, step, call, place, flat) if drawn else None
            return round_number(x, FLOATS[name], u)

        def in_c(x: Number) -> Number:
            return round_number(x, FLOATS[computing], None)

        def apply(x: Element, y: Element, step: int) -> Element:
            if selects:
                return (OPERATIONS[op](x[0], y[0]),)
            if op == "prod" and parts == 2:
                both = complex_product(x, y, in_c)
            else:
                both = tuple(
                    in_c(OPERATIONS[op](left, right)) for left, right in zip(x, y, strict=True)
                )
            return tuple(rounded(part, acc, step) for part in both)

        xs = [
            tuple(decode(int(code), FLOATS[source]) for code in code_array[where])
            for code_array in codes
        ]
        start = ring_start(index, value, len(xs), cut_axis) if order == "ring" else 0
        if order == "exact" and op == "sum":
            total = exact_sum(xs)
            if len(xs) > 1:
                total = tuple(rounded(part, acc, 1) for part in total)
        else:
            sequence = order if isinstance(order, str) else order(flat)
            total = fold_element(xs, sequence, start, apply)
        if divisor is not None:
            total = tuple(in_c(divide(part, divisor)) for part in total)
        final = (rounded(part, out, len(xs)) for part in total)
        results.append(tuple(encode(part, FLOATS[out]) for part in final))
    return results


def exact_sum(xs: Sequence[Element]) -> Element:
    """Add one element of all members without rounding."""
    return tuple(functools.reduce(add, part) for part in zip(*xs, strict=True))


def divide(x: Number, divisor: int) -> Number:
    return Number(x.negative, x.magnitude / divisor) if x.finite else x


def complex_product(x: Element, y: Element, in_c: Callable[[Number], Number]) -> Element:
    (a, b), (c, d) = x, y
    real = add(in_c(multiply(a, c)), negate(in_c(multiply(b, d))))
    imaginary = add(in_c(multiply(a, d)), in_c(multiply(b, c)))
    return in_c(real), in_c(imaginary)


def part_name(dtype: np.dtype[Any]) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype.name)


def part_codes(array: np.ndarray) -> np.ndarray:
    """Return the bits of every element's parts, along a new last axis."""
    parts = 2 if array.dtype.kind == "c" else 1
    unsigned = f"u{array.dtype.itemsize // parts}"
    return np.ascontiguousarray(array).view(unsigned).reshape(*array.shape, parts)


def codes_of(array: np.ndarray) -> list[tuple[int | None, ...]]:
    """Return an array in the form of `reference_fold`'s results."""
    fmt = FLOATS[part_name(array.dtype)]
    rows = part_codes(array).reshape(-1, 2 if array.dtype.kind == "c" else 1)
    return [tuple(None if decode(int(c), fmt) is NAN else int(c) for c in row) for row in rows]
