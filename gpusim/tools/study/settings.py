"""A setting is one line of a study's picture; `grid` makes all settings of a study.

Formats have the names of NumPy and ml_dtypes; "e5m6" is `gpusim.Format(5, 6)`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from gpusim.fallback import orders
from gpusim.fallback.formats import FLOAT32, FLOAT64, SUB_32_BIT, FormatInfo, default_accumulator
from gpusim.fallback.orders import FIXED
from gpusim.fallback.schedules import Schedule
from gpusim.fallback.spec import FIXED_TYPES
from gpusim.formats import Format, as_format, rounding_name
from gpusim.formats import format_name as canonical_name
from gpusim.reduction import Reduction, ReductionLike, as_reduction
from gpusim.reduction.text import (
    UNNAMED,
    format_of,
    format_text,
    is_format_text,
    wire_of,
    wire_text,
)
from gpusim.twins import TWINS
from gpusim.wires import Wire, as_wire

__all__ = [
    "FORMATS",
    "PRESETS",
    "Setting",
    "ValueFormat",
    "accumulator",
    "accumulator_rule",
    "as_settings",
    "carrier",
    "floating",
    "format_name",
    "grid",
    "hierarchy",
    "hierarchy_name",
    "items",
    "narrow_info",
    "rule_name",
    "value_format",
    "whole_numbers",
    "wire",
    "wire_name",
]

ValueFormat = np.dtype[Any] | Format
"""A format of values, or of an accumulator: for the order "fixed" a dtype of integers."""

_DTYPES: tuple[np.dtype[Any], ...] = (FLOAT64, FLOAT32, *SUB_32_BIT)
FORMATS = {dtype.name: dtype for dtype in _DTYPES}

ORDERS = (*orders.ORDERS, *orders.COMPENSATED, orders.EXACT, FIXED, *TWINS)
"""The orders that a study compares: those of the contract, and twins."""

WIDEST = 50
"""Bits of mantissa of a Format that values may have: errors are measured in float64."""

PRESETS: dict[str, dict[str, tuple[str, ...]]] = {
    "orders": {
        "accumulators": ("wire",),
        "orders": ("linear", "ring", "tree"),
        "roundings": ("nearest", "stochastic"),
    },
    "engines": {
        "accumulators": ("wire",),
        "orders": (
            "xla-cpu",
            "mpich",
            "openmpi-ring",
            "gloo-ring",
            "nccl-ring",
            "nccl-tree",
            "gcl-ring",
        ),
        "roundings": ("nearest",),
    },
    "accumulators": {
        "accumulators": ("wire", "float32"),
        "orders": ("ring", "tree"),
        "roundings": ("nearest",),
    },
}
"""Named comparisons; the first is the default."""


def floating(given: DTypeLike, name: str = "dtype") -> np.dtype[Any]:
    """The floating-point dtype of this name. **Raises**: ValueError, with `name`, for any other."""
    expected = f"expected one of {', '.join(FORMATS)}, or a format such as e5m6"
    given = canonical_name(given)
    try:
        # ml_dtypes' names are not registered with NumPy.
        dtype = np.dtype(getattr(ml_dtypes, given, given) if isinstance(given, str) else given)
    except TypeError:
        raise ValueError(f"{name}={given!r}: {expected}") from None
    if given is None or dtype.name not in FORMATS:
        raise ValueError(f"{name}={given!r}: {expected}")
    return FORMATS[dtype.name]


def accumulator(given: Any, name: str = "accumulate") -> ValueFormat:
    """A floating-point dtype or Format; "e5m6" is `gpusim.Format(5, 6)`, "e4m3+bias=8" another."""
    given = canonical_name(given)
    if isinstance(given, str) and is_format_text(given):
        found: Format = format_of(given, {}, name)
        return found
    return as_format(given) or floating(given, name)


def value_format(given: Any, name: str = "dtype") -> ValueFormat:
    """A format of values: a floating-point dtype, or a Format of at most 50 bits of mantissa."""
    found = accumulator(given, name)
    if isinstance(found, Format) and found.mantissa_bits > WIDEST:
        raise ValueError(
            f"{name}={given!r}: expected at most {WIDEST} bits of mantissa, or float64"
        )
    return found


def carrier(target: ValueFormat) -> np.dtype[Any]:
    """The dtype of arrays with values of the format."""
    return target.carrier if isinstance(target, Format) else target


def format_name(given: ValueFormat) -> str:
    """The text that `accumulator` takes."""
    return format_text(given)


def narrow_info(given: ValueFormat) -> FormatInfo | None:
    """A format of fewer than 32 bits, to which rounding may be stochastic; None for others."""
    if isinstance(given, Format):
        return given.info if given.info.sub_32_bit else None
    return SUB_32_BIT.get(given)


def wire(given: Any) -> Wire | None:
    """A Wire, or its text: FORMAT, FORMAT:SCALE or FORMAT:SCALE:BLOCK, and @AT; None for "none".

    "mx:FORMAT" and "mx:FORMAT:SCALE" are `Wire.mx`.

    >>> wire("int8:amax:64@ends")
    Wire('int8', scale='amax', block=64, at='ends')
    >>> wire_name(wire("mx:float4_e2m1fn:even"))
    'float4_e2m1fn:even:32'
    """
    if given is None or (isinstance(given, str) and given == "none"):
        return None
    if not isinstance(given, (str, Wire)):
        given = Wire(given)
    if isinstance(given, str):
        given = wire_of(given)
        if given.rounding != "nearest":
            text = wire_text(given)
            raise ValueError(f"wire={text!r}: expected no rounding; it is the setting's")
    if given.block == "row":
        raise ValueError("wire block='row': expected a number; a study's values have no rows")
    return given


def wire_name(given: Wire) -> str:
    """The text that `wire` takes; the rounding is the setting's."""
    return wire_text(replace(given, rounding="nearest"))


