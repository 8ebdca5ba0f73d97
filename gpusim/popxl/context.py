"""The current graph, IPU, name scope and order of ops, set by context managers."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    from ._op import Op
    from .graph import Graph
    from .ir import Ir

__all__ = [
    "Context",
    "ExecutionContext",
    "debug_context_frame_offset",
    "gcg",
    "get_current_context",
    "get_current_graph",
    "get_ir",
    "get_main_graph",
    "get_source_location",
    "gir",
    "gmg",
    "in_sequence",
    "io_tiles",
    "ipu",
    "name_scope",
    "op_debug_context",
]

Fn = TypeVar("Fn", bound=Callable[..., Any])
Mode = bool | Literal["pass"]

_HINT = (
    "but no graph has been selected. Hint - try performing the operations in a context manager "
    "(for example `with graph_instance:`) or inside a function that's called by "
    "`popxl.Ir().create_graph()`"
)
_HERE = str(Path(__file__).parent)
_handles = itertools.count()


class ExecutionContext(Enum):
    """When a session runs an op of the main graph."""

    Normal = "Normal"  #: in `run`
    AccumulateOuterFragment = "AccumulateOuterFragment"
    WeightsFromHostFragment = "WeightsFromHostFragment"  #: after variables have come from the host
    WeightsToHostFragment = "WeightsToHostFragment"  #: before variables go to the host
    OptimizerFromHostFragment = "OptimizerFromHostFragment"
    Subgraph = "Subgraph"


class OpHooks:
    """Functions that are called with every op that is added, by handle."""

    _hooks: dict[int, Callable[[Op], Any]]

    def register_op_created_hook(self, fn: Callable[[Op], Any]) -> int:
        """Call `fn` with every op that is added from now on. Returns a handle to remove it."""
        handle = next(_handles)
        self._hooks[handle] = fn
        return handle

    def remove_op_created_hook(self, handle: int) -> None:
        """Remove a hook; ValueError for an unknown handle."""
        if self._hooks.pop(handle, None) is None:
            raise ValueError(f"Unknown op created hook {handle}")


FRAGMENTS = (ExecutionContext.WeightsFromHostFragment, ExecutionContext.WeightsToHostFragment)


class Context(OpHooks):
    """The state of the context managers around the running code; each thread has one."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._ipus: list[int] = []
        self._io_tiles = 0
        self._scopes: list[str] = []
        self._modes: list[bool] = []
        self._hooks = {}
        self._locations: list[tuple[str, int]] = []
        self._offset = 0
        self._execution = ExecutionContext.Normal

    @property
    def ipu_id(self) -> int | None:
        """The IPU of the innermost `ipu` context; None outside of one."""
        return self._ipus[-1] if self._ipus else None

    @property
    def io_tile_set(self) -> bool:
        """Whether ops go on the IO tiles."""
        return self._io_tiles > 0

    # Names

    def push_name_scope(self, name: str) -> None:
        """Enter a name scope."""
        self._scopes.append(name)

    def pop_name_scope(self) -> str:
        """Leave the innermost name scope."""
        return self._scopes.pop()

    @property
    def name_scopes(self) -> list[str]:
        """The name scopes around, the outermost first."""
        return self._scopes

    # Graphs

    def push_graph(self, g: Graph) -> None:
        """Make a graph the current one.

        **Raises**: RuntimeError: if the current graph belongs to another Ir.
        """
        if self._graphs and self._graphs[0].ir != g.ir:
            raise RuntimeError(
                "Trying to a create a context manager nested in another context, when the previous "
                f"context's Ir is different. {self._graphs[0].ir} != {g.ir}"
            )
        self._graphs.append(g)

    def pop_graph(self) -> Graph:
        """Leave the current graph."""
        return self._graphs.pop()

    @property
    def graph(self) -> Graph:
        """The current graph; RuntimeError outside of one."""
        if not self._graphs:
            raise RuntimeError(f"Trying to access a graph, {_HINT}")
        return self._graphs[-1]

    @property
    def main_graph(self) -> Graph:
        """The main graph of the current graph's Ir; RuntimeError outside of one."""
        if not self._graphs:
            raise RuntimeError(f"Trying to access the main_graph, {_HINT}")
        return self._graphs[-1].main_graph

    @property
    def ir(self) -> Ir:
        """The Ir of the current graph; RuntimeError outside of one."""
        if not self._graphs:
            raise RuntimeError(f"Trying to access the ir, {_HINT}")
        return self._graphs[-1].ir

    # Order

    @property
    def in_sequence(self) -> bool:
        """Whether ops run in the order of their addition."""
        return self._modes[-1] if self._modes else False

    @in_sequence.setter
    def in_sequence(self, enabled: bool) -> None:
        if enabled is None:
            raise TypeError("`None` cannot be passed to `in_sequence`. Try `False` instead.")
        if self._modes:
            self._modes[-1] = enabled
        else:
            self._modes.append(enabled)

    @in_sequence.deleter
    def in_sequence(self) -> None:
        raise AttributeError("Cannot delete in_sequence. Set to 'False' instead.")

    def _register(self, op: Op) -> None:
        """Order an op that was added to the current graph, and call the hooks."""
        previous = op.graph._last_in_sequence
        if self.in_sequence:
            if previous is not None:
                op.after.append(previous)
            op.graph._last_in_sequence = op
        for hook in (*self._hooks.values(), *op.graph._hooks.values()):
            hook(op)

    def location(self) -> tuple[str, int]:
        """File and line of the innermost call from outside this package."""
        if self._locations:
            return self._locations[-1]
        return get_source_location(0)


