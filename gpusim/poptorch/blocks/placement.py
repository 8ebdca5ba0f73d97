"""The places of a model's operations: blocks, stages, phases and IPUs, recorded by compilation.

Inside `compiling(strategy)` each run of forward has a Recorder, in which blocks begin and end.
Outside of it blocks do nothing.
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
from .operators import operator_of

__all__ = [
    "MODES",
    "PlacedOperation",
    "OperationPlace",
    "Recorder",
    "compiling",
    "current_recorder",
    "recording",
]

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
"""How many of the compiler's phases stand for one of the user's: others load and store tensors."""

NO_OPERATIONS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.detach, Tensor.requires_grad_, torch.detach}
)
"""Functions that compute nothing."""

CONVERSIONS: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name)
    for name in "bool contiguous cpu double float half int ipu long reshape to type".split()
    if hasattr(Tensor, name)
)
"""Functions that compute nothing if the result is the operand."""

RANDOM: frozenset[Callable[..., Any]] = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
)
"""Operations without operands. Tensors that other functions make without operands are constants."""


@dataclass(frozen=True)
class OperationPlace:
    """The block, stage, phase and IPU of operations.

    **Attributes**:

    - `block`: the block's id; "" before the first block.
    - `stage`, `phase`: the numbers of its stage and phase; phases are counted as by the compiler.
    - `ipu`: its IPU.
    """

    block: str = ""
    stage: int = 0
    phase: int = 0
    ipu: int = 0


@dataclass
class PlacedOperation:
    """One call of a function of torch.

    **Attributes**:

    - `function`: its name; `operator`: that of PopART's operator.
    - `place`: its block, stage, phase and IPU.
    - `results`: the names of its results, with dtypes and shapes.
    """

    function: str
    operator: str
    place: OperationPlace
    results: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Conflict:
    """The use, in one stage or phase, of a result of a later one."""

    function: str
    place: OperationPlace
    source: OperationPlace


class Recorder:
    """The blocks of one run of a model.

    **Attributes**:

    - `mode`: the execution mode, a key of MODES.
    - `operations`: the operations so far.
    - `conflict`: the first use of a later stage's result in an earlier one, or None.
    """

    def __init__(self, strategy: _IExecutionStrategy) -> None:
        options = strategy.backendOptions()
        self.mode = int(options.get("execution_mode", PIPELINED))
        self.operations: list[PlacedOperation] = []
        self.conflict: Conflict | None = None
        self._serial = bool(options.get("serial_phases_execution", True))
        self._liveness = Liveness(options.get("tensors_liveness", Liveness.AlwaysLive))
        self._manager = copy.deepcopy(strategy._stages_manager)  # a compilation counts from 0
        self._manager.resetAutoId()
        self._place: OperationPlace | None = OperationPlace()
        self._auto_ids: dict[int, str] = {}
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by result
        self._last: PlacedOperation | None = None  # the names of results belong to it

    # ---------------------------------------------------------------- blocks

    def reset_auto_id(self) -> None:
        """Number blocks without names from 0."""
        self._manager.resetAutoId()

    def auto_id_of(self, owner: object) -> str:
        """The number of the block of an object; the same each time that it begins."""
        if id(owner) not in self._auto_ids:
            self._auto_ids[id(owner)] = self._manager.nextAutoId()
        return self._auto_ids[id(owner)]

    def begin(self, user_id: Any, ipu_id: Any) -> None:
        """Begin a block. Raises what `Block` says."""
        check_id("user_id", user_id, str)
        check_id("ipu_id", ipu_id, int)
        block = str(user_id) if user_id not in (None, "") else self._manager.nextAutoId()
        stage, ipu = self._manager.beginStage(block, ipu_id)
        phase = self._phase(block, stage._phase_id, ipu) if self.mode == PHASED else 0
        self._place = OperationPlace(block, max(stage._stage_id, 0), phase, ipu)

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
        """End the block. Operations outside of blocks are errors until the next one begins."""
        self._place = None

    # ---------------------------------------------------------------- operations

    def record(
        self, function: Callable[..., Any], operands: Iterable[Tensor], results: list[Tensor]
    ) -> None:
        """Record a call of a function of torch.

        **Raises**:

        - Error: for an operation outside of blocks.
        """
        operands, self._last = list(operands), None
        if not operands and function not in RANDOM:
            return
        if function in NO_OPERATIONS:
            if operands[0] in self._places:
                self._places[results[0]] = self._places[operands[0]]
            return
        if function in CONVERSIONS and results[0] is operands[0]:
            return
        name = getattr(function, "__name__", str(function))
        place = self._place
        if place is None:
            raise compiler_error(NO_BLOCK)
        self._last = PlacedOperation(name, operator_of(name, operands), place)
        self.operations.append(self._last)
        for operand in operands:
            source = self._places.get(operand)
            if source is not None and self.conflict is None and self._later(source, place):
                self.conflict = Conflict(name, place, source)
        for result in results:
            self._places[result] = place

    def _later(self, one: OperationPlace, other: OperationPlace) -> bool:
        if self.mode == PHASED:
            return one.phase > other.phase
        return one.stage > other.stage

    def name_result(self, name: str, result: Tensor) -> None:
        """Name a result of the last operation."""
        if self._last is not None:
            kind = str(result.dtype).removeprefix("torch.")
            shape = ", ".join(map(str, result.shape))
            self._last.results.append((name, f"{kind}({shape})"))


def check_id(name: str, value: Any, kind: type) -> None:
    """Raise AssertionError unless the id is of that kind, a number from 0 on, or None."""
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    text = kind is str and isinstance(value, str)
    assert value is None or number or text, NOT_AN_ID.format(name, kind.__name__)


# ---------------------------------------------------------------- recorders of compilations


@dataclass
class Compilation:
    """The compilation of a model.

    **Attributes**:

    - `strategy`: assigns blocks to stages, phases and IPUs.
    - `recorder`: of the run of forward that succeeded.
    """

    strategy: _IExecutionStrategy
    recorder: Recorder | None = None


_compilation: ContextVar[Compilation | None] = ContextVar("gpusim compilation", default=None)
_recorder: ContextVar[Recorder | None] = ContextVar("gpusim blocks", default=None)


def current_recorder() -> Recorder | None:
    """The recorder of the run of forward that this code belongs to, or None."""
    return _recorder.get()


@contextmanager
def compiling(strategy: _IExecutionStrategy) -> Iterator[Compilation]:
    """Record runs of a model inside the block, in threads of replicas too."""
    compilation = Compilation(strategy)
    token = _compilation.set(compilation)
    try:
        yield compilation
    finally:
        _compilation.reset(token)


@contextmanager
def recording() -> Iterator[Recorder | None]:
    """Record one run of a model inside the block. Yields None outside of compilations."""
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
    compilation.recorder = recorder