Hierarchy = tuple[int, str | None]
"""The members of a group, and the order across the groups; None: the order of the groups."""


def hierarchy(given: Any) -> Hierarchy | None:
    """Groups of so many, from a number or a text such as "8" or "8:tree"; None for "none"."""
    if given is None or (isinstance(given, str) and given == "none"):
        return None
    if isinstance(given, tuple):
        return given
    size, _, order = str(given).partition(":")
    if not size.isdigit() or int(size) < 1 or (":" in str(given) and not order):
        raise ValueError(
            f"hierarchy={given!r}: expected the replicas of a group, and the order across the "
            "groups, such as 8 or 8:tree"
        )
    return int(size), order or None


def hierarchy_name(given: Hierarchy) -> str:
    """The text that `hierarchy` takes."""
    size, order = given
    return str(size) if order is None else f"{size}:{order}"


@dataclass(frozen=True)
class Setting:
    """A format in which values travel, and how they are added; everything but the seed.

    `given` is a whole Reduction; the fields beside it say what it has in common with others. Of
    several `steps` the sums are accumulated, with or without `feedback` of what messages lost.

    >>> Setting(floating("bfloat16"), floating("float32"), "tree", "stochastic").name
    'bfloat16 added in float32, tree, stochastic'
    """

    dtype: ValueFormat
    accumulate: ValueFormat
    order: str
    rounding: str
    op: str = "sum"
    wire: Wire | None = None
    groups: Hierarchy | None = None
    given: Reduction | None = None
    steps: int = 1
    feedback: bool = False

    @property
    def text(self) -> str:
        """The Reduction as text, with the seed 0, for everything that takes a Reduction.

        >>> Setting(floating("bfloat16"), floating("float32"), "tree", "stochastic").text
        'tree accumulate=float32 rounding=stochastic'
        """
        return str(self.reduction(0))

    @property
    def name(self) -> str:
        if self.given is not None:
            mean = ", mean" if self.op == "mean" else ""
            return f"{format_name(self.dtype)}, {self.text}{mean}{self._stepped}"
        parts = [f"{format_name(self.dtype)} added in {format_name(self.accumulate)}", self.order]
        if self.groups is not None:
            size, across = self.groups
            parts[1] += f" in groups of {size}, {across or self.order} across"
        parts += [f"wire {wire_name(self.wire)}"] if self.wire is not None else []
        parts += ["stochastic"] if self.stochastic else []
        return ", ".join([*parts, "mean"] if self.op == "mean" else parts) + self._stepped

    @property
    def _stepped(self) -> str:
        if self.steps == 1:
            return ""
        return f", {self.steps} steps{' with error feedback' if self.feedback else ''}"

    @property
    def can_feed_back(self) -> bool:
        """Whether each replica's own value is a message, which loses what can be sent again."""
        wire = as_wire(self.reduction(0).wire)
        return wire is not None and wire.at in ("ends", "members")

    @property
    def stochastic(self) -> bool:
        """Whether the result depends on a seed."""
        return self.rounding == "stochastic"

    @property
    def record(self) -> dict[str, Any]:
        """The fields as text, for files."""
        fields: dict[str, Any] = {
            "dtype": format_name(self.dtype),
            "accumulate": format_name(self.accumulate),
            "order": self.order,
            "rounding": self.rounding,
            "op": self.op,
        }
        fields |= {} if self.given is None else {"reduction": self.text}
        fields |= {} if self.wire is None else {"wire": wire_name(self.wire)}
        fields |= {} if self.groups is None else {"hierarchy": hierarchy_name(self.groups)}
        stepped = {"steps": self.steps, "feedback": self.feedback}
        return fields | (stepped if self.steps > 1 else {})

    @property
    def in_phases(self) -> bool:
        """Whether messages are rounded, or replicas grouped, so that a value is folded whole."""
        in_levels = self.wire is not None or self.groups is not None
        return in_levels or self.order == FIXED or self.given is not None or self.steps > 1

    def reduction(self, seed: int) -> Reduction:
        """The Reduction that this setting is, with a seed."""
        if self.given is not None:
            return _seeded(self.given, seed) if self.given.draws else self.given
        plain = self._level(self.order, seed)
        if self.groups is None:
            return plain
        size, across = self.groups
        above = plain if across is None else self._level(across, seed)
        return replace(plain, groups_of=size, across=above)

    def _level(self, order: str, seed: int) -> Reduction:
        """The Reduction of one level, whose accumulator is this one where its order takes it."""
        integers = order == FIXED
        rounding = "nearest" if integers else self.rounding
        sent = None if self.wire is None else replace(self.wire, rounding=self.rounding)
        held = self.accumulate if _fits(self.accumulate, order) else None
        return Reduction("sum", order, held, rounding, seed, wire=sent)


