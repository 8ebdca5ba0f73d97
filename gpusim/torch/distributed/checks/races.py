"""Races between the streams of a GPU: accesses to memory that are in no order.

Two accesses to the same memory, of two lines and at least one of them a write, are a race if the
later one's line has waited neither for the earlier one nor for anything behind it. The host's own
accesses are done at once: they come later only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..accelerator.marks import ON_CPU, mark_on, storage_of
from .accesses import Access, Memory, Place, access_to, here
from .clocks import Clock, Clocks, Line
from .reading import Operation

if TYPE_CHECKING:
    from ..accelerator.devices import CpuAsCuda
    from .watch import Watch

__all__ = ["NAME", "Races"]

NAME = "gpusim_accesses"
"""The attribute of a storage that is its `Memory`."""

COPIES = ("aten::copy_", "aten::_foreach_copy_")
HOST_WAITS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique",
    "aten::_unique",
)
"""How the names of operators begin for whose result the host waits."""


# Owner: the rank's own thread.
class Races:
    """The accesses to a rank's memory.

    **Arguments**: `current` gives the line of the current stream, and `host_waits` lets the host
    wait for it.
    """

    def __init__(
        self,
        watch: Watch,
        clocks: Clocks,
        mode: CpuAsCuda | None,
        current: Callable[[], Line | None],
        host_waits: Callable[[str], None],
    ) -> None:
        self.watch, self.clocks, self.mode = watch, clocks, mode
        self.current, self.host_waits = current, host_waits
        #: Whether accesses are followed.
        self.is_on = False
        # Of the backward passes that run, the innermost last: the line on which it was begun, and
        # the point behind all work before.
        self._passes: list[tuple[Line | None, Clock]] = []
        # Of the operator that is called: whether it runs on the GPU, from where, and the storages
        # of its operands.
        self._operation: tuple[bool | None, Place, list[Any]] | None = None

    def begin(self) -> None:
        """Follow accesses from now on."""
        if not self.is_on:
            self.is_on = True
            self.watch.reading.add(self)

    def backward_begins(self) -> None:
        self._passes.append((self.current(), self.clocks.everything()))

    def backward_ends(self) -> None:
        self._passes.pop()

    # Where tensors are

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor, if it was seen before."""
        return self._memory_in(storage_of(tensor))

    def _memory_in(self, storage: Any) -> Memory | None:
        memory: Memory | None = getattr(storage, NAME, None)
        return memory if memory is not None and memory.owner is self else None

    def is_on_gpu(self, tensor: Tensor) -> bool | None:
        """Whether a tensor is on the GPU; None where that is not known."""
        storage = storage_of(tensor)
        return self._is_on_gpu(storage, self._memory_in(storage))

    def _is_on_gpu(self, storage: Any, memory: Memory | None) -> bool | None:
        mark = mark_on(storage)
        if mark is not None:
            return mark != ON_CPU
        if memory is not None:
            return memory.on_gpu
        backward = None if self.mode is None else self.mode.backward
        return None if backward in (None, ON_CPU) else True

    def new_memory(self, tensor: Tensor, on_gpu: bool | None) -> Memory | None:
        """A memory without accesses for a tensor; None if it has none that the host plays."""
        return self._new_memory_in(storage_of(tensor), on_gpu)

    def _new_memory_in(self, storage: Any, on_gpu: bool | None) -> Memory | None:
        if storage is None or storage.device.type != "cpu":
            return None
        memory = Memory(self, on_gpu)
        setattr(storage, NAME, memory)
        return memory

    # Accesses

    def access(
        self,
        tensor: Tensor,
        line: Line,
        is_write: bool,
        place: Place,
        by: str,
        call: Any = None,
    ) -> None:
        """Note that a line accesses a tensor, and name what it does not wait for."""
        memory = self.memory_of(tensor) or self.new_memory(tensor, True)
        if memory is not None:
            self._access(tensor, memory, line, is_write, place, by, call)

    def _access(
        self,
        tensor: Tensor,
        memory: Memory,
        line: Line,
        is_write: bool,
        place: Place,
        by: str,
        call: Any = None,
    ) -> None:
        access = access_to(tensor, line.time, place, by, call)
        if access is None:
            return
        clocks = [self.clocks.clock(line)]
        in_pass = bool(self._passes) and self._passes[-1][0] is line
        if in_pass:
            # A GPU runs a backward operator on the stream of its forward one, and waits for it.
            clocks.append(self._passes[-1][1])
        for key, first, is_first_write in memory.unordered(line.key, access, is_write, clocks):
            self._name(tensor, first, key, is_first_write, access, line, is_write)
        if is_write or not in_pass:
            memory.note(line.key, access, is_write)

    def host_access(self, tensor: Tensor, is_write: bool, place: Place, by: str) -> None:
        """Name what the host does not wait for, in pinned memory."""
        memory = self.memory_of(tensor)
        if memory is not None and memory.is_pinned:
            self._host_access(tensor, memory, is_write, place, by)

    def _host_access(
        self, tensor: Tensor, memory: Memory, is_write: bool, place: Place, by: str
    ) -> None:
        access = None if is_write and memory.is_shared else access_to(tensor, 0, place, by)
        if access is None:
            return
        clocks = [self.clocks.host]
        for key, first, is_first_write in memory.unordered(None, access, is_write, clocks):
            self._name(tensor, first, key, is_first_write, access, None, is_write)

    def _name(
        self,
        tensor: Tensor,
        first: Access,
        key: int,
        is_first_write: bool,
        access: Access,
        line: Line | None,
        is_write: bool,
    ) -> None:
        """Name a race, once: from here on the line is taken to have waited."""
        if first.call is not None and not first.call.waited:
            return  # of `flights`
        if line is None:
            self.clocks.host_waits({key: first.time})
        else:
            self.clocks.wait(line, {key: first.time})
        other = self.clocks.lines[key]
        other.time += 1  # what it does from here on was not waited for
        if first.place.is_torchs and access.place.is_torchs:
            return
        kind = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
        who = "the host" if line is None else line.name
        verb = "written" if is_write else "read"
        did = "writes" if is_first_write else "reads"
        if first.call is not None:
            missing = f"{who} has waited neither for its work nor for the stream that has"
        elif line is None:
            missing = "the host has not synchronized with that stream, nor with an event behind it"
        else:
            missing = f"{who} has not waited for that stream, nor for an event behind it"
        self.watch.find(
            "stream-race",
            access.place.site,
            f"{kind} is {verb} by {who} ({access.by}) while {other.name} {did} it ({first.by}, "
            f"{first.place.site}): {missing}",
            related=[f"{first.place.site}: {other.name} {did} it"],
        )

    # Operators

    def on_operation(self, operation: Operation) -> None:
        """Follow what an operator that is about to run accesses."""
        self._operation = None
        line = self.current()
        if line is None or self.mode is None or self.mode.is_moving:
            return
        place = here()
        by = operation.name.partition("::")[2]
        written = operation.written
        storages, hosts, on_gpu = [], [], None
        for tensor, is_write in [
            *((each, True) for each in written),
            *((each, False) for each in operation.read if not _has(written, each)),
        ]:
            storage = storage_of(tensor)
            storages.append(storage)
            memory = self._memory_in(storage)
            is_here = self._is_on_gpu(storage, memory)
            if is_here:
                on_gpu = True
                memory = memory or self._new_memory_in(storage, True)
                if memory is not None:
                    self._access(tensor, memory, line, is_write, place, by)
            elif is_here is False:
                on_gpu = on_gpu or False
                hosts.append((tensor, memory, is_write))
        self._operation = on_gpu, place, storages
        copies = operation.name in COPIES
        for tensor, memory, is_write in hosts:
            is_pinned = memory is not None and memory.is_pinned
            if on_gpu and copies:
                if operation.non_blocking and memory is not None and is_pinned:
                    self._access(tensor, memory, line, is_write, place, by)
                    continue
                if is_write or not operation.non_blocking:
                    self.host_waits("a copy to the host" if is_write else "a copy from the host")
            if memory is not None and is_pinned:
                self._host_access(tensor, memory, is_write, place, by)
        if on_gpu and (operation.name.startswith(HOST_WAITS) or _has_mask(operation)):
            self.host_waits("item()" if by == "_local_scalar_dense" else f"{by}()")

    def on_communication(self, name: str, given: list[Tensor]) -> None:
        """Follow the copies of their inputs that functional collectives make."""
        line = self.current()
        space, _, by = name.partition("::")
        if line is None or not space.startswith("_c10d_functional") or by.startswith("wait"):
            return
        for tensor in given:
            if self.is_on_gpu(tensor):
                self.access(tensor, line, False, here(), by)

    def on_result(self, operation: Operation) -> None:
        """Follow what an operator has made."""
        about, self._operation = self._operation, None
        line = self.current()
        if line is None or not operation.made or "empty" in operation.name:
            return
        if about is None:
            if operation.read or operation.written:
                return
            about = None, here(), []  # a factory: its result's mark will say where it is
        on_gpu, place, storages = about
        if on_gpu is False:
            return
        for tensor in operation.made:
            storage = storage_of(tensor)
            if _has(storages, storage) or self._memory_in(storage) is not None:
                continue
            access = access_to(tensor, line.time, place, operation.name.partition("::")[2])
            memory = None if access is None else self._new_memory_in(storage, on_gpu)
            if memory is not None and access is not None:
                memory.note(line.key, access, True)


def _has(values: list[Any], one: Any) -> bool:
    """Whether the very object is in a list."""
    return any(each is one for each in values)


def _has_mask(operation: Operation) -> bool:
    """Whether an operator has indices that are a mask, whose elements the host counts."""
    return operation.name.startswith("aten::index") and any(
        each.dtype in (torch.bool, torch.uint8) for each in operation.read[1:]
    )
