"""gpusim.rng: random numbers in replicated programs, with a stream for each replica.

A stream depends on seed, replica and call only, so it is the same under every map.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_index
from numpy.typing import DTypeLike

from gpusim.fallback import random as kernels
from gpusim.fallback.arguments import check_word
from gpusim.fallback.formats import BFLOAT16, kind_of

from .errors import GpusimError
from .libraries import on_device, to_host, to_library_of
from .maps.axis_environment import (
    Axes,
    axis_environment,
    diverging_axes,
    global_indices,
    lockstep_axes,
    union,
)
from .maps.mapped_array.align import (
    common_axes,
    elementwise,
    lead,
    library_here,
    sizes,
    visible_ndim,
    visible_shape,
)
from .maps.mapped_array.array import Array, MappedArray, lift, unpack, wrap
from .maps.names import is_positional, resolve_names, split_names
from .maps.scheduler import PmapCall, ReplicaThread, enclosing_replica

__all__ = ["rng"]

AxisName = Hashable
Shape = int | Sequence[int] | None

FLOATS = tuple(map(np.dtype, ("float16", BFLOAT16, "float32", "float64")))
INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


class rng:
    """Random numbers inside maps; each replica along an axis draws its own.

    The generator may be made inside or outside of the mapped function; the axis is looked up at
    each draw. Draws are MappedArrays under vmap and shard_map, and plain arrays under pmap, with
    the same bits for all maps and nestings. A replica's draws do not depend on the number of
    replicas, nor on axes other than `axis_name`: along those all replicas draw the same numbers.

    **Arguments**:

    - `seed`: 0 to 2**64 - 1. Generators with the same seed draw the same numbers, on any axis.
    - `axis_name`: the name of a mapped axis, or a tuple of names, whose replicas are counted
      row-major in the tuple's order.
    - `calls`: the number of the first draw (to continue where another generator stopped).

    **Raises**:

    - ValueError: if seed or calls is out of range, or axis_name is empty, has a name twice or has
      an integer for a name.
    - TypeError: if seed or calls is not an integer, or a name is not hashable.
    - NameError: by the draws, if no enclosing map binds the axis.
    - GpusimError: by the draws, in a branch that only some replicas take under vmap, from a
      generator that was made outside of it.

    >>> import numpy as np, gpusim
    >>> generator = gpusim.rng(0, "i")
    >>> noisy = gpusim.vmap(lambda x: x + generator.normal(std=0.1), axis_name="i")
    >>> noisy(np.zeros(3, np.float32))
    array([-0.04863654,  0.04564084, -0.02579963], dtype=float32)
    >>> generator
    rng(seed=0, axis_name='i', calls=1)
    >>> generator.calls = 0
    >>> gpusim.pmap(lambda x: x + generator.normal(std=0.1), "i")(np.zeros(3, np.float32))
    array([-0.04863654,  0.04564084, -0.02579963], dtype=float32)

    **Where the bits come from**

    Each element of a draw takes one 64-bit word of Philox4x64-10, whatever the distribution and the
    dtype. The key is (seed, 1). For element e (of one replica, in C order) the four words of the
    counter are, lowest first,

    1. 1 + e // 4,
    2. the number of the call: how many draws the replica has made from this generator before,
    3. the replica's index along `axis_name`, in the whole program and not in one process,
    4. 0; to draw an element again (`integers`, equal keys in `permutation`) 1, 2, and so on,

    and lane e % 4 of the block is the word, so that
    ``numpy.random.Philox(key=[seed, 1], counter=[0, call, replica, 0]).random_raw(n)`` (arrays of
    uint64) is the words of a draw of n elements. Key (seed, 0) is that of stochastic rounding, so
    that one seed may serve both.
    """

    def __init__(self, seed: int, axis_name: AxisName, *, calls: int = 0) -> None:
        self._seed = check_word("seed", seed)
        self._axis_name = _checked_axis_name(axis_name)
        self._lock = threading.Lock()
        self._outside = _Counter(check_word("calls", calls))
        self._diverging = diverging_axes()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> rng:
        """The generator that continues from the `state` of another one.

        **Raises**:

        - TypeError: if the state is not a mapping; and as `rng`.
        - ValueError: if it has other keys than `state`; and as `rng`.

        >>> import gpusim, json
        >>> saved = json.dumps(gpusim.rng(7, ("x", "y"), calls=12).state)
        >>> gpusim.rng.from_state(json.loads(saved))
        rng(seed=7, axis_name=('x', 'y'), calls=12)
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping such as rng.state gives, but got {state!r}")
        expected = {"seed", "axis_name", "calls"}
        if set(state) != expected:
            raise ValueError(f"state must have the keys {sorted(expected)}, but got {list(state)}")
        return cls(**state)

    @property
    def seed(self) -> int:
        """The seed."""
        return self._seed

    @property
    def axis_name(self) -> AxisName:
        """The axis along which replicas draw different numbers, or a tuple of axes."""
        return self._axis_name

    @property
    def calls(self) -> int:
        """The number of the next draw; it can be set.

        Under pmap each replica counts its own draws, from the count of the code that called pmap;
        the code after the pmap continues from the largest count.
        """
        with self._lock:
            return self._counter().latest()

    @calls.setter
    def calls(self, value: int) -> None:
        value = check_word("calls", value)
        with self._lock:
            self._own_counter().calls = value

    @property
    def state(self) -> dict[str, Any]:
        """Seed, axis_name and calls, which JSON can hold if it can hold the names."""
        name = self._axis_name
        names = list(name) if isinstance(name, tuple) else name
        return {"seed": self._seed, "axis_name": names, "calls": self.calls}

    def __repr__(self) -> str:
        return f"rng(seed={self._seed}, axis_name={self._axis_name!r}, calls={self.calls})"

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], rng], tuple[dict[str, Any]]]:
        return type(self).from_state, (self.state,)  # copies count on their own

    # Draws.

    def uniform(
        self, shape: Shape = None, low: Any = 0.0, high: Any = 1.0, dtype: DTypeLike = np.float32
    ) -> Any:
        """Uniformly distributed numbers with low <= number < high.

        **Arguments**:

        - `shape`: that of one replica's result; None is that of `low` and `high` together.
        - `low`, `high`: finite numbers or arrays, which may be mapped. They are rounded to
          `dtype`.
        - `dtype`: float16, bfloat16, float32 or float64.

        **Returns**: low + u * (high - low), computed in float64 from u = k / 2**53, each k as
        probable, and rounded once to `dtype`; the number below `high` where that would reach it.

        **Raises**:

        - ValueError: unless low < high, in `dtype` and everywhere; and for bad shapes.
        - TypeError: for other dtypes, and bounds that are not real numbers.

        >>> import gpusim
        >>> draw = lambda: gpusim.rng(0, "i").uniform(2, low=-1)
        >>> gpusim.vmap(draw, axis_name="i", axis_size=3)()
        array([[ 0.62670815,  0.50266284],
               [-0.6480963 , -0.6233634 ],
               [ 0.7964098 , -0.49655658]], dtype=float32)
        """
        kind = _checked_dtype("uniform", dtype, FLOATS)
        lows, highs = (
            _finite("uniform", name, value, kind) for name, value in (("low", low), ("high", high))
        )
        message = f"uniform low must be less than high in {kind}"
        _check_bounds(lows, highs, operator.lt, message, low, high)
        _check_bounds(lows, highs, _is_finite_width, "uniform range too large", low, high)
        return self._draw(
            "uniform",
            shape,
            (lows, highs),
            lambda draw, low, high: kernels.uniform(draw.words, low, high, kind),
        )

    def normal(
        self, shape: Shape = None, mean: Any = 0.0, std: Any = 1.0, dtype: DTypeLike = np.float32
    ) -> Any:
        """Normally distributed numbers.

        **Arguments**:

        - `shape`: that of one replica's result; None is that of `mean` and `std` together.
        - `mean`, `std`: finite numbers or arrays, which may be mapped; std >= 0.
        - `dtype`: float16, bfloat16, float32 or float64.

        **Returns**: mean + std * z, computed in float64 and rounded once to `dtype`. z is the
        quantile of the element's word, to 6 units in the last place of float64, and at most 9.16
        in magnitude (larger values have a probability of 2**-64). It is computed by IEEE's + - * /
        and square root only, so that the bits are the same on every machine.

        **Raises**:

        - ValueError: for a mean or std that is not finite, a negative std, and bad shapes.
        - TypeError: for other dtypes, and parameters that are not real numbers.

        >>> import gpusim
        >>> draw = lambda: gpusim.rng(0, "i").normal(2, mean=100, dtype="float64")
        >>> gpusim.vmap(draw, axis_name="i", axis_size=2)()
        array([[ 99.51363461,  99.32969417],
               [100.4564084 , 100.4910892 ]])
        """
        kind = _checked_dtype("normal", dtype, FLOATS)
        float64 = np.dtype(np.float64)
        means = _finite("normal", "mean", mean, float64)
        stds = _finite("normal", "std", std, float64)
        if (unpack(stds)[0] < 0).any():
            raise ValueError(f"normal std must not be negative, but got {std!r}")
        return self._draw(
            "normal",
            shape,
            (means, stds),
            lambda draw, mean, std: kernels.normal(draw.words, mean, std, kind),
        )

    def integers(
        self, low: Any, high: Any = None, shape: Shape = None, dtype: DTypeLike = np.int64
    ) -> Any:
        """Integers with low <= number < high, each exactly as probable as the others.

        **Arguments**:

        - `low`, `high`: integers or arrays of integers, which may be mapped; with high None the
          numbers are from 0 to below `low`.
        - `shape`: that of one replica's result; None is that of `low` and `high` together.
        - `dtype`: an integer dtype of 8 to 64 bits, with or without sign.

        **Raises**:

        - ValueError: unless low < high everywhere, for bounds outside the dtype, for bad shapes.
        - TypeError: for other dtypes, and bounds that are not integers.

        >>> import gpusim
        >>> dice = lambda: gpusim.rng(3, "i").integers(1, 7, shape=8)
        >>> gpusim.vmap(dice, axis_name="i", axis_size=2)()
        array([[5, 6, 5, 1, 3, 2, 3, 1],
               [1, 1, 6, 2, 4, 6, 3, 3]])
        """
        if high is None:
            low, high = 0, low
        kind = _checked_dtype("integers", dtype, INTEGERS)
        smallest = np.uint64(np.iinfo(kind).min % 2**64)
        lows, lasts = _above("low", low, kind, 0), _above("high", high, kind, 1)
        message = "integers low must be less than high"
        _check_bounds(lows, lasts, operator.le, message, low, high)

        def kernel(draw: _Draw, low: Array, last: Array) -> Array:
            values = kernels.integers(draw.stream, draw.words, draw.replicas, low, last, draw.ndim)
            return (values + smallest).astype(kind)

        return self._draw("integers", shape, (lows, lasts), kernel)

    def bernoulli(self, p: Any = 0.5, shape: Shape = None) -> Any:
        """Booleans that are true with the probability `p` (to within 2**-64).

        **Arguments**:

        - `p`: 0 <= p <= 1, a number or an array, which may be mapped.
        - `shape`: that of one replica's result; None is that of `p`.

        **Raises**:

        - ValueError: for a p outside [0, 1] or NaN, and bad shapes.
        - TypeError: if p is not a real number.

        >>> import gpusim
        >>> drop = lambda: gpusim.rng(0, "i").bernoulli(0.25, shape=4)
        >>> gpusim.vmap(drop, axis_name="i", axis_size=2)()
        array([[False, False, False, False],
               [ True,  True, False,  True]])
        """
        chances = _float64("bernoulli", "p", p)
        data = unpack(chances)[0]
        if not ((data >= 0) & (data <= 1)).all():
            raise ValueError(f"bernoulli p must be from 0 to 1, but got {p!r}")
        return self._draw(
            "bernoulli", shape, (chances,), lambda draw, p: kernels.bernoulli(draw.words, p)
        )

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """The integers below `x` in random order, or the array `x` in random order along an axis.

        **Arguments**:

        - `x`: an integer, or an array, whose slices along the axis are permuted.
        - `axis`: the axis.

        **Returns**: int64 of shape (x,), or an array as `x`. All orders are equally probable,
        except for a part of n**2 / 2**129.

        **Raises**:

        - ValueError: for a negative integer, or an axis out of range (NumPy's AxisError).
        - TypeError: if a number is not an integer, or differs between replicas.

        >>> import numpy as np, gpusim
        >>> shuffled = lambda x: gpusim.rng(0, "i").permutation(x)
        >>> gpusim.vmap(shuffled, axis_name="i")(np.array([[1, 2, 3, 4], [1, 2, 3, 4]]))
        array([[4, 3, 2, 1],
               [4, 1, 2, 3]])
        """
        array = None
        if visible_ndim(x) == 0:
            count = _count("permutation of", x)
            normalize_axis_index(axis, 1)
        else:
            plain = x if isinstance(x, MappedArray) or on_device(x) else np.asarray(x)
            array = plain if isinstance(plain, MappedArray) else lift(plain)
            axis = normalize_axis_index(axis, array.ndim)
            count = array.shape[axis]
        stream, own = self._next_stream()
        order = _deliver(kernels.permutation(stream, count), own)
        if array is None:
            return order
        data, axes = unpack(order)
        order = to_library_of(unpack(array)[0], data)  # what is on a GPU has its order there
        return np.take(array, wrap(order, axes) if lockstep_axes() else order, axis=axis)

    def _draw(
        self,
        method: str,
        shape: Shape,
        parameters: tuple[Any, ...],
        kernel: Callable[..., Array],
    ) -> Any:
        """Call `kernel` on one word for each element and on the parameters' stacked data."""
        chosen = _checked_shape(method, shape, parameters)
        stream, own = self._next_stream()
        words = stream.words(math.prod(chosen)).reshape(sizes(own) + chosen)
        axes = union(own, common_axes(parameters))
        words, *stacked = (
            lead(value, axes, len(chosen))[None, ...]  # one axis more: kernels never see 0-d arrays
            for value in (wrap(words, own), *parameters)
        )
        replicas = lead(wrap(stream.replicas.reshape(sizes(own)), own), axes)
        replicas = replicas.reshape(1, *replicas.shape, *(1 for _ in chosen))
        draw = _Draw(stream, words, replicas, len(chosen))
        return _deliver(kernel(draw, *stacked)[0, ...], axes)

    def _next_stream(self) -> tuple[kernels.Stream, Axes]:
        """The words of the next call for all replicas that run here in lockstep, and their axes."""
        replicas, axes = global_indices(resolve_names(self._axis_name))
        if diverging_axes() != self._diverging:
            raise GpusimError(
                "a draw in a cond, switch or while_loop whose predicate differs between replicas, "
                "from a generator that was made outside of it: all replicas would count the draw, "
                "under pmap only those that take the branch; draw before it, or make the generator "
                "in it (gpusim.rng(seed, axis_name, calls=...))"
            )
        with self._lock:
            counter = self._own_counter()
            call = check_word("calls", counter.calls)
            counter.calls = call + 1
        return kernels.Stream(self._seed, call, replicas), axes

    # Counting. With the lock held.

    def _counter(self) -> _Counter:
        """The counter of this thread's pmap replica, or of the code outside all pmaps."""
        return self._counter_of(enclosing_replica())

    def _own_counter(self) -> _Counter:
        if enclosing_replica() is None and any(
            entry.index is not None for entry in axis_environment()
        ):
            raise RuntimeError(
                "a generator was used inside pmap from a thread that is none of its replicas, "
                "which would make the order of the draws a matter of chance; draw in the replica's "
                "own thread, and hand the numbers over"
            )
        return self._counter()

    def _counter_of(self, replica: ReplicaThread | None) -> _Counter:
        if replica is None:
            counter = self._outside
        else:
            counter = self._counter_of(replica.call.parent).inside(replica)
        counter.settle()
        return counter


