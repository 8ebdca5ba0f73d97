"""Reduction: what to do when a collective reduces: operator, order, accumulator, rounding, seed.
The `reduction` context says it for all collectives inside, and counts the summing ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from gpusim.fallback.arguments import check_word
from gpusim.fallback.formats import kind_of
from gpusim.fallback.operators import OPS
from gpusim.fallback.orders import COMPENSATED, FIXED
from gpusim.fallback.schedules import Schedule
from gpusim.fallback.spec import (
    check_compensated,
    check_divide,
    check_exact,
    check_fixed,
    check_sends,
    is_exact,
)

from ..formats import (
    Format,
    FormatLike,
    as_format,
    format_name,
    kernel_format,
    rounding_name,
)
from ..revealed import is_order_file
from ..twins import SETTINGS, TWINS, Twin
from ..wires import Wire, as_wire, wire_info
from . import text
from .replay import revealed_order

__all__ = [
    "Reduction",
    "ReductionLike",
    "State",
    "as_reduction",
    "current",
    "entered",
    "forked",
    "reduction",
]

_CHOICES: dict[str, tuple[str, ...]] = {
    "op": OPS,
    "rounding": ("nearest", "stochastic"),
}


@dataclass(frozen=True, repr=False)
class Reduction:
    """Operator, order and rounding, which determine with the inputs every bit of the result.

    **Arguments**

    - `op`: "sum", "prod", "max", "min", "logical_and" or "logical_or".
    - `order`: the order of additions. "linear" is ((x0 + x1) + x2) + ...; "reverse" the same from
      the last; "tree" adds neighbours in pairs, level by level; "ring" cuts the value into as many
      blocks as there are members and starts block b at member b. "kahan" and "neumaier" are linear,
      and keep what each addition loses, in the accumulator's format. "exact" rounds the exact sum
      of all members once, to the same bits in every order. "fixed" adds integers, as switches do:
      multiples of a unit that members have in common. "engine" leaves the sum over the
      instances of a World to the engine between them (see `like`). The name of a twin is the order
      of a real engine's all-reduce, and a `fallback.schedules.Schedule` any other one.
    - `accumulate`: the dtype every partial result is rounded to. None is the array's own, but
      float32 for bfloat16 and float16 for the 8-bit formats. A `Format`, or a FormatInfo of gfloat,
      is any other format, more slowly. With "exact", None is the result's own dtype, and any other
      dtype is what the exact sum is rounded to before it. With "fixed" it is the dtype of the
      integers: int8, int16 or int32, which is None.
    - `rounding`: "nearest" (ties to even) or "stochastic", wherever a value is rounded to a format
      narrower than float32.
    - `seed`: of stochastic rounding, 0 to 2**64 - 1. Where the Reduction is an argument of a
      collective, each call draws the same numbers; in a `gpusim.reduction` context calls count.
    - `wire`: what a sum sends is rounded to it: a `Wire`, a dtype, a `Format`, or the text of one.
    - `groups_of`, `across`: sums in levels. Consecutive members are summed in groups of so many by
      this Reduction, and the groups' sums, which have the type of its accumulator, by the Reduction
      `across`, which may be a text.
    - `divide`: what a mean divides: the "result", or the "members", each as it arrives, before it
      is added. The quotients are rounded to the accumulator.

    Reductions are immutable, hashable and compare by value; `str` gives a text, from which
    `as_reduction` makes an equal one. ValueError for a field outside these,
    TypeError for an `accumulate` that is not a dtype that adds. ValueError for products in "exact"
    and compensated orders, and for stochastic rounding in the latter; for accumulators of more than
    50 fraction bits in "exact" order, or, rounded to stochastically, more than 19; for a wire or
    groups beside another `op` than "sum"; and for a wire at hops of "exact" and compensated orders.

    >>> Reduction(order="ring", accumulate="float16")
    Reduction(op='sum', order='ring', accumulate='float16')
    >>> Reduction(order="butterfly")
    Traceback (most recent call last):
    ...
    ValueError: order='butterfly': expected one of 'linear', 'reverse', 'tree', 'ring', 'exact',
    'fixed', 'kahan', 'neumaier', 'engine', the name of a twin (Reduction.twins() lists them), or a
    Schedule
    """

    op: str = "sum"
    order: str | Schedule = "linear"
    accumulate: DTypeLike | FormatLike | None = None
    rounding: str = "nearest"
    seed: int = 0
    wire: Wire | DTypeLike | FormatLike | None = None
    groups_of: int | None = None
    across: Reduction | None = None
    divide: str = "result"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", rounding_name(self.rounding))
        for name, choices in _CHOICES.items():
            given = getattr(self, name)
            if not isinstance(given, str) or given not in choices:
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={given!r}: expected one of {expected}")
        if isinstance(self.order, str) and is_order_file(self.order):
            object.__setattr__(self, "order", revealed_order(self.order))
        if isinstance(self.order, str) and self.order in SETTINGS:
            raise ValueError(
                f"order={self.order!r}: the twin is more than an order; expected "
                f"as_reduction({self.order!r}) or Reduction.like({self.order!r})"
            )
        if not isinstance(self.order, Schedule) and self.order not in (*text.ORDER_NAMES, *TWINS):
            raise ValueError(
                f"order={self.order!r}: expected one of {', '.join(map(repr, text.ORDER_NAMES))}, "
                "the name of a twin (Reduction.twins() lists them), or a Schedule"
                f"{text.nearest(str(self.order), text.NAMES)}"
            )
        object.__setattr__(self, "accumulate", _accumulator(self.accumulate))
        if self.order == "engine" and (self.accumulate, self.rounding) != (None, "nearest"):
            raise ValueError(
                "order='engine': expected no accumulate and rounding='nearest', as the engine "
                f"adds in its own way; got {self.accumulate!r} and {self.rounding!r}"
            )
        if is_exact(self.order):
            check_exact(self.op, kernel_format(self.accumulate), self.rounding)
        if self.order == FIXED:
            check_fixed(self.op, kernel_format(self.accumulate), self.rounding)
        if self.order in COMPENSATED:
            accumulator = kernel_format(self.accumulate)
            check_compensated(self.op, self.order, accumulator, self.rounding)
        object.__setattr__(self, "seed", check_word("seed", self.seed))
        object.__setattr__(self, "wire", _wire(self.wire))
        if self.across is not None:
            object.__setattr__(self, "across", as_reduction(self.across, "across"))
        check_sends(self.op, self.order, wire_info(self.wire), self.groups_of, self.across)
        check_divide(self.op, self.order, self.divide, self.across)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: the hash of a string is another one in another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def like(cls, name: str | os.PathLike[str]) -> Reduction:
        """The reduction of an engine, by its name: the bits of its all-reduce.

        A name that ends with ".json" is a file of `gpusim reveal`, which has the order of any
        engine, for the numbers of elements and ranks and the types that were revealed. It is read
        now; its text is the file's name.

        The names of twins are those that `twins` lists; each replica stands for a rank. Those of
        orders are names too: `like(name)` is `as_reduction(name)` for each of them. "engine" is
        the engine of the World around: each instance sums its own replicas in `linear` order,
        and MPI or NCCL adds up the sums. The fastest way there is, and exempt from the contract:
        the bits may differ between numbers of instances. On one instance it is `linear`.

        Some twins are more than an order: `like("torch-fp16-hook")` has a wire and divides members.

        ValueError for any other name. A fold raises ValueError where it is not known what the
        engine does with so many members, and TypeError for types that it adds in another way.

        >>> Reduction.like("openmpi-ring")
        Reduction(op='sum', order='openmpi-ring')
        >>> import numpy as np
        >>> from gpusim import lax, vmap
        >>> x = np.array([2048, 1, 1, 1, 1], np.float16)
        >>> def total(x, like):
        ...     return lax.psum(x, "i", reduction=Reduction.like(like))
        >>> for name in ("xla-cpu", "openmpi-linear", "mpich"):
        ...     print(name, float(vmap(lambda x: total(x, name), out_axes=None, axis_name="i")(x)))
        xla-cpu 2048.0
        openmpi-linear 2052.0
        mpich 2050.0
        """
        if is_order_file(name):
            return cls(order=os.fspath(name))
        if name not in text.NAMES:
            expected = ", ".join(map(repr, text.NAMES))
            hint = text.nearest(str(name), text.NAMES)
            raise ValueError(
                f"like({name!r}): expected one of {expected}, or the name of a file of gpusim "
                f"reveal, which ends with .json{hint}"
            )
        return _made({"order": str(name)})

    @classmethod
    def twins(cls) -> dict[str, Twin]:
        """All twins by name, each with its engine, its fold, and what was checked.

        >>> mpich = Reduction.twins()["mpich"]
        >>> mpich.engine, mpich.checked
        ('MPICH 5.0.2', 'run against the engine')
        """
        return TWINS | SETTINGS

    @property
    def schedule(self) -> str | Schedule:
        """The order as the kernels take it: a twin's is its Schedule.

        >>> Reduction(order="mpich").schedule
        Schedule(cases=(Case(fold=Tree(pairs_first=True), ...),), ...)
        """
        if isinstance(self.order, str) and self.order in TWINS:
            return TWINS[self.order].schedule
        return self.order

    @cached_property
    def draws(self) -> bool:
        """Whether its sums take random numbers: of additions, on the wire, or across.

        >>> Reduction().draws, Reduction(wire=Wire("bfloat16", rounding="stochastic")).draws
        (False, True)
        """
        ways = [self.rounding, *([self.wire.rounding] if isinstance(self.wire, Wire) else [])]
        return "stochastic" in ways or (self.across is not None and self.across.draws)

    def __eq__(self, other: object) -> bool:
        # None is compared first: np.dtype("float64") == None.
        if not isinstance(other, Reduction):
            return NotImplemented
        own, others = (
            (
                *(x.op, x.order, x.accumulate is None, x.accumulate, x.rounding, x.seed),
                *(x.wire, x.groups_of, x.across, x.divide),
            )
            for x in (self, other)
        )
        return own == others

    def settings(self) -> dict[str, Any]:
        """The operator, the order and the other fields that differ from their defaults.

        >>> Reduction(order="ring", accumulate="float64").settings()
        {'op': 'sum', 'order': 'ring', 'accumulate': 'float64'}
        """
        found: dict[str, Any] = {"op": self.op, "order": self.order}
        if self.accumulate is not None:
            dtype = self.accumulate
            found["accumulate"] = dtype.name if isinstance(dtype, np.dtype) else dtype
        others = {each.name: each.default for each in fields(self)[3:]}
        return found | {
            name: getattr(self, name)
            for name, default in others.items()
            if getattr(self, name) != default
        }

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"Reduction({shown})"

    def __str__(self) -> str:
        """The text that `as_reduction` takes: a name, and the fields that differ from its own.

        A Schedule has no text, unless it is a twin's: "<Schedule>" stands for it, which
        `as_reduction` refuses.

        >>> print(Reduction(order="ring", accumulate="float32", wire="bfloat16"))
        ring accumulate=float32 wire=bfloat16
        >>> print(Reduction(groups_of=8, across=Reduction(order="tree")))
        linear groups_of=8 across tree
        >>> from dataclasses import replace
        >>> print(replace(Reduction.like("torch-fp16-hook"), seed=7))
        torch-fp16-hook seed=7
        """
        return text.text_of(self)


#: What is taken where a Reduction is expected; see `as_reduction`.
ReductionLike = Reduction | str | os.PathLike[str] | Mapping[str, Any]


def as_reduction(given: ReductionLike, name: str = "reduction") -> Reduction:
    """A Reduction, from its text or its fields; everything that takes a Reduction takes these.

    **Arguments**

    - `given`: a Reduction, which is returned as it is; its text, as `str` of a Reduction gives it;
      the path of a file of `gpusim reveal`, which ends with .json; or a mapping of its fields,
      whose values are those of `Reduction`, or texts. The page on numerics has the text's grammar,
      under "A reduction as text".
    - `name`: of the argument, for errors.

    **Returns**: the Reduction; `as_reduction(str(r)) == r` for each one that has a text.

    **Raises**: ValueError for a text or a field that is not understood, with the nearest names, and
    for the text of a Schedule that has no name; TypeError for other types; and as `Reduction`.

    >>> import gpusim
    >>> gpusim.as_reduction("ring accumulate=float32 wire=int8:amax")
    Reduction(op='sum', order='ring', accumulate='float32', wire=Wire('int8', scale='amax'))
    >>> gpusim.as_reduction("gloo-ring groups_of=8 across tree rounding=stochastic seed=7").across
    Reduction(op='sum', order='tree', rounding='stochastic', seed=7)
    >>> print(gpusim.as_reduction({"order": "torch-fp16-hook", "wire": None}))
    torch-fp16-hook wire=none
    >>> gpusim.as_reduction("glooring")
    Traceback (most recent call last):
    ...
    ValueError: reduction='glooring': expected an order (linear, reverse, ...) or the name of a twin
    (...), got 'glooring'; did you mean 'gloo-ring', 'gcl-ring' or 'ring'?
    """
    if isinstance(given, Reduction):
        return given
    if not isinstance(given, (str, Mapping)):
        if isinstance(given, os.PathLike):
            return as_reduction(os.fspath(given), name)
        raise TypeError(
            f"{name}: expected a gpusim.Reduction, its text or a mapping of its fields, got "
            f"{given!r:.200}"
        )
    try:
        if isinstance(given, str) and ".json" in given:
            return _parse(given)  # a file may change
        return _parsed(given) if isinstance(given, str) else _made(given)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={given!r:.200}: {error!s:.2000}") from None


@lru_cache(256)
def _parsed(words: str) -> Reduction:
    """`_parse` of a text that means the same each time."""
    return _parse(words)


def _parse(words: str) -> Reduction:
    """The Reduction of a text: a level's `across` is the one that follows it."""
    found: Reduction | None = None
    for level in reversed(text.split_levels(words)):
        fields = text.read_level(level)
        if found is not None:
            if fields.get("groups_of") is None:
                raise ValueError(f"{' '.join(level)!r}: expected groups_of=, as across follows")
            fields["across"] = found
        found = _made(fields)
    assert found is not None
    return found


