"""Plans of faults: the text of `--faults`, and the faults that it names."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "DEADLY",
    "KINDS",
    "MOST_FAULTS",
    "Fault",
    "PlanError",
    "check_ranks",
    "parse",
    "plan_text",
]

MOST_FAULTS = 1_000
"""How many faults a plan may have."""

MOST_CHARACTERS = 100_000
"""How long the text of a plan may be."""

LARGEST = 1 << 62
"""The largest whole number of a plan."""


class PlanError(ValueError):
    """The text of a plan, or a value of a fault, is wrong; the message names the word."""


class _Number(NamedTuple):
    """A whole number of a fault, from `low` to `high`."""

    low: int
    high: int = LARGEST

    def read(self, text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,19}", text) or not self.low <= int(text) <= self.high:
            raise ValueError(self.expected())
        return int(text)

    def accepts(self, value: object) -> bool:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high  # type: ignore[operator]

    def expected(self) -> str:
        upper = "" if self.high == LARGEST else f" to {self.high}"
        return f"a whole number from {self.low}{upper}"


class _Seconds(NamedTuple):
    """A number of simulated seconds, above 0 and finite."""

    def read(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.accepts(value):
            raise ValueError(self.expected())
        return value

    def accepts(self, value: object) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and 0 < value < math.inf  # type: ignore[operator]

    def expected(self) -> str:
        return "a finite number of seconds above 0"


KEYS: dict[str, _Number | _Seconds] = {
    "rank": _Number(0),
    "call": _Number(1),
    "write": _Number(1),
    "wait": _Number(1),
    "code": _Number(0, 255),
    "seconds": _Seconds(),
    "bit": _Number(0, 127),
    "element": _Number(0),
    "tensor": _Number(0),
    "bytes": _Number(0),
    "attempt": _Number(0),
}
"""By key: the values that it takes. The order is that of a fault's text."""

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "exit": (("rank", "call"), ("code",)),
    "kill": (("rank", "call"), ()),
    "raise": (("rank", "call"), ()),
    "hang": (("rank", "call"), ()),
    "late": (("rank", "call", "seconds"), ()),
    "store-timeout": (("rank", "wait"), ()),
    "torn": (("rank", "write"), ("bytes",)),
    "missing": (("rank", "write"), ()),
    "flip": (("rank", "call", "bit"), ("element", "tensor")),
    "flip-result": (("rank", "call", "bit"), ("element", "tensor")),
    "nan": (("rank", "call"), ("element", "tensor")),
}
"""By kind: the keys that a fault needs, and those that it may have. All may have `attempt`."""

DEADLY = frozenset({"exit", "kill", "raise", "torn", "missing"})
"""The kinds after which the rank's process is gone, unless the program catches what is raised."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    **Attributes**: `kind` is one of `KINDS`. `rank` is the rank that it happens to, in start
    number `attempt` of the ranks (0 is the first). `call` counts the rank's calls of
    torch.distributed from 1, `write` the files that it opens for writing, `wait` its questions to
    the store. `code` is the exit code of `exit` (1 if none is given), `seconds` those of `late`,
    `bit` the bit of an element, from the least significant one, `element` and `tensor` the places
    in the call's operands (0 if none is given), and `bytes` how much of a torn file is left (half
    of it if none is given). What a kind does not have is None.

    **Raises**: PlanError if a value is missing, wrong, or not one of the kind's.

    >>> str(Fault("kill", rank=2, call=17))
    'kill rank=2 call=17'
    >>> try:
    ...     Fault("kill", rank=2)
    ... except PlanError as error:
    ...     print(error)
    kill: call= is missing, as in: kill rank=0 call=3
    """

    kind: str
    rank: int
    call: int | None = None
    write: int | None = None
    wait: int | None = None
    attempt: int = 0
    code: int | None = None
    seconds: float | None = None
    bit: int | None = None
    element: int | None = None
    tensor: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(_unknown("fault", self.kind, KINDS, self.kind))
        needed, optional = KINDS[self.kind]
        for key, values in KEYS.items():
            value = getattr(self, key)
            if value is None:
                if key in needed:
                    raise PlanError(f"{self.kind}: {key}= is missing, as in: {example(self.kind)}")
            elif key not in (*needed, *optional, "attempt"):
                raise PlanError(_foreign(self.kind, key))
            elif not values.accepts(value):
                raise PlanError(f"{self.kind}: {key}={value!r:.60}: expected {values.expected()}")

    def __str__(self) -> str:
        values = {key: getattr(self, key) for key in KEYS}
        if not self.attempt:
            del values["attempt"]
        words = [f"{key}={_shown(value)}" for key, value in values.items() if value is not None]
        return " ".join([self.kind, *words])


