"""The text form of a Reduction: one parser and one printer.

    text    = level ("across" level)*          a level but the last has groups_of=
    level   = [NAME] (KEY "=" VALUE)*          words between blanks
    FORMAT  = a dtype | "eEmM" ("+" FIELD "=" VALUE)*
    WIRE    = FORMAT [":" SCALE [":" BLOCK]] [":stochastic"] ["@" AT] | "mx:" FORMAT [":" SCALE] ...
              | "nvfp4" ...

The name is an order's, a twin's (`NAMES` has them, and a name means one thing), or that of a file
of `gpusim reveal`, which ends with .json. A twin that is more than an order sets fields too; keys
that follow replace them. Fields that are not named have their defaults, and are not printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import numpy as np

from gpusim.fallback.formats import KINDS
from gpusim.fallback.orders import COMPENSATED, EXACT, FIXED, ORDERS
from gpusim.fallback.schedules import Loops, Schedule, Walk
from gpusim.fallback.wires import NVFP4

from ..formats import NAMED_FORMATS, ROUNDINGS, Format, format_name, rounding_name
from ..revealed import is_order_file
from ..twins import SETTINGS, TWINS, nccl_ring
from ..wires import NAMED, Wire
from .replay import RevealedOrder

__all__ = [
    "NAMES",
    "ORDER_NAMES",
    "UNNAMED",
    "fields_of",
    "format_of",
    "format_text",
    "is_format_text",
    "nearest",
    "read_level",
    "split_levels",
    "text_of",
    "wire_of",
    "wire_text",
]

ORDER_NAMES = (*ORDERS, EXACT, FIXED, *COMPENSATED, "engine")
"""The orders of the contract, and "engine", which leaves sums to the engine of a World."""

NAMES = (*ORDER_NAMES, *TWINS, *SETTINGS)
"""The one namespace: an order, a twin that is an order, or a twin that sets more fields."""

UNNAMED = "<Schedule>"
"""Printed instead of an order that has no text; the parser refuses it."""

KEYS = ("op", "order", "accumulate", "rounding", "seed", "wire", "groups_of", "divide")
PARAMETERS: dict[str, tuple[str, ...]] = {"nccl-ring": ("chunk", "channels")}
"""The keys that one twin has for itself."""

_FLAGS = (
    *("has_infinities", "has_subnormals", "has_negative_zero"),
    *("is_signed", "is_twos_complement"),
)
_FORMAT_FIELDS = ("bias", "high_nans", *_FLAGS)
_SCALES = ("amax", "floor", "ceil", "even", NVFP4)
_NUMBER = r"[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,3})?"
_WIRE = (
    "expected FORMAT, FORMAT:SCALE, FORMAT:SCALE:BLOCK, mx:FORMAT or nvfp4, then perhaps "
    ":stochastic, and @hops, @ends, @members or @result"
)


LONGEST = 8192
"""Characters of a text, which may name a file of an order."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error: the known words that look like this one.

    >>> nearest("glooring", NAMES)
    "; did you mean 'gloo-ring', 'gcl-ring' or 'ring'?"
    >>> nearest("xyz", NAMES)
    ''
    """
    close = get_close_matches(word, list(known), n=3)
    if not close:
        return ""
    *others, last = map(repr, close)
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


# Printing


def text_of(reduction: Any) -> str:
    """The text of a Reduction; see `Reduction.__str__`."""
    words, level = [], reduction
    while True:
        words += _level(level)
        if level.across is None:
            return " ".join(words)
        words.append("across")
        level = level.across


def _level(reduction: Any) -> list[str]:
    """The words of a level: a name, and the keys that differ from what the name says."""
    own = {name: _value(name, getattr(reduction, name)) for name in KEYS if name != "order"}
    order = reduction.order
    if isinstance(order, str):
        return _words([order], own, _DEFAULTS)
    if isinstance(order, RevealedOrder):
        return _words([order.name], own, _DEFAULTS)
    named = [twin for twin in SETTINGS.values() if twin.schedule == order]
    if named:  # twins may have a schedule in common
        forms = [_words([twin.name], own, _set_by(twin.name)) for twin in named]
        return min(forms, key=len)
    return _words(_parameters(order) or [UNNAMED], own, _DEFAULTS)


def _words(first: list[str], own: Mapping[str, str], base: Mapping[str, str]) -> list[str]:
    return first + [f"{name}={value}" for name, value in own.items() if value != base[name]]


def _parameters(order: Schedule) -> list[str]:
    """The words of `nccl_ring` with parameters; none for any other Schedule."""
    fold = order.cases[0].fold
    if isinstance(fold, Walk) and isinstance(fold.cut, Loops):
        chunk, channels = fold.cut.chunk, fold.cut.channels
        if order == nccl_ring(chunk=chunk, channels=channels):
            return ["nccl-ring", f"chunk={chunk}", f"channels={channels}"]
    return []


def _value(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name == "wire":
        return wire_text(value)
    return format_text(value) if name == "accumulate" else str(value)


def format_text(given: Any) -> str:
    """The text of a format: a dtype, a Format, or a name that a Wire has.

    >>> format_text(np.dtype("float32")), format_text(Format(4, 3, bias=8, has_infinities=False))
    ('float32', 'e4m3+bias=8+has_infinities=false')
    """
    if isinstance(given, str):
        return given
    if isinstance(given, np.dtype):
        return given.name
    base = f"e{given.exponent_bits}m{given.mantissa_bits}"
    changed = [
        f"+{each.name}={_plain(getattr(given, each.name))}"
        for each in fields(given)
        if each.name in _FORMAT_FIELDS
        and getattr(given, each.name)
        != (given._default(each.name) if each.default is None else each.default)
    ]
    return base + "".join(changed)


def _plain(value: bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def wire_text(wire: Wire) -> str:
    """The text of a Wire.

    >>> wire_text(Wire("int8", scale="amax", block=64, at="ends"))
    'int8:amax:64@ends'
    """
    parts: list[Any] = [format_text(wire.format), wire.scale, wire.block]
    if wire.is_nvfp4:
        parts = [NVFP4]
    elif isinstance(wire.scale, float):
        parts[1] = np.float32(wire.scale)  # whose text is short, and means the same
    shown = [str(part) for part in parts if part is not None]
    shown += [wire.rounding] if wire.rounding != "nearest" else []
    return ":".join(shown) + (f"@{wire.at}" if wire.at != "hops" else "")


# Parsing


def split_levels(text: str) -> list[list[str]]:
    """The words of each level.

    **Raises**: ValueError for an empty level.
    """
    levels: list[list[str]] = [[]]
    if len(text) > LONGEST:
        raise ValueError(f"{len(text):,} characters: expected at most {LONGEST:,}")
    for word in text.split():
        if word == "across":
            levels.append([])
        else:
            levels[-1].append(word)
    if not all(levels):
        where = "" if len(levels) == 1 else ", on both sides of across,"
        raise ValueError(f"expected the name of an order or a twin, or keys{where} got none")
    return levels


def read_level(words: list[str]) -> dict[str, Any]:
    """The fields of a level, by name.

    **Raises**: ValueError for words that are not understood, with the nearest ones that are.
    """
    found: dict[str, Any] = {}
    if words[0].startswith("Reduction("):
        raise ValueError("expected what str() of a Reduction gives, got what repr() gives")
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals and position == 0:
            name, value = "order", word
        elif not equals:
            raise ValueError(
                f"{word!r:.80}: expected KEY=VALUE, of the keys {', '.join(KEYS)}{_hint(word)}"
            )
        known = (*KEYS, *(key for keys in PARAMETERS.values() for key in keys))
        if name not in known:
            raise ValueError(
                f"{word!r:.80}: expected one of the keys {', '.join(KEYS)}{nearest(name, known)}"
            )
        if name in found:
            raise ValueError(f"{word!r}: {name} is said twice")
        found[name] = _read(name, value)
    return found


def _hint(word: str) -> str:
    if word in NAMES:
        return "; the name of the order comes first"
    return nearest(word, KEYS)


def _read(name: str, value: str) -> Any:
    if name in ("seed", "groups_of", "chunk", "channels"):
        return _number(name, value)
    if name == "wire":
        return None if value == "none" else wire_of(value)
    if name == "rounding":
        return rounding_name(value)
    if name == "accumulate":
        return None if value == "none" else format_of(value, _ACCUMULATORS)
    return value


def _number(name: str, value: str) -> int | None:
    if name == "groups_of" and value == "none":
        return None
    if not re.fullmatch(r"-?[0-9]{1,20}", value):
        raise ValueError(f"{name}={value!r}: expected an integer")
    return int(value)


def is_format_text(text: str) -> bool:
    """Whether a text looks like that of a Format, such as "e5m6"."""
    return re.match(r"e[0-9]+m[0-9]+(\+|$)", text) is not None


def format_of(text: str, known: Mapping[str, Any], name: str = "accumulate") -> Any:
    """A format by its text: one of the `known` ones by name, or a Format.

    **Raises**: ValueError, with `name`, for any other text.

    >>> format_of("e4m3+bias=8", {})
    Format(4, 3, bias=8)
    """
    try:
        text = format_name(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None
    if text in known:
        return known[text]
    if not is_format_text(text):
        raise ValueError(
            f"{name}={text!r}: expected one of {', '.join(known)}, or a format such as e5m6"
            f"{nearest(text, known)}"
        )
    widths, *others = text.split("+")
    exponent, mantissa = widths[1:].split("m")
    options: dict[str, Any] = {}
    for other in others:
        key, equals, value = other.partition("=")
        if not equals or key not in _FORMAT_FIELDS or key in options:
            raise ValueError(
                f"{name}={text!r}: {other!r}: expected FIELD=VALUE, once for each of "
                f"{', '.join(_FORMAT_FIELDS)}{nearest(key, _FORMAT_FIELDS)}"
            )
        options[key] = _field(f"{name}={text!r}: {key}", value, is_flag=key in _FLAGS)
    try:
        return Format(_width(exponent), _width(mantissa), **options)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def _width(digits: str) -> int:
    return int(digits[:9])  # far above the widest: Format refuses it


def _field(what: str, value: str, *, is_flag: bool) -> bool | int:
    if is_flag and value in ("true", "false"):
        return value == "true"
    if is_flag or not re.fullmatch(r"-?[0-9]{1,9}", value):
        expected = "true or false" if is_flag else "an integer"
        raise ValueError(f"{what}={value!r}: expected {expected}")
    return int(value)


def wire_of(text: str) -> Wire:
    """A Wire by its text; "mx:FORMAT" is `Wire.mx`.

    **Raises**: ValueError for any other text.

    >>> wire_of("int8:amax:64@ends"), wire_of("bfloat16:stochastic")
    (Wire('int8', scale='amax', block=64, at='ends'), Wire('bfloat16', rounding='stochastic'))
    >>> wire_of("mx:float4_e2m1fn:even")
    Wire('float4_e2m1fn', scale='even', block=32)
    """
    rest, at_sign, at = text.partition("@")
    is_mx = rest.startswith("mx:")
    name, *parts = rest.removeprefix("mx:").split(":")
    options: dict[str, Any] = {"at": at} if at_sign else {}
    if parts and parts[-1] in ("nearest", "stochastic", *ROUNDINGS):
        options["rounding"] = rounding_name(parts.pop())
    if len(parts) > 2 - is_mx or not all([name, *parts]) or (at_sign and not at):
        raise ValueError(f"wire={text!r}: {_WIRE}")
    scale: Any = parts[0] if parts else None
    if scale is not None and re.fullmatch(_NUMBER, scale):
        scale = float(scale)
    elif scale is not None and scale not in _SCALES:
        raise ValueError(
            f"wire={text!r}: wire scale={parts[0]!r}: expected one of "
            f"{', '.join(map(repr, _SCALES))}, or a number{nearest(parts[0], _SCALES)}"
        )
    if len(parts) == 2:
        options["block"] = int(parts[1]) if re.fullmatch("[0-9]{1,18}", parts[1]) else parts[1]
    try:
        if is_mx:
            return Wire.mx(name, *parts[:1], **options)
        form = format_of(name, _WIRE_FORMATS, "format")
        return Wire(form, scale, **options)
    except ValueError as error:
        raise ValueError(f"wire={text!r}: {error}") from None


# The fields of a name


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Reduction for fields by name, whose order may be any name.

    **Raises**: ValueError for a name or a field that there is not.
    """
    known = (*KEYS, "across", *(key for keys in PARAMETERS.values() for key in keys))
    for name in given:
        if name not in known:
            raise ValueError(
                f"{name!r:.80}: expected one of the fields {', '.join((*KEYS, 'across'))}"
                f"{nearest(str(name), known)}"
            )
        value = given[name]
        if isinstance(value, str) and len(value) > LONGEST >> (3 * (name != "order")):
            raise ValueError(f"{name}={value[:40]!r}...: a text of {len(value):,} characters")
    others = dict(given)
    order = others.pop("order", "linear")
    if not isinstance(order, str):
        if not isinstance(order, Schedule):
            raise TypeError(f"order={order!r:.80}: expected a name, or a Schedule")
        return {"order": order, **_without_parameters(others, "a Schedule")}
    if order == UNNAMED:
        raise ValueError(
            "a Schedule without a name has no text; pass the Reduction itself, or its order"
        )
    if order not in NAMES and not is_order_file(order):
        raise ValueError(
            f"expected an order ({', '.join(ORDER_NAMES)}) or the name of a twin "
            f"({', '.join((*TWINS, *SETTINGS))}), or a file (order.json), got {order!r:.80}"
            f"{nearest(order, NAMES)}"
        )
    if order in SETTINGS:
        twin = SETTINGS[order]
        fields = _without_parameters(others, order)
        return {"order": twin.schedule, **dict(twin.fields), **fields}
    chosen = {key: others.pop(key) for key in PARAMETERS.get(order, ()) if key in others}
    if chosen:
        return {"order": nccl_ring(**chosen), **others}
    return {"order": order, **_without_parameters(others, order)}


def _without_parameters(given: dict[str, Any], order: str) -> dict[str, Any]:
    for owner, keys in PARAMETERS.items():
        for key in keys:
            if key in given:
                raise ValueError(f"{key}={given[key]!r}: {order} lacks it; {owner} has it")
    return given


_DEFAULTS = {
    "op": "sum",
    "accumulate": "none",
    "rounding": "nearest",
    "seed": "0",
    "wire": "none",
    "groups_of": "none",
    "divide": "result",
}


def _set_by(name: str) -> dict[str, str]:
    """The fields that a twin sets, as text."""
    return _DEFAULTS | {key: _value(key, value) for key, value in SETTINGS[name].fields}


_ACCUMULATORS: dict[str, Any] = {
    **{dtype.name: dtype for dtype, kind in KINDS.items() if kind != "bool"},
    **NAMED_FORMATS,
}
_WIRE_FORMATS: dict[str, Any] = {
    **{dtype.name: dtype for dtype, kind in KINDS.items() if kind == "float"},
    **{name: name for name in (*NAMED, NVFP4)},
}