def _made(given: Mapping[str, Any]) -> Reduction:
    return Reduction(**text.fields_of(given))


def _wire(given: Any) -> Wire | None:
    """A Wire, from what Reduction takes for it."""
    is_text = isinstance(given, str) and (":" in given or "@" in given)
    return text.wire_of(given) if is_text or _is_format(given) else as_wire(given)


def _is_format(given: Any) -> bool:
    return isinstance(given, str) and text.is_format_text(given)


def _accumulator(given: DTypeLike | FormatLike | None) -> np.dtype[Any] | Format | None:
    if _is_format(given):
        given = cast(Format, text.format_of(cast(str, given), {}))
    try:
        given = format_name(given)
    except ValueError as error:
        raise ValueError(f"accumulate={given!r}: {error}") from None
    general = as_format(given)
    if given is None or general is not None:
        return general
    try:
        dtype = np.dtype(cast(DTypeLike, given))
    except (TypeError, ValueError, SyntaxError):  # NumPy parses texts
        raise TypeError(f"accumulate={given!r:.80}: expected a dtype, a Format or None") from None
    try:
        kind = kind_of(dtype)
    except TypeError as error:
        raise TypeError(f"accumulate={given!r:.80}: {error!s:.200}") from None
    if kind == "bool":
        raise TypeError("accumulate=bool: expected a dtype that adds, such as int32 or float32")
    return dtype