def _seeded(reduction: Reduction, seed: int) -> Reduction:
    across = None if reduction.across is None else _seeded(reduction.across, seed)
    return replace(reduction, seed=seed, across=across)


def as_settings(
    dtypes: Iterable[Any], reductions: Iterable[ReductionLike], ops: Iterable[str]
) -> list[Setting]:
    """The settings of whole Reductions.

    **Raises**: ValueError for one that does not sum or that has no text, TypeError for a dtype that
    a twin's engine does not add; and as `as_reduction`.

    >>> for setting in as_settings(["float16"], ["tree", "ring wire=bfloat16"], ["sum"]):
    ...     print(setting.name)
    float16, tree
    float16, ring wire=bfloat16
    """
    found: dict[Setting, None] = {}
    for dtype, given, op in product(map(value_format, dtypes), reductions, _checked_ops(ops)):
        chosen = as_reduction(given)
        text = str(chosen)
        if chosen.op != "sum" or UNNAMED in text:
            raise ValueError(f"reduction={given!r:.200}: expected op='sum', and an order by name")
        default = _chosen("contract", dtype, chosen.order)  # refuses what an engine does not add
        across = chosen.across
        groups: Hierarchy | None = None
        if across is not None:
            groups = int(chosen.groups_of or 1), str(across).partition(" ")[0]
        rounding = "stochastic" if chosen.draws else "nearest"
        order = text.partition(" ")[0]
        sent = chosen.wire
        assert sent is None or isinstance(sent, Wire)
        accumulate: Any = default if chosen.accumulate is None else chosen.accumulate
        found[Setting(dtype, accumulate, order, rounding, op, sent, groups, chosen)] = None
    return list(found)


def _checked_ops(ops: Iterable[str]) -> list[str]:
    found = list(ops)
    for op in found:
        if op not in ("sum", "mean"):
            raise ValueError(f"op={op!r}: expected 'sum' or 'mean'")
    return found


