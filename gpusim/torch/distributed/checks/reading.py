"""The dispatch mode by which the check sees what a rank's operators read and write.

It is on only while somebody listens, as each operator takes longer under a mode. It lies below all
modes of the program, so that the program's own blocks end as they began.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ...private import schema_of
from ..private import (
    has_mode,
    is_fake,
    is_wrapper,
    put_mode_below,
    take_mode_out,
    without_function_modes,
)
from ..private_checks import TorchDispatchMode

if TYPE_CHECKING:
    from .watch import Watch

__all__ = ["Listener", "Operation", "Reading"]

VALUELESS = ("empty", "new_", "zeros", "ones", "full", "rand", "arange", "scalar_tensor", "sym_")
"""How the names of operators begin, or have in them, that read no values of their arguments."""
OTHERS = frozenset(
    ["is_same_size", "_has_compatible_shallow_copy_type", "record_stream", "is_pinned"]
)
COMMUNICATION = frozenset(["c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"])
HIGHER_ORDER = "higher_order"


class Operation(NamedTuple):
    """An operator that is called: its name, what it reads and writes, and what it has made.

    `non_blocking` says that it copies, and that the host is not to wait for it.
    """

    name: str
    read: list[Tensor]
    written: list[Tensor]
    made: list[Tensor]
    non_blocking: bool = False


class Listener(Protocol):
    """A part of the check that hears of operators. It is called before the operator runs."""

    def on_operation(self, operation: Operation) -> None: ...


@runtime_checkable
class MakerListener(Protocol):
    """A listener that also hears of results, after operators ran, factories' included.

    It hears of operators that post calls too, before they do: functional ones copy their input.
    """

    def on_operation(self, operation: Operation) -> None: ...

    def on_communication(self, name: str, given: list[Tensor]) -> None: ...

    def on_result(self, operation: Operation) -> None: ...


class Effects(NamedTuple):
    """An operator's schema: the places of the arguments that it writes, and how."""

    is_view: bool
    reads: bool
    written: frozenset[int | str]
    is_copy: bool
    reads_written: bool
    """Whether it reads what it writes: add_ does, copy_ does not."""


PURE_WRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_")


@lru_cache(None)
def effects_of(operator: Any) -> Effects:
    """The effect of an operator on its arguments."""
    schema = schema_of(operator)
    name = schema.name.partition("::")[2]
    written: set[int | str] = set()
    aliases = False
    for place, argument in enumerate(schema.arguments):
        about = argument.alias_info
        if about is None:
            continue
        if about.is_write:
            written.add(argument.name if argument.kwarg_only else place)
        else:
            aliases = True
    out = any(argument.is_out for argument in schema.arguments)
    valueless = name.startswith(VALUELESS) or name.endswith("_like") or name in OTHERS
    # `set_` changes which memory a tensor has, and no memory.
    view = name == "set_" or (aliases and not written)
    pure = out or name.removeprefix("_foreach_") in PURE_WRITES or name.startswith("bernoulli_")
    copies = name in ("copy_", "_foreach_copy_")
    return Effects(view, not (valueless or view), frozenset(written), copies, not pure)


class Reading(TorchDispatchMode):
    """The mode of one rank. Owner: the rank's thread.

    It is put on torch's stack and taken from it past `__enter__` and `__exit__`, whose flags say
    that the program has a mode of its own: programs compile and checkpoint as without it.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.listeners: list[Listener] = []
        #: Those of them that hear of results.
        self.makers: list[MakerListener] = []
        # `_inside`: listeners are told of an operator. `_served`: how many operators the mode
        # serves. torch has taken it from its stack then, and will put it back: it can neither be
        # put there nor taken out.
        self._inside, self._served = False, 0

    #: torch.cond and flex_attention pass through the mode too.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def add(self, listener: Listener) -> None:
        """Let a listener hear of operators, from now on."""
        if listener not in self.listeners:
            self.listeners.append(listener)
            if isinstance(listener, MakerListener):
                self.makers.append(listener)
        self.settle()

    def remove(self, listener: Listener) -> None:
        """Let a listener hear of no more."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            self.makers = [each for each in self.makers if each is not listener]
        if not self.listeners:  # else torch may have taken all modes out for a block of its own
            self.settle()

    def settle(self) -> None:
        """Put the mode on torch's stack, or take it out, as there are listeners or none.

        The stack is asked, and no flag: the engine of backward passes runs each node with the stack
        of its begin, and drops what a hook has put on it.
        """
        if self._served:
            return
        is_on = has_mode(self)
        if self.listeners and not is_on:
            put_mode_below(self)
        elif is_on and not self.listeners:
            take_mode_out(self)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_fake, types)):
            return operator(*args, **(kwargs or {}))
        if any(map(_unwraps, types)):
            return NotImplemented  # the operators on what is inside are seen
        self._served += 1
        try:
            return self._serve(operator, args, kwargs or {})
        finally:
            self._served -= 1

    def _serve(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if self._inside or self.watch.is_busy:
            return operator(*args, **kwargs)
        if operator.namespace in COMMUNICATION:
            self._tell_of_communication(schema_of(operator).name, args)
            return operator(*args, **kwargs)
        if operator.namespace == HIGHER_ORDER:
            self._tell(Operation(operator.name(), _all_tensors([args, kwargs]), [], []))
            return operator(*args, **kwargs)
        effects = effects_of(operator)
        if effects.is_view:
            return operator(*args, **kwargs)
        read: list[Tensor] = []
        written: list[Tensor] = []
        for place, value in [*enumerate(args), *kwargs.items()]:
            own = _tensors(value)
            if not own:
                continue
            if place in effects.written:
                written += own
                if effects.reads_written:
                    read += own
            elif effects.reads:
                read += own
        late = bool(kwargs.get("non_blocking") or (effects.is_copy and len(args) > 2 and args[2]))
        operation = Operation(schema_of(operator).name, read, written, [], late)
        if read or written:
            self._tell(operation)
        result = operator(*args, **kwargs)
        if self.makers:
            operation.made.extend(_tensors(result))
            with without_function_modes():
                for maker in self.makers:
                    maker.on_result(operation)
        return result

    def _tell(self, operation: Operation, makers: bool = True) -> None:
        """Tell listeners of an operator that is about to run."""
        self._inside = True
        try:
            with without_function_modes():
                for listener in tuple(self.listeners):
                    if makers or listener not in self.makers:
                        self.watch.tell(listener.on_operation, operation)
        finally:
            self._inside = False

    def _tell_of_communication(self, name: str, args: Any) -> None:
        """Tell listeners of an operator that posts a call; a functional one copies its input."""
        given = _tensors(args[0] if args else None)
        if "_wrap_" in name:  # it makes a result that waits as it is used
            return
        for maker in self.makers:
            maker.on_communication(name, given)
        if given and not name.startswith("c10d::") and "wait_tensor" not in name:
            self._tell(Operation(name, given, [], []), makers=False)


@lru_cache(None)
def _unwraps(kind: type) -> bool:
    """Whether a type of tensors calls operators on tensors inside, and needs no mode for that."""
    return is_wrapper(kind) and not kind.__module__.startswith("torch._subclasses")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for each in value if isinstance(each, Tensor)]
    return []


def _all_tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, however deep."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _all_tensors(each)]
    return _tensors(value)