_local = threading.local()


def get_current_context() -> Context:
    """The context of this thread."""
    context = getattr(_local, "context", None)
    if context is None:
        context = _local.context = Context()
    return context


def get_current_graph() -> Graph:
    """The graph that ops are added to; RuntimeError outside of one."""
    return get_current_context().graph


def get_main_graph() -> Graph:
    """The main graph of the current Ir; RuntimeError outside of a graph."""
    return get_current_context().main_graph


def get_ir() -> Ir:
    """The Ir of the current graph; RuntimeError outside of one."""
    return get_current_context().ir


gcg = get_current_graph
gmg = get_main_graph
gir = get_ir


@contextmanager
def ipu(ipu: int) -> Iterator[int]:
    """Place the ops added inside on an IPU of the replica."""
    context = get_current_context()
    context._ipus.append(ipu)
    try:
        yield ipu
    finally:
        context._ipus.pop()


@contextmanager
def in_sequence(mode: Mode = True) -> Iterator[None]:
    """Set the order of the ops added inside.

    They run in the order of their addition (True), in any order that their tensors allow (False),
    or as the surrounding context says ("pass").

    **Raises**

    - TypeError: for None.
    - ValueError: for another mode.
    """
    if mode is None:
        raise TypeError("`None` cannot be passed to `in_sequence`. Try `False` instead.")
    if mode not in (True, False, "pass"):
        raise ValueError(
            f"`in_sequence` mode not understood: {mode}. Must be one of `True`, `False`, `'pass'`."
        )
    context = get_current_context()
    context._modes.append(context.in_sequence if mode == "pass" else bool(mode))
    try:
        yield
    finally:
        context._modes.pop()


@contextmanager
def io_tiles() -> Iterator[None]:
    """Place the ops added inside on the IO tiles."""
    context = get_current_context()
    context._io_tiles += 1
    try:
        yield
    finally:
        context._io_tiles -= 1


@contextmanager
def _execution_context(mode: ExecutionContext) -> Iterator[None]:
    """Say when a session runs the ops added to the main graph inside.

    **Raises**: NotImplementedError: for another mode than Normal, WeightsFromHostFragment and
    WeightsToHostFragment.
    """
    if mode not in FRAGMENTS and mode is not ExecutionContext.Normal:
        raise NotImplementedError(f"gpusim runs no ops in {mode}")
    context = get_current_context()
    before, context._execution = context._execution, mode
    try:
        yield
    finally:
        context._execution = before


@contextmanager
def name_scope(name: str) -> Iterator[None]:
    """Begin the names of tensors added inside with `name` and a slash."""
    context = get_current_context()
    context.push_name_scope(name)
    try:
        yield
    finally:
        context.pop_name_scope()


@contextmanager
def debug_context_frame_offset(i: int) -> Iterator[None]:
    """Take the line `i` calls further out as the location of the ops added inside."""
    context = get_current_context()
    context._offset += i
    try:
        yield
    finally:
        context._offset -= i


def get_source_location(offset: int) -> tuple[str, int]:
    """File and line of the code that called this package, or of its caller `offset` calls out.

    **Raises**: IndexError: if there are fewer calls.
    """
    wanted = offset + get_current_context()._offset
    frame, depth = sys._getframe(1), 0
    outside: list[tuple[str, int]] = []
    while frame is not None:
        depth += 1
        if not frame.f_code.co_filename.startswith(_HERE):
            outside.append((frame.f_code.co_filename, frame.f_lineno))
            if len(outside) > wanted:
                return outside[wanted]
        if frame.f_back is None:
            break
        frame = frame.f_back
    raise IndexError(f"Incorrect source location offset. Stack {depth}, Offset {offset + 1}")


@overload
def op_debug_context(name: str) -> Callable[[Fn], Fn]: ...
@overload
def op_debug_context(name: Fn) -> Fn: ...
def op_debug_context(name: Any) -> Any:
    """Make the ops of a function name the line that calls it as the one that made them.

    A decorator, with a name (`@op_debug_context("linear")`) or without.
    """
    if callable(name):
        return op_debug_context(name.__name__)(name)

    def decorated(fn: Fn) -> Fn:
        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            context = get_current_context()
            context._locations.append(get_source_location(0))
            try:
                return fn(*args, **kwargs)
            finally:
                context._locations.pop()

        return inner  # type: ignore[return-value]  # the wrapper has the function's own signature

    return decorated
