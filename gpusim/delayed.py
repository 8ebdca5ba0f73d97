"""DelayedScaling: a scale that follows from the largest magnitudes of earlier values.

The scale is known before a value is there, so that nothing has to be measured before it is sent.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from gpusim.fallback.formats import FLOAT32, FLOAT64
from gpusim.fallback.wires import LEAST_SCALE

from . import lax
from .formats import FormatLike, rounding_name
from .maps.names import AxisName
from .rounding import round_each, round_to
from .wires import Wire

__all__ = ["DelayedScaling", "ScalingState"]

ALGORITHMS = ("max", "most_recent")
MOST_MARGIN = 64


class ScalingState(NamedTuple):
    """The state of delayed scaling between calls: a pytree of arrays, which a program carries.

    **Attributes**

    - `amaxes`: the largest magnitudes of earlier values in float32, the latest first; zeros before.
    - `scale`: the scale of the next value, in float32.
    """

    amaxes: Any
    scale: Any


@dataclass(frozen=True)
class DelayedScaling:
    """How the scale of a value follows from those before it, as Transformer Engine's recipe has it.

    Settings alone: the state is a value that the program carries, in each replica its own.

    **Arguments**

    - `format`, `rounding`, `at`: as those of a `Wire` of fewer bits than float32.
    - `history`: of how many values the largest magnitudes are kept.
    - `algorithm`: the magnitude that decides: "max", the largest of those kept, or "most_recent".
    - `margin`: an integer from -64 to 64; the scale is made larger by 2**margin.

    The scale is the magnitude divided by the format's largest number, times 2**margin, each rounded
    to float32, and at least 2**-149. It stays what it was where the magnitude is zero, infinite or
    NaN, or the scale would be infinite; before all values it is 1. Values are divided by it, and
    what is beyond the format's largest number becomes that number.

    **Raises**: ValueError and TypeError for fields outside these.

    >>> import gpusim, numpy as np
    >>> scaling = gpusim.DelayedScaling("fp8", history=2)
    >>> state = scaling.start()
    >>> for gradient in np.array([[448.0, 7.0], [896.0, 30.0], [600.0, 500.0]], np.float32):
    ...     print(float(state.scale), scaling.round(state, gradient))
    ...     state = scaling.next(state, gradient)
    1.0 [448.   7.]
    1.0 [448.  30.]
    2.0 [576. 512.]
    >>> scaling.wire(state)
    Wire('float8_e4m3fn', scale=2.0)
    """

    format: DTypeLike | FormatLike = "float8_e4m3fn"
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    rounding: str = "nearest"
    at: str = "hops"

    def __post_init__(self) -> None:
        for name, least, most in (("history", 1, 2**20), ("margin", -MOST_MARGIN, MOST_MARGIN)):
            given = getattr(self, name)
            try:
                value = operator.index(given)
            except TypeError:
                raise TypeError(f"DelayedScaling: {name}={given!r}: expected an integer") from None
            if not least <= value <= most:
                raise ValueError(
                    f"DelayedScaling: {name}={given!r}: expected an integer from {least:,} to "
                    f"{most:,}"
                )
            object.__setattr__(self, name, value)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"DelayedScaling: algorithm={self.algorithm!r}: expected "
                f"{' or '.join(map(repr, ALGORITHMS))}"
            )
        wire = self._wire(1.0)
        object.__setattr__(self, "format", wire.format)
        object.__setattr__(self, "rounding", rounding_name(self.rounding))

    def start(self) -> ScalingState:
        """The state before all values."""
        return ScalingState(np.zeros(self.history, np.float32), np.ones((), np.float32))

    def wire(self, state: ScalingState) -> Wire:
        """The wire of the next value: a `Wire` of a given scale, for a Reduction or `round_to`.

        **Raises**: TypeError where replicas have scales of their own, as a wire has one: `next`
        takes an `axis_name`, over which the largest magnitude is taken.
        """
        try:
            scale = float(state.scale)
        except TypeError as error:
            raise TypeError(
                "the scale differs between replicas, and a wire has one: pass axis_name= to "
                "DelayedScaling.next, or round by DelayedScaling.round"
            ) from error
        return self._wire(scale)

    def round(
        self, state: ScalingState, x: Any, *, seed: Any = 0, axis_name: AxisName = None
    ) -> Any:
        """Return a value as it arrives if it is sent with the state's scale, in the dtype of `x`.

        **Arguments**

        - `state`: in which replicas may have scales of their own.
        - `x`: an array; inside vmap also a MappedArray.
        - `seed`, `axis_name`: of stochastic rounding, as for `round_to`.

        **Returns**: as `round_to(x, self.wire(state))`, where the state has one scale.

        **Raises**: as `round_to`.
        """
        info = self._wire(1.0).info
        numbers = info.info
        assert numbers is not None
        given = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        computing = FLOAT64 if FLOAT64 in (given, numbers.carrier) else FLOAT32
        scale = np.asarray(state.scale) if np.isscalar(state.scale) else state.scale
        scale = scale.astype(computing)
        with np.errstate(all="ignore"):
            quotients = np.clip(round_to(x, computing) / scale, numbers.lowest, numbers.largest)
            sent = round_each(quotients, info.format, self.rounding, seed, axis_name)
            return round_to(sent.astype(computing) * scale, given)

    def next(self, state: ScalingState, x: Any, *, axis_name: AxisName = None) -> ScalingState:
        """The state after a value.

        **Arguments**

        - `state`: the one before it.
        - `x`: the value: an array, a torch tensor, or its largest magnitude as a number; inside
          vmap also a MappedArray.
        - `axis_name`: the axes of replicas that have one scale in common: the largest magnitude is
          that of all of them.

        **Returns**: a new state. `state` does not change.

        **Raises**: NameError for an axis name that is not bound.
        """
        amax = _largest(x)
        if axis_name is not None:
            amax = lax.pmax(amax, axis_name)
        amaxes = np.concatenate((np.reshape(amax, (1,)), state.amaxes[:-1]))
        chosen = np.max(amaxes) if self.algorithm == "max" else amaxes[0]
        largest = self._wire(1.0).info.info
        assert largest is not None
        with np.errstate(all="ignore"):
            scale = chosen / np.float32(largest.largest) * np.float32(2.0**self.margin)
            holds = (chosen > 0) & np.isfinite(chosen) & np.isfinite(scale)
            scale = np.where(holds, np.maximum(scale, np.float32(LEAST_SCALE)), state.scale)
        return ScalingState(amaxes, scale)

    def _wire(self, scale: float) -> Wire:
        return Wire(self.format, scale, rounding=self.rounding, at=self.at)


def _largest(x: Any) -> Any:
    """The largest magnitude of a value in float32; 0 for an empty one."""
    if hasattr(x, "detach"):  # a tensor of torch
        x = x.detach()
        x = float(x.abs().amax()) if x.numel() else 0.0
    if not hasattr(x, "dtype"):
        x = np.asarray(x, np.float64)
    if x.dtype != FLOAT64:
        x = x.astype(FLOAT32)
    with np.errstate(over="ignore"):
        return np.max(np.abs(x), initial=0.0).astype(FLOAT32)
