"""Put gpusim's collectives into JAX, and take them out again."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import jax
from jax import lax

from gpusim.reduction import Reduction, ReductionLike, as_reduction

from . import private, ragged, sums
from .lowering import board
from .partitioned.compiling import compile_partitioned
from .sums import Reductions, ReductionWarning

for _file in (__file__, ragged.__file__, sums.__file__):
    private.exclude_file(_file)  # calls are named by lines of the program


#: A Reduction or its text for all axes, or a dict of what `as_reduction` takes, by axis name.
GivenReductions = ReductionLike | Mapping[Any, ReductionLike | None] | None


class Installation:
    """The functions and lowerings that `install` replaces in JAX.

    **Attributes**: `reduction`, a Reduction or a dict of them, and `timeout`, both of `install`.
    """

    def __init__(self, reduction: Reductions, timeout: float) -> None:
        self.reduction, self.timeout = reduction, timeout

    @property
    def calls(self) -> int:
        """The call number of a program's first sum, for stochastic rounding; 0 at first.

        A program with the same input has the same bits each time, as JAX's functions do. Set
        another number before each step, after `jax.block_until_ready`, for other random bits.
        """
        return board().base

    @calls.setter
    def calls(self, number: int) -> None:
        if not 0 <= number < 2**31:
            raise ValueError(f"calls={number!r}: expected an integer from 0 to 2**31 - 1")
        board().base = number

    def __repr__(self) -> str:
        return f"Installation(reduction={self.reduction!r}, timeout={self.timeout!r})"


class Saved(NamedTuple):
    """JAX's own functions, which `uninstall` restores."""

    lowerings: dict[tuple[str, Any], Any]  # by platform and primitive
    uncacheable: set[Any]
    transpose: Any
    batch: Any
    mean: CodeType
    ragged: CodeType
    compile: Any


_saved: Saved | None = None
_current: Installation | None = None


def install(reduction: GivenReductions = None, *, timeout: float = 60.0) -> Installation:
    """Give programs for XLA:CPU `lax.ragged_all_to_all`, and sums with chosen bits.

    Programs stay as they are. For GPUs and TPUs, a sum with a chosen Reduction is refused with a
    NotImplementedError: JAX_PLATFORMS=cpu runs it on CPUs. `uninstall` restores JAX's own
    collectives, and another `install` replaces this one. Both clear JAX's caches of compiled
    functions.

    **Arguments**

    - `reduction`: how `lax.psum`, `lax.pmean`, `lax.psum_scatter`, `lax.pmax`, `lax.pmin`, the
      transposes of other collectives, and the sums that XLA's partitioner inserts reduce. Where an
      inserted sum cannot be reached, a ReductionWarning has the reason. A `Reduction`, or its text,
      holds for all axes; a dict has one for each axis name (a tuple of names for a sum over several
      axes), and leaves other axes to XLA, as None does. pmax and pmin have no order: NaN wins, and
      -0 is below +0.
    - `timeout`: a program ends with an error when devices wait for others in a collective, and
      none has come to one for this many seconds.

    **Returns**: an `Installation`, whose `calls` chooses random numbers for stochastic rounding.

    **Raises**: ModuleNotFoundError if JAX is not installed; RuntimeError if its XLA has another FFI
    version; TypeError for a reduction of another type; ValueError for one that does not sum.
    """
    global _current
    chosen = checked_reductions(reduction)
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: expected a positive number of seconds")
    made = board()
    if _saved is not None:
        uninstall()
    _put(chosen)
    made.timeout, made.base = timeout, 0
    _current = Installation(chosen, timeout)
    return _current


def uninstall() -> None:
    """Restore JAX's own collectives. Without an installation it does nothing."""
    global _saved, _current
    if _saved is None:
        return
    for (platform, primitive), entry in _saved.lowerings.items():
        if entry is None:
            del private.platform_lowerings[platform][primitive]
        else:
            private.platform_lowerings[platform][primitive] = entry
    private.uncacheable.difference_update(_saved.uncacheable)
    private.transposes[ragged.ragged_p] = _saved.transpose
    private.batchers[ragged.ragged_p] = _saved.batch
    lax.pmean.__code__ = _saved.mean
    lax.ragged_all_to_all.__code__ = _saved.ragged
    private.compiler.compile_or_get_cached = _saved.compile
    _saved = _current = None
    jax.clear_caches()


@contextmanager
def installed(
    reduction: GivenReductions = None, *, timeout: float = 60.0
) -> Iterator[Installation]:
    """A block in which gpusim's collectives are installed; then what was before is again.

    Arguments and errors are those of `install`.
    """
    before = _current
    calls = 0 if before is None else before.calls
    try:
        yield install(reduction, timeout=timeout)
    finally:
        if before is None:
            uninstall()
        else:
            install(before.reduction, timeout=before.timeout).calls = calls


def checked_reductions(given: GivenReductions) -> Reductions:
    """The Reduction, or the dict of them by axis name, of what `install` is given.

    A dict is one by axis names. Its values may be mappings of a Reduction's fields.
    """
    if isinstance(given, Mapping):
        return {axes: _checked(value, f"reduction[{axes!r}]") for axes, value in given.items()}
    return _checked(given, "reduction")


