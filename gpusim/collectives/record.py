"""The record of a collective: its call, its definition, its result, its transpose and its plan
across instances, beside each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec

import numpy as np

from ..groups import Groups
from ..reduction import Reduction, ReductionLike
from ..runtime.world import World, current_world
from . import dispatch
from .definition import AxisIndexGroups, AxisName, Call, Definition, ShapeDtype
from .kernels import FoldSpec

P = ParamSpec("P")

#: All collectives by key: gpusim's by name, those of programs by module and name.
COLLECTIVES: dict[str, Collective[Any]] = {}


class Collective(Definition, Generic[P]):
    """A collective, called on stacked arrays.

    A call takes the operands stacked (R, *batch, *s), or as lists of R arrays (*batch, *s),
    then the collective's own parameters, and these keywords:

    - ``groups``: a `Groups` or lists of replica numbers; None is one group of all replicas.
    - ``reduction``: for collectives that sum; None is that of the `gpusim.reduction` context, and
      counts as one of its calls.
    - ``batch_ndim``: how many axes after the replicas' belong to other mapped axes.
    - ``call``, ``places``: the counters of stochastic rounding, see the numerics contract; the
      call number is 0 where a reduction is given, and the places are counted from 0.

    It returns a `Result`: the value, and whether it differs between replicas. Inside a
    `gpusim.World` R counts the replicas of this instance, and the call reaches all instances.

    **Attributes**

    - `call`: the function that reads a replica's arguments, with their names, defaults and the
      docstring; it returns a `Call`. `gpusim.lax` and `gpusim.torch` have its signature.
    - `local`: the definition: operands as `Operand`, then groups, the `Fold` of collectives that
      sum, and the parameters by name; it returns a `Result`, or one for each result.
    - `distributed`: the same across instances, with the `Layout` of the members in front. None
      gathers all values on each instance, runs `local` on them, and keeps the instance's part.
    - `result`: shapes and dtypes of the results from those of the operands, the number of members
      in a group, and the parameters.
    - `transpose`: the collective of the cotangents; itself a record, None where there is none.
    - `key`: its name in `COLLECTIVES`, and in graphs of tensors.
    - `operands`: how many operands there are.
    - `folds`: whether it sums, and so takes a reduction and counts as a call.
    - `moves`: whether it only moves elements of its first operand, which may have any dtype.
    - `groups`: "any", "even" (of one size) or None (takes no groups).
    - `replicated`: whether without groups every replica has the same result.
    - `scalar`: the result for a Python number that all replicas hold, (number, group size) ->
      number; None treats it as an array.
    - `identity`: the result of a group without members, by dtype. Where it is given, integers may
      stand among the axis names, for axes of the array itself.
    - `op`: the operator that its Reduction must have; None takes any.
    - `fold`: the kernels' fold that it is without groups, by its Reduction, the number of replicas
      and their dtype; None where it does more than fold.

    A record without `local` is an alias: its `call` forwards to another collective. Most transposes
    are aliases.
    """

    transpose: Collective[Any] | None = None

    def __init__(
        self,
        call: Callable[P, Call],
        *,
        name: str | None = None,
        local: Callable[..., Any] | None = None,
        distributed: Callable[..., Any] | None = None,
        result: Callable[..., list[ShapeDtype]] | None = None,
        operands: int = 1,
        folds: bool = False,
        moves: bool = False,
        groups: str | None = None,
        replicated: bool = False,
        scalar: Callable[[Any, int], Any] | None = None,
        identity: Callable[[np.dtype[Any]], Any] | None = None,
        op: str | None = "sum",
        fold: Callable[[Reduction, int, np.dtype[Any]], FoldSpec | None] | None = None,
    ) -> None:
        self.call = call
        self.name = self.__name__ = self.__qualname__ = name or call.__name__
        self._parameters = inspect.signature(call).parameters
        self.local = local
        self.distributed = distributed
        self.result = result
        self.operands = operands
        self.operand_names = self._operand_names()
        self.folds = folds
        self.moves = moves
        self.groups = groups
        self.replicated = replicated
        self.scalar = scalar
        self.identity = identity
        self.op = op
        self.fold = fold
        self.__module__ = call.__module__
        self.__doc__ = call.__doc__
        self.__wrapped__ = call  # doctest finds the examples
        (self._axis,) = (name for name in self._parameters if name in ("axis_name", "axes"))
        positional = [p.name for p in self._parameters.values() if p.kind != p.KEYWORD_ONLY]
        self._axis_position = (
            positional.index(self._axis) if self._axis in positional else len(positional)
        )
        self.__signature__ = self._stacked_signature()
        own = self.__module__.startswith("gpusim.")
        self.key = self.name if own else f"{self.__module__}.{self.name}"
        if local is not None:
            if result is None:
                raise TypeError(f"collective {self.name!r} has a definition but no result rule")
            COLLECTIVES[self.key] = self

    def call_by_name(
        self,
        operands: Sequence[Any],
        axis_name: AxisName,
        groups: Groups | AxisIndexGroups,
        reduction: ReductionLike | None,
        parameters: Mapping[str, Any],
    ) -> Call:
        """The call with these parts; a `reduction` is left out where the collective takes none."""
        given = dict(zip(self._parameters, operands, strict=False), **parameters)
        if reduction is not None and "reduction" in self._parameters:
            given["reduction"] = reduction
        given[self._axis] = axis_name
        # The names are the signature's own, which a checker cannot see.
        return self.call(**given)._replace(groups=groups)  # type: ignore[call-arg]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.on(current_world(), *args, **options)

    def on(self, world: World | None, *args: Any, **options: Any) -> Any:
        """Call the collective for the replicas of `world`; the operands are this instance's.

        None: all replicas are local, even inside a World.
        """
        for name in options:
            if name not in self.__signature__.parameters:
                raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}")
        number, places = options.pop("call", None), options.pop("places", None)
        batch_ndim, groups = options.pop("batch_ndim", 0), options.pop("groups", None)
        if len(args) > self._axis_position:
            args = (*args[: self._axis_position], None, *args[self._axis_position :])
        else:
            options[self._axis] = None
        call = self.call(*args, **options)
        if groups is not None:
            call = call._replace(groups=groups)
        operands = [call.operands]
        (results,) = dispatch.run_leaves(call, operands, world, batch_ndim, number, places)
        return results[0] if len(results) == 1 else tuple(results)

    def _operand_names(self) -> tuple[str, ...]:
        """The names of operands in messages."""
        if self.operands == 1:
            return (self.name,)
        return tuple(f"{self.name} ({name})" for name in [*self._parameters][: self.operands])

    @property
    def _sums(self) -> bool:
        return self.folds or "reduction" in self._parameters

    def _stacked_signature(self) -> inspect.Signature:
        """The signature of a call on stacked arrays, for people and their editors."""
        parameters = [
            parameter.replace(name="groups") if name == "axis_index_groups" else parameter
            for name, parameter in self._parameters.items()
            if name != self._axis
        ]
        more = {"batch_ndim": 0, **({"call": None, "places": None} if self._sums else {})}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in more.items()
        ]
        return inspect.Signature(parameters)

    def __repr__(self) -> str:
        return f"<collective {self.name}>"

    def __reduce__(self) -> str:
        return self.call.__name__


def collective(**rules: Any) -> Callable[[Callable[P, Call]], Collective[P]]:
    """Make the decorated function, which reads a call's arguments, the record of a collective.

    **Arguments**: the attributes of `Collective`, by name.
    """
    return lambda call: Collective(call, **rules)


def same_shape(operands: Sequence[ShapeDtype], members: int, **parameters: Any) -> list[ShapeDtype]:
    """The result rule of collectives whose result is like their operand."""
    return [*operands]