class _Counter:
    """The draws of one pmap replica, or of the code outside, and of the pmaps called there."""

    __slots__ = ("calls", "forks")

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.forks: list[_Fork] = []

    def inside(self, replica: ReplicaThread) -> _Counter:
        """The counter of one replica of a pmap called from here."""
        for fork in self.forks:
            if fork.call() is replica.call:
                break
        else:
            fork = _Fork(replica.call, self.calls)
            self.forks.append(fork)
        assert replica.entry.index is not None
        return fork.members.setdefault(replica.entry.index, _Counter(fork.start))

    def settle(self) -> None:
        """Continue from the largest count of the pmaps that have ended."""
        if any(fork.ended for fork in self.forks):
            self.calls = max(fork.latest() for fork in self.forks if fork.ended)
            self.forks = [fork for fork in self.forks if not fork.ended]

    def latest(self) -> int:
        """The largest count, those of running pmaps included."""
        return max([self.calls, *(fork.latest() for fork in self.forks)])


class _Fork:
    """One call of pmap: where its replicas' counters started, and those that have been used."""

    def __init__(self, call: PmapCall, start: int) -> None:
        self.call = weakref.ref(call)  # which holds all results
        self.start = start
        self.size = len(call.replicas)
        self.members: dict[int, _Counter] = {}

    @property
    def ended(self) -> bool:
        call = self.call()
        return call is None or not call.unfinished

    def latest(self) -> int:
        """The largest count of its replicas; those without draws count from the start."""
        counts = [member.latest() for member in self.members.values()]
        return max(counts if len(counts) == self.size else [self.start, *counts])


