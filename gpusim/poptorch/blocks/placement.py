"""Where the operations of a model belong: the record of its blocks while it is compiled.

Inside `compiling(strategy)` each run of forward that is watched has a Recorder, which blocks begin
and end; outside of it blocks do nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..enums import Liveness
from ..options.strategies import PHASED, PIPELINED, SHARDED, _IExecutionStrategy
from ..poptorch_core import compiler_error

__all__ = ["MODES", "Operation", "Place", "Recorder", "active", "compiling", "recording"]

MODES = {PIPELINED: "Pipelined", SHARDED: "Sharded", PHASED: "Phased"}

NO_BLOCK = "No active Block, all the ops must belong to a Block"
NO_PHASE = "Invalid phase for ExecutionMode::Phased"
SERIAL_ONLY = "This is only supported for serial phase execution"
PARITY = (
    "When phases are executed in parallel: even phases must run on even IPUs and odd phases on odd "
    "IPUs"
)
NOT_AN_ID = "{} must be either a positive integer or a {}"
NO_IPU = (
    "No IPU was specified for block {}: a stage of a phase needs one, of "
    "poptorch.Stage(...).ipu(...), of the phase's ipus(...), or of the block itself"
)

PHASES_EACH = {Liveness.OffChipAfterFwdNoOverlap: 2, Liveness.OffChipAfterEachPhase: 4}
"""How many phases of the compiler's one of the user's is: the others load and store its tensors."""

NO_OPERATIONS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.detach, Tensor.requires_grad_, torch.detach}
)
"""What computes nothing."""

CONVERSIONS: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name)
    for name in "bool contiguous cpu double float half int ipu long reshape to type".split()
    if hasattr(Tensor, name)
)
"""What computes nothing where the result is the operand."""

RANDOM: frozenset[Callable[..., Any]] = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
)
"""Operations though they have no operands; other tensors made of none are constants."""


@dataclass(frozen=True)
class Place:
    """Where operations belong.

    Attributes:
        block: the block's id; "" before the first one.
        stage, phase: the numbers of its stage and phase; the phase as the compiler counts.
        ipu: its IPU.
    """

    block: str = ""
    stage: int = 0
    phase: int = 0
    ipu: int = 0


@dataclass
class Operation:
    """One call of a function of torch.

    Attributes:
        function: its name.
        place: where it belongs.
        results: the names of what it made, with dtypes and shapes.
    """

    function: str
    place: Place
    results: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Conflict:
    """A result that an earlier stage, or phase, takes from a later one."""

    function: str
    place: Place
    source: Place


class Recorder:
    """The blocks of one run of a model.

    Attributes:
        mode: of execution, a key of MODES.
        operations: all so far.
        conflict: the first use of a later stage's result in an earlier one, if there is any.
    """

    def __init__(self, strategy: _IExecutionStrategy) -> None:
        said = strategy.backendOptions()
        self.mode = int(said.get("execution_mode", PIPELINED))
        self.operations: list[Operation] = []
        self.conflict: Conflict | None = None
        self._serial = bool(said.get("serial_phases_execution", True))
        self._liveness = Liveness(said.get("tensors_liveness", Liveness.AlwaysLive))
        self._manager = copy.deepcopy(strategy._stages_manager)  # each compilation counts anew
        self._manager.resetAutoId()
        self._place: Place | None = Place()
        self._auto_ids: dict[int, str] = {}
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # results -> their places
        self._last: Operation | None = None  # what the names of results belong to

    # ---------------------------------------------------------------- blocks

    def reset_auto_id(self) -> None:
        """Count blocks without names from 0."""
        self._manager.resetAutoId()

    def auto_id_of(self, owner: object) -> str:
        """The number of a block that belongs to an object, whenever it begins."""
        if id(owner) not in self._auto_ids:
            self._auto_ids[id(owner)] = self._manager.nextAutoId()
        return self._auto_ids[id(owner)]

    def begin(self, user_id: Any, ipu_id: Any) -> None:
        """What follows belongs to this block. Raises what `Block` says."""
        check_id("user_id", user_id, str)
        check_id("ipu_id", ipu_id, int)
        block = str(user_id) if user_id not in (None, "") else self._manager.nextAutoId()
        stage, ipu = self._manager.beginStage(block, ipu_id)
        phase = self._phase(block, stage._phase_id, ipu) if self.mode == PHASED else 0
        self._place = Place(block, max(stage._stage_id, 0), phase, ipu)

    def _phase(self, block: str, phase: int, ipu: int) -> int:
        if phase < 0:
            raise compiler_error(NO_PHASE)
        each = PHASES_EACH.get(self._liveness, 1)
        if each > 1 and not self._serial:
            raise compiler_error(SERIAL_ONLY)
        assert ipu >= 0, NO_IPU.format(block)
        if not self._serial and phase % 2 != ipu % 2:
            raise compiler_error(PARITY)
        return phase * each

    def end(self) -> None:
        """What follows belongs to no block, until the next one begins."""
        self._place = None

    # ---------------------------------------------------------------- operations

    def saw(
        self, function: Callable[..., Any], operands: Iterable[Tensor], results: list[Tensor]
    ) -> None:
        """Take note of a call.

        Raises:
            Error: for an operation outside of blocks.
        """
        operands, self._last = list(operands), None
        if not operands and function not in RANDOM:
            return
        if function in NO_OPERATIONS:
            if operands[0] in self._made:
                self._made[results[0]] = self._made[operands[0]]
            return
        if function in CONVERSIONS and results[0] is operands[0]:
            return
        name = getattr(function, "__name__", str(function))
        place = self._place
        if place is None:
            raise compiler_error(NO_BLOCK)
        self._last = Operation(name, place)
        self.operations.append(self._last)
        for operand in operands:
            source = self._made.get(operand)
            if source is not None and self.conflict is None and self._later(source, place):
                self.conflict = Conflict(name, place, source)
        for result in results:
            self._made[result] = place

    def _later(self, one: Place, other: Place) -> bool:
        if self.mode == PHASED:
            return one.phase > other.phase
        return one.stage > other.stage

    def named(self, name: str, result: Tensor) -> None:
        """The name of a result of the last operation."""
        if self._last is not None:
            kind = str(result.dtype).removeprefix("torch.")
            shape = ", ".join(map(str, result.shape))
            self._last.results.append((name, f"{kind}({shape})"))


def check_id(name: str, value: Any, kind: type) -> None:
    """AssertionError for what is neither of that kind nor a number from 0 on, nor None."""
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    text = kind is str and isinstance(value, str)
    assert value is None or number or text, NOT_AN_ID.format(name, kind.__name__)


# ---------------------------------------------------------------- where recorders come from


@dataclass
class Compilation:
    """A model that is being compiled.

    Attributes:
        strategy: how its blocks are spread.
        found: the record of the run that succeeded.
    """

    strategy: _IExecutionStrategy
    found: Recorder | None = None


_compilation: ContextVar[Compilation | None] = ContextVar("gpusim compilation", default=None)
_recorder: ContextVar[Recorder | None] = ContextVar("gpusim blocks", default=None)


def active() -> Recorder | None:
    """The recorder of the run whose code this is; None where blocks do nothing."""
    return _recorder.get()


@contextmanager
def compiling(strategy: _IExecutionStrategy) -> Iterator[Compilation]:
    """A block in which runs of a model are recorded; replicas' threads copy that."""
    compilation = Compilation(strategy)
    token = _compilation.set(compilation)
    try:
        yield compilation
    finally:
        _compilation.reset(token)


@contextmanager
def recording() -> Iterator[Recorder | None]:
    """A block that is one run of a model; None where nobody compiles."""
    compilation = _compilation.get()
    if compilation is None:
        yield None
        return
    recorder = Recorder(compilation.strategy)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)
    compilation.found = recorder