def grid(
    dtypes: Iterable[Any],
    accumulators: Iterable[Any],
    orders: Iterable[str],
    roundings: Iterable[str],
    ops: Iterable[str] = ("sum",),
    left_out: list[str] | None = None,
    wires: Iterable[Any] = (None,),
    hierarchies: Iterable[Any] = (None,),
) -> list[Setting]:
    """Every combination once.

    Among `accumulators`, "wire" is the format in which partial sums travel: that of the values, or
    the one that a twin's engine uses. "contract" and None are the default of Reduction. Both are
    int32 in the order "fixed". Integers are for that order and formats for the others: other
    combinations are left out. Compensated orders round to nearest alone. Where nothing narrower
    than float32 is rounded to, stochastic rounding has nothing to draw, and the setting is the same
    as rounding to nearest.

    **Raises**: ValueError where a list is empty, holds an unknown order, or an accumulator or an
    order that nothing in the other list fits; TypeError for a dtype that a twin's engine does not
    add; if there is a list `left_out`, that gets a sentence instead.

    >>> for setting in grid(["bfloat16"], ["wire", "contract"], ["ring"], ["nearest"]):
    ...     print(setting.name)
    bfloat16 added in bfloat16, ring
    bfloat16 added in float32, ring
    """
    lists: dict[str, list[Any]] = {
        "dtypes": [value_format(dtype) for dtype in dtypes],
        "accumulators": list(map(accumulator_rule, accumulators)),
        "orders": list(orders),
        "roundings": list(map(rounding_name, roundings)),
        "ops": list(ops),
        "wires": list(map(wire, wires)),
        "hierarchies": list(map(hierarchy, hierarchies)),
    }
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} is empty: a sweep needs at least one")
    found: dict[Setting, None] = {}
    for rounding in lists["roundings"]:
        Reduction(rounding=rounding)  # checks it, also where nothing draws
    _checked_ops(lists["ops"])
    across = [groups[1] for groups in lists["hierarchies"] if groups and groups[1]]
    for order in [*lists["orders"], *across]:
        if order not in ORDERS:
            raise ValueError(f"order={order!r}: expected one of {', '.join(map(repr, ORDERS))}")
    _check_accumulators(lists["accumulators"], lists["orders"])
    for dtype, accumulate, order, rounding, op, sent, groups in product(*lists.values()):
        if not _fits(accumulate, order) or _draws_nothing(order, rounding, lists["roundings"]):
            continue
        try:
            a = _chosen(accumulate, dtype, order)
        except TypeError:
            if left_out is None:
                raise
            text = f"{order} does not add {format_name(dtype)}: left out"
            left_out += [] if text in left_out else [text]
            continue
        draws = narrow_info(dtype) or narrow_info(a) or (sent is not None and sent.bits < 32)
        draws = draws and (order != FIXED or sent is not None)
        setting = Setting(dtype, a, order, rounding if draws else "nearest", op, sent, groups)
        setting.reduction(0)  # checks its arguments
        found[setting] = None
    if not found and left_out:
        raise ValueError("; ".join(left_out))
    return list(found)


def _draws_nothing(order: str, rounding: str, roundings: list[str]) -> bool:
    """Whether a compensated order is to round stochastically, which it does not."""
    return order in orders.COMPENSATED and rounding != "nearest" and "nearest" in roundings


def _fits(rule: str | ValueFormat, order: str) -> bool:
    """Whether an order takes an accumulator: "fixed" integers, and the others formats."""
    integers = isinstance(rule, np.dtype) and rule.name in FIXED_TYPES
    return isinstance(rule, str) or integers == (order == FIXED)


def _check_accumulators(rules: list[str | ValueFormat], orders: list[str]) -> None:
    """ValueError for an accumulator that no order takes, and an order that takes none of them."""
    for rule in rules:
        if not any(_fits(rule, order) for order in orders):
            named = "order 'fixed', which adds" if _fits(rule, FIXED) else "an order that rounds to"
            raise ValueError(
                f"accumulate={rule_name(rule)!r}: expected {named} it, got {', '.join(orders)}"
            )
    for order in orders:
        if not any(_fits(rule, order) for rule in rules):
            expected = ", ".join(FIXED_TYPES) if order == FIXED else "a format"
            raise ValueError(
                f"order={order!r}: expected an accumulator of {expected}, wire or contract; got "
                f"{', '.join(map(rule_name, rules))}"
            )