class _Draw(NamedTuple):
    """Input of a kernel: words, and their replicas, broadcast to the words' axes; the last `ndim`
    axes are one replica's."""

    stream: kernels.Stream
    words: Array
    replicas: Array
    ndim: int


def _deliver(data: Array, axes: Axes) -> Any:
    """Numbers, drawn on the host, on the device of the map's arguments."""
    data = to_library_of(library_here(), data)
    return wrap(data, axes) if lockstep_axes() else data


# Arguments.


def _checked_axis_name(given: Any) -> AxisName:
    name = tuple(given) if isinstance(given, (tuple, list)) else given
    names = split_names(name)
    if not names or None in names:
        raise ValueError(f"axis_name={given!r}: expected an axis name, or a tuple of names")
    for part in names:
        if is_positional(part):
            raise ValueError(f"axis_name={given!r}: expected names, not positions of axes")
        if not isinstance(part, Hashable):
            raise TypeError(f"axis_name={given!r}: expected hashable names")
    return name


def _checked_dtype(
    method: str, given: DTypeLike, choices: tuple[np.dtype[Any], ...]
) -> np.dtype[Any]:
    try:
        dtype = None if given is None else np.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in choices:  # to NumPy None equals float64
        names = ", ".join(choice.name for choice in choices)
        raise TypeError(f"{method} dtype={given!r}: expected one of {names}")
    return dtype