class State:
    """A reduction in force, and how many summing leaves have been reduced under it.

    `reduction` is the Reduction. `calls` can be read and set: a run that resumes sets it to what
    it was, and the random numbers go on where they stopped.
    """

    def __init__(self, reduction: Reduction, calls: int = 0) -> None:
        self.reduction = reduction
        self.calls = calls

    @property
    def calls(self) -> int:
        """The number that the next summing leaf gets."""
        return self._calls

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls = check_word("calls", value)

    def next_calls(self, leaves: int) -> int:
        """The call number of the first of `leaves` summing leaves; the counter moves past them."""
        first = self._calls
        self.calls = first + leaves
        return first

    @property
    def is_default(self) -> bool:
        """Whether this is the state outside of any `reduction` context."""
        return False

    def __repr__(self) -> str:
        return f"State({self.reduction!r}, calls={self.calls})"


class _Default(State):
    """The state outside of any context, which counts nothing: every leaf is call 0."""

    @property
    def is_default(self) -> bool:
        return True

    def next_calls(self, leaves: int) -> int:
        return 0


_DEFAULT = _Default(Reduction())
_state: ContextVar[State | None] = ContextVar("gpusim_reduction", default=None)


def current() -> State:
    """The state of the innermost `reduction` context, or one with the default Reduction.

    >>> current()
    State(Reduction(op='sum', order='linear'), calls=0)
    """
    return _state.get() or _DEFAULT