def _shown(value: float) -> str:
    """A value of a fault as text, which reads back as the same."""
    return repr(value).removesuffix(".0")


def parse(text: str) -> tuple[Fault, ...]:
    """Read the text of a plan: faults separated by commas, each `KIND key=value ...`.

    **Arguments**: `text` is what `--faults` was given.

    **Returns**: the faults, in the order of the text.

    **Raises**: PlanError with the fault's number and word, what was given and what is expected.

    >>> parse("kill rank=2 call=17, flip rank=1 call=9 bit=30")[1].bit
    30
    >>> try:
    ...     parse("kil rank=2 call=17")
    ... except PlanError as error:
    ...     print(error)
    fault 'kil rank=2 call=17': unknown fault 'kil'; did you mean 'kill'?
    """
    if not isinstance(text, str):
        raise TypeError(f"a plan of faults is text, got {text!r:.60}")
    if len(text) > MOST_CHARACTERS:
        raise PlanError(f"a plan of {len(text)} characters: expected at most {MOST_CHARACTERS}")
    parts = text.split(",")
    if len(parts) > MOST_FAULTS:
        raise PlanError(f"a plan of {len(parts)} faults: expected at most {MOST_FAULTS}")
    faults = tuple(_read(part, number, len(parts)) for number, part in enumerate(parts, 1))
    doubled = [fault for number, fault in enumerate(faults) if fault in faults[:number]]
    if doubled:
        raise PlanError(f"fault '{doubled[0]}' stands in the plan twice")
    return faults


def plan_text(faults: Sequence[Fault]) -> str:
    """The text of a plan, which `parse` reads.

    >>> plan_text(parse("exit  call=3 rank=1,late rank=0 call=2 seconds=30"))
    'exit rank=1 call=3, late rank=0 call=2 seconds=30'
    """
    return ", ".join(map(str, faults))


def check_ranks(faults: Sequence[Fault], ranks: int) -> None:
    """PlanError if a fault is of a rank that is not there."""
    for fault in faults:
        if fault.rank >= ranks:
            raise PlanError(f"fault '{fault}': rank={fault.rank}: expected a rank below {ranks}")


def example(kind: str) -> str:
    """The shortest fault of a kind, with values that stand for the user's.

    >>> example("torn")
    'torn rank=0 write=3'
    """
    values: dict[str, Any] = {"rank": 0, "seconds": 30, "bit": 30}
    return " ".join([kind, *(f"{key}={values.get(key, 3)}" for key in KINDS[kind][0])])


def _read(part: str, number: int, count: int) -> Fault:
    """Read one fault of a plan."""
    words = part.split()
    shown = f"fault {' '.join(words)!r:.80}" if words else f"fault {number} of {count}"
    if not words:
        raise PlanError(f"{shown} is empty: expected a fault such as: {example('kill')}")
    kind, *rest = words
    if kind not in KINDS:
        raise PlanError(f"{shown}: {_unknown('fault', kind, KINDS, words[0])}")
    needed, optional = KINDS[kind]
    values: dict[str, Any] = {}
    for word in rest:
        key, equals, text = word.partition("=")
        if not equals:
            raise PlanError(f"{shown}: {word!r:.60}: expected key=value, as in: {example(kind)}")
        if key not in KEYS:
            own = [*needed, *optional, "attempt"]
            raise PlanError(f"{shown}: {_unknown('key', key, own, word)}")
        if key not in (*needed, *optional, "attempt"):
            raise PlanError(f"{shown}: {_foreign(kind, key)}")
        if key in values:
            raise PlanError(f"{shown}: {word!r:.60}: {key}= was given before")
        try:
            values[key] = KEYS[key].read(text)
        except ValueError as error:
            raise PlanError(f"{shown}: {word!r:.60}: expected {error}") from None
    if missing := [key for key in needed if key not in values]:
        raise PlanError(f"{shown}: {missing[0]}= is missing, as in: {example(kind)}")
    return Fault(kind, **values)


def _foreign(kind: str, key: str) -> str:
    """The error for a key that another kind has."""
    needed, optional = KINDS[kind]
    own = ", ".join(f"{each}=" for each in (*needed, *optional, "attempt"))
    others = [each for each, keys in KINDS.items() if key in keys[0] + keys[1]]
    return f"{key}= is for {' and '.join(others)}; {kind} takes {own}"


def _unknown(what: str, given: str, known: Any, word: str) -> str:
    """The error for a name that is unknown, with the nearest one or all."""
    if word.startswith(("seed=", "runs=")):
        return f"{word!r:.60} draws plans: expected it alone, with --runs N"
    near = difflib.get_close_matches(given, list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return f"unknown {what} {given!r:.60}; {hint}"