def _count(what: str, given: Any) -> int:
    if isinstance(given, (bool, np.bool_)):
        raise TypeError(f"{what} {given!r}: expected an integer")
    try:
        value = operator.index(given)
    except TypeError as error:
        if isinstance(given, MappedArray):
            raise
        raise TypeError(f"{what} {given!r}: expected an integer") from error
    if value < 0:
        raise ValueError(f"{what} {given!r}: expected an integer that is not negative")
    return value


def _checked_shape(method: str, given: Shape, parameters: Sequence[Any]) -> tuple[int, ...]:
    shapes = [visible_shape(parameter) for parameter in parameters]
    try:
        common = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"{method}: parameters of shapes {shapes} do not broadcast") from None
    if given is None:
        return common
    axes: Sequence[Any] = given if isinstance(given, (list, tuple)) else (given,)
    shape = tuple(_count(f"{method} shape", size) for size in axes)
    try:
        fits = np.broadcast_shapes(shape, common) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{method}: parameters of shape {common} cannot be broadcast to shape={shape}"
        )
    return shape


def _on_data(function: Callable[[Array], Array], value: Any) -> Any:
    data, axes = unpack(value)
    return wrap(function(data), axes) if isinstance(value, MappedArray) else function(data)


def _on_host(given: Any) -> Any:
    data, axes = unpack(given)
    return wrap(to_host(data), axes) if isinstance(given, MappedArray) else to_host(data)