def _checked(given: ReductionLike | None, name: str) -> Reduction | None:
    if given is None:
        return None
    chosen = as_reduction(given, name)
    if chosen.op != "sum":
        raise ValueError(f"{name}={given!r}: expected op='sum'")
    return chosen


def _put(reduction: Reductions) -> None:
    global _saved
    platforms = private.platform_lowerings
    rules = {("cpu", ragged.ragged_p): ragged.lower_ragged}
    if reduction is not None:  # elsewhere than on CPUs these rules refuse
        found = sums.rules(reduction)
        rules |= {(name, primitive): found[primitive] for name in platforms for primitive in found}
    _saved = Saved(
        lowerings={(name, primitive): platforms[name].get(primitive) for name, primitive in rules},
        uncacheable={primitive for _, primitive in rules} - private.uncacheable,
        transpose=private.transposes[ragged.ragged_p],
        batch=private.batchers[ragged.ragged_p],
        mean=lax.pmean.__code__,
        ragged=lax.ragged_all_to_all.__code__,
        compile=private.compiler.compile_or_get_cached,
    )
    for (name, primitive), rule in rules.items():
        # Without a cache each call in a program has its own number, and its own line.
        private.register_lowering(primitive, rule, platform=name, cacheable=False)
    private.transposes[ragged.ragged_p] = ragged.transpose_ragged
    private.batchers[ragged.ragged_p] = ragged.batch_ragged
    # The functions stay the same objects: programs may hold them, by `from jax.lax import pmean`.
    lax.ragged_all_to_all.__code__ = _ragged_all_to_all.__code__
    if reduction is not None:
        lax.pmean.__code__ = _pmean.__code__
        private.compiler.compile_or_get_cached = _compile  # type: ignore[assignment]
    jax.clear_caches()


def _pmean(x, axis_name, *, axis_index_groups=None):  # type: ignore[no-untyped-def]
    from gpusim.jax.sums import mean

    return mean(x, axis_name, axis_index_groups)


def _ragged_all_to_all(  # type: ignore[no-untyped-def]
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *,
    axis_name, axis_index_groups=None,
):  # fmt: skip
    from gpusim.jax.ragged import ragged_all_to_all

    return ragged_all_to_all(
        operand, output, input_offsets, send_sizes, output_offsets, recv_sizes,
        axis_name=axis_name, axis_index_groups=axis_index_groups,
    )  # fmt: skip


# Sums that the partitioner inserts

REDUCING = re.compile(
    r"= \(?(?P<dtype>b?f\d+\w*|c\d+)\[.* (?P<op>all-reduce|reduce-scatter)(-start)?\("
)
OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
SHOWN = 3


def sums_of_xla(text: str) -> list[str]:
    """The reductions that XLA makes itself in a compiled program.

    **Arguments**: `text` is the program, as `jax.jit(f).lower(x).compile().as_text()` shows it.

    **Returns**: for each reduction of floating-point numbers between devices its operation, and
    the name of what it came from.

    >>> sums_of_xla('ROOT %a = f32[4]{0} all-reduce(%b), metadata={op_name="jit(f)/reduce_sum"}')
    ['all-reduce of f32 for jit(f)/reduce_sum']
    """
    found = []
    for line in text.splitlines():
        reducing = REDUCING.search(line)
        if reducing:
            name = OP_NAME.search(line)
            source = f" for {name['name']}" if name else ""
            found.append(f"{reducing['op']} of {reducing['dtype']}{source}")
    return found


def _compile(
    backend: Any, module: Any, devices: Any, options: Any, *rest: Any, **named: Any
) -> Any:
    """Compile, with the chosen bits in the sums that the partitioner inserts."""
    assert _saved is not None
    assert _current is not None
    given = backend, module, devices, options, *rest
    if devices.size == 1:
        return _saved.compile(*given, **named)
    if backend.platform != "cpu":
        executable = _saved.compile(*given, **named)
        refuse_sums(executable, backend.platform, _current.reduction)
        return executable
    return compile_partitioned(_saved.compile, _current.reduction, *given, **named)


def refuse_sums(executable: Any, platform: str, reductions: Reductions) -> None:
    """Refuse a program for another platform than CPUs in which the partitioner inserts sums.

    With a dict it warns: the sums may be over axes that the dict leaves to XLA.

    **Raises**: NotImplementedError, which names some of them.
    """
    inserted = [
        each for module in executable.hlo_modules() for each in sums_of_xla(module.to_string())
    ]
    if not inserted:
        return
    more = f", and {len(inserted) - SHOWN} more" if len(inserted) > SHOWN else ""
    text = (
        f"gpusim.jax: a Reduction is installed, and XLA makes sums in this program for {platform} "
        f"({'; '.join(inserted[:SHOWN])}{more}): gpusim's collectives run in XLA:CPU alone. Set "
        "JAX_PLATFORMS=cpu before JAX is imported, or call gpusim.jax.uninstall()"
    )
    if isinstance(reductions, Mapping):
        warnings.warn(text, ReductionWarning, stacklevel=2)
    else:
        raise NotImplementedError(text)