def rule_name(rule: str | ValueFormat) -> str:
    """The text that `accumulator_rule` takes."""
    return rule if isinstance(rule, str) else format_name(rule)


def accumulator_rule(given: Any) -> str | ValueFormat:
    """One of "wire" and "contract", a format, or a dtype of the integers of the order "fixed"."""
    if isinstance(given, str) and given == "own":
        warnings.warn(
            "accumulate='own' is now 'contract' (gpusim's default, float32 for bfloat16); 'wire' "
            "is the format in which partial sums travel. The old name goes in the next version",
            DeprecationWarning,
            stacklevel=5,  # the caller of sweep
        )
    if given is None or (isinstance(given, str) and given in ("contract", "own")):
        return "contract"
    if isinstance(given, str) and given == "wire":
        return given
    try:
        return accumulator(given)
    except ValueError as error:
        with suppress(TypeError):
            if np.dtype(given).name in FIXED_TYPES:
                return np.dtype(given)
        raise ValueError(f"{error}; in the order fixed {', '.join(FIXED_TYPES)}") from None


def _chosen(rule: str | ValueFormat, dtype: ValueFormat, order: str | Schedule) -> ValueFormat:
    """The accumulator of an order. **Raises**: TypeError if its engine does not add the dtype."""
    if not isinstance(rule, str):
        return rule
    if order == FIXED:
        return np.dtype(np.int32)
    if order == orders.EXACT:
        return dtype  # one rounding: a wider accumulator would round the exact sum first
    schedule = Reduction(order=order).schedule
    if not isinstance(schedule, Schedule):
        return dtype if rule == "wire" else default_accumulator(carrier(dtype))
    if schedule.formats and isinstance(dtype, Format):
        known = ", ".join(schedule.formats)
        raise TypeError(f"{format_name(dtype)} members: {order} is known for {known}")
    members = carrier(dtype)
    return schedule.accumulator("sum", members) or default_accumulator(members)


def items(given: Any) -> list[Any]:
    """The items of a list; a string has them between commas, and another single value is one.

    >>> items("float16,bfloat16"), items(64), items(np.float16), items(range(2))
    (['float16', 'bfloat16'], [64], [<class 'numpy.float16'>], [0, 1])
    """
    if isinstance(given, str):
        return [part.strip() for part in given.split(",") if part.strip()]
    if isinstance(given, (type, np.dtype, Mapping)) or not isinstance(given, Iterable):
        return [given]
    return list(given)


def whole_numbers(name: str, given: Any, least: int, *, doubling: bool = False) -> list[int]:
    """Distinct integers of at least `least`, from a list, an integer, or a string.

    In a string, "a..b" are all integers from a to b, or, if `doubling`, those that doubling gives;
    "a-b" are all.
    **Raises**: ValueError for others, and for none.

    >>> whole_numbers("replicas", "3,8..64", 1, doubling=True), whole_numbers("seeds", "0..3", 0)
    ([3, 8, 16, 32, 64], [0, 1, 2, 3])
    """
    values: list[Any] = []
    for item in items(given):
        values += _between(name, item, doubling) if isinstance(item, str) else [item]
    values = list(dict.fromkeys(values))
    if not values:
        raise ValueError(f"{name} is empty: a sweep needs at least one")
    for value in values:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: {value!r} given, expected integers from {least}")
    return [int(value) for value in values]


MOST = 1_000_000
"""The longest range."""


def _between(name: str, given: str, doubling: bool) -> Iterable[int]:
    ends = re.fullmatch(r"(\d+)(?:(\.\.|-)(\d+))?", given)
    if ends is None:
        raise ValueError(f"{name}: {given!r} given, expected a number or a range")
    low, high = int(ends[1]), int(ends[3] or ends[1])
    if low > high:
        raise ValueError(f"{name}: {given!r} given, expected a range that rises")
    if doubling and ends[2] != "-":
        return [low << n for n in range(max(1, high // max(low, 1)).bit_length())]
    if high - low >= MOST:
        raise ValueError(f"{name}: {given} are more than {MOST:,}")
    return range(low, high + 1)