def _real(method: str, name: str, given: Any) -> Any:
    """`given` as an array of real numbers, on the host; MappedArrays stay ones."""
    value = _on_host(given)
    try:
        kind = kind_of(value.dtype)
    except TypeError:
        kind = "other"
    if kind in ("complex", "other"):
        raise TypeError(f"{method} {name}={given!r}: expected real numbers")
    return value


def _float64(method: str, name: str, given: Any) -> Any:
    return _on_data(lambda data: data.astype(np.float64), _real(method, name, given))


def _finite(method: str, name: str, given: Any, dtype: np.dtype[Any]) -> Any:
    """`given` rounded to `dtype`."""
    value = _on_data(lambda data: kernels.rounded(data, dtype), _float64(method, name, given))
    if not np.isfinite(unpack(value)[0]).all():
        raise ValueError(f"{method} {name}={given!r}: expected finite numbers of {dtype}")
    return value


def _above(name: str, given: Any, dtype: np.dtype[Any], distance: int) -> Any:
    """How far `given` - `distance` lies above the smallest number of `dtype`, as uint64."""
    info = np.iinfo(dtype)
    first, last = int(info.min) + distance, int(info.max) + distance
    scalar = isinstance(given, int) and not isinstance(given, bool)  # may be 2**64
    value = given if scalar else _on_host(given)
    if not scalar and value.dtype.kind not in "iu":
        raise TypeError(f"integers {name}={given!r}: expected integers")
    data = unpack(value)[0]
    extremes = [int(data)] if scalar else [int(data.min()), int(data.max())] if data.size else []
    if not all(first <= extreme <= last for extreme in extremes):
        raise ValueError(
            f"integers {name}={given!r}: expected integers from {first} to {last} for {dtype}"
        )
    if scalar:
        return np.asarray(given - first, np.uint64)
    return _on_data(lambda data: data.astype(np.uint64) - np.uint64(first % 2**64), value)


def _check_bounds(
    low: Any, high: Any, fits: Callable[[Array, Array], Any], message: str, *given: Any
) -> None:
    """ValueError unless fits(low, high) everywhere; shapes that differ are `_checked_shape`'s."""
    try:
        (lows, highs), _ = elementwise([low, high])
        fine = bool(np.all(fits(lows, highs)))
    except ValueError:
        return
    if not fine:
        raise ValueError(f"{message}, but got low={given[0]!r} and high={given[1]!r}")


def _is_finite_width(low: Array, high: Array) -> Any:
    with np.errstate(over="ignore"):
        return np.isfinite(np.subtract(high, low, dtype=np.float64))