@contextmanager
def reduction(base: ReductionLike | None = None, /, **changes: Any) -> Iterator[State]:
    """Reduce in this way in all collectives inside the `with` block.

    Takes a Reduction, or what `as_reduction` takes, or its fields by name, or both (the fields then
    replace those of the Reduction).
    Contexts nest: the inner one holds alone, with fields and a counter of its own, and the outer
    one's counter goes on afterwards. Threads that copy the context (pmap's replicas do) see it;
    other threads do not. Raises what Reduction raises.

    >>> with reduction("ring rounding=stochastic", seed=7) as state:
    ...     state.calls = 12  # resume
    ...     current()
    State(Reduction(op='sum', order='ring', rounding='stochastic', seed=7), calls=12)
    """
    start = Reduction() if base is None else as_reduction(base)
    with entered(State(replace(start, **changes))) as state:
        yield state


@contextmanager
def entered(state: State) -> Iterator[State]:
    """Make `state` the current one inside the `with` block; each pmap replica enters its fork."""
    token = _state.set(state)
    try:
        yield state
    finally:
        _state.reset(token)


def forked(state: State) -> State:
    """A copy of `state` with a counter of its own, which starts where that of `state` stands.

    >>> with reduction(order="tree") as state:
    ...     child = forked(state)
    ...     _ = child.next_calls(3)
    ...     state.calls, child.calls
    (0, 3)
    """
    return type(state)(state.reduction, state.calls)
