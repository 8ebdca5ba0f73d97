"""The CUDA runtime on this machine's memory: devices, memory, streams and events.

Work is done at once, so that streams are in order by themselves. Memory is strict: what was never
allocated, or has been freed, or is left by a copy, is an error; fresh memory is poisoned; what
writes over the end of an allocation is found when that is freed.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from bisect import bisect_right
from typing import Any

import numpy as np

INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_HANDLE, NOT_READY = 1, 2, 101, 400, 600
ILLEGAL_ADDRESS, PEER_ENABLED, NOT_SUPPORTED = 700, 704, 801
ALIGNMENT, GUARD = 512, 512
POISON, FENCE = 0xA5, 0x5A
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, ANY_WAY = range(5)

ATTRIBUTES = {
    1: 1024,  # threads in a block
    **dict(zip(range(2, 8), (1024, 1024, 64, 2**31 - 1, 65535, 65535), strict=True)),
    8: 49152,  # bytes of shared memory in a block
    10: 32,
    16: 132,  # multiprocessors
    39: 2048,  # threads in a multiprocessor
    75: 9,
    76: 0,
    81: 233472,
    97: 232448,
}
PROPERTIES = {
    "name": b"Fake GPU",
    "totalGlobalMem": 150_754_820_096,
    "multiProcessorCount": 132,
    "major": 9,
    "minor": 0,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "sharedMemPerBlock": 49152,
    "sharedMemPerBlockOptin": 232448,
    "maxGridSize": (2**31 - 1, 65535, 65535),
    "maxThreadsDim": (1024, 1024, 64),
    "uuid": b"fake" * 4,
    "pciBusID": 0,
    "pciDeviceID": 0,
    "pciDomainID": 0,
}


class CudaError(Exception):
    """A status of the runtime or the driver, which CuPy gives its own exception."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Allocation:
    """Memory of a device, or pinned memory of the host (device None), between two fences."""

    def __init__(self, size: int, device: int | None) -> None:
        self.size, self.device = size, device
        self.content = np.empty(size + 2 * GUARD + ALIGNMENT, np.uint8)
        start = self.content.ctypes.data
        self.address = -(-(start + GUARD) // ALIGNMENT) * ALIGNMENT
        self._first = self.address - start
        self.content[: self._first] = FENCE
        self.content[self._first : self._first + size] = POISON
        self.content[self._first + size :] = FENCE

    def intact(self) -> bool:
        """Whether nothing was written before its begin or behind its end."""
        before, behind = self.content[: self._first], self.content[self._first + self.size :]
        return bool((before == FENCE).all() and (behind == FENCE).all())


class Stream:
    """A stream's device and flags."""

    def __init__(self, device: int, flags: int = 0, priority: int = 0) -> None:
        self.device, self.flags, self.priority = device, flags, priority


class Event:
    """An event's device, and when it was recorded last."""

    def __init__(self, device: int, flags: int = 0) -> None:
        self.device, self.flags = device, flags
        self.time: float | None = None


class _Current(threading.local):
    device = 0


class Machine:
    """The devices and all that they hold; `limit` is the memory of each, in bytes."""

    def __init__(self, devices: int = 2, limit: int = 8 << 30) -> None:
        self.devices, self.limit = devices, limit
        self.launches = 0
        self.used = [0] * devices
        self._current = _Current()
        self._lock = threading.RLock()
        self._allocations: dict[int, Allocation] = {}
        self._addresses: list[int] = []
        self._handles = itertools.count(1 << 24)
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._peers: set[tuple[int, int]] = set()

    @property
    def device(self) -> int:
        """The thread's current device."""
        return self._current.device

    def set_device(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise CudaError(INVALID_DEVICE)
        self._current.device = device

    def stream(self, handle: int | None) -> Stream:
        """The stream of a handle: its own, or the current device's default stream."""
        if handle in (None, 0, 1, 2):
            return Stream(self.device)
        if handle not in self._streams:
            raise CudaError(INVALID_HANDLE)
        return self._streams[handle]

    def event(self, handle: int) -> Event:
        if handle not in self._events:
            raise CudaError(INVALID_HANDLE)
        return self._events[handle]

    def add(self, kind: dict[int, Any], thing: Any) -> int:
        handle = next(self._handles)
        kind[handle] = thing
        return handle

    # Memory.

    def allocate(self, size: int, device: int | None) -> int:
        with self._lock:
            if device is not None and self.used[device] + size > self.limit:
                raise CudaError(OUT_OF_MEMORY)
            made = Allocation(size, device)
            self._allocations[made.address] = made
            self._addresses.insert(bisect_right(self._addresses, made.address), made.address)
            if device is not None:
                self.used[device] += size
            return made.address

    def release(self, address: int, pinned: bool = False) -> None:
        if address == 0:
            return
        with self._lock:
            found = self._allocations.get(address)
            if found is None or (found.device is None) != pinned:
                raise CudaError(INVALID_VALUE)
            del self._allocations[address]
            self._addresses.remove(address)
            if found.device is not None:
                self.used[found.device] -= found.size
            if not found.intact():
                raise CudaError(ILLEGAL_ADDRESS)
            found.content[:] = POISON

    def find(self, address: int) -> Allocation | None:
        """The allocation that an address lies in."""
        with self._lock:
            place = bisect_right(self._addresses, address)
            if not place:
                return None
            found = self._allocations[self._addresses[place - 1]]
            return found if address < found.address + max(found.size, 1) else None

    def check(self, address: int, size: int, device: bool | None = None) -> None:
        """That this memory may be accessed: all of it, if it belongs to a device."""
        found = self.find(address)
        if found is None:
            if device:
                raise CudaError(INVALID_VALUE)
            return
        if device is False and found.device is not None:
            raise CudaError(INVALID_VALUE)
        if address + size > found.address + found.size:
            raise CudaError(INVALID_VALUE)


machine = Machine()


# The functions of CuPy's module, by their names there.


class Runtime:
    """cupy.cuda.runtime's functions; those of C have the same names."""

    def getDevice(self) -> int:
        return machine.device

    def setDevice(self, device: int) -> None:
        machine.set_device(device)

    def getDeviceCount(self) -> int:
        return machine.devices

    def _ensure_context(self) -> None:
        pass

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 13000

    def _getLocalRuntimeVersion(self) -> int:
        return 13000

    def _getCUDAMajorVersion(self) -> int:
        return 13

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return ATTRIBUTES.get(attribute, 0)

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        if not 0 <= device < machine.devices:
            raise CudaError(INVALID_DEVICE)
        return dict(PROPERTIES)

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device + 1:02x}:00.0"

    def deviceSynchronize(self) -> None:
        pass

    def deviceGetLimit(self, limit: int) -> int:
        return 1024

    def memGetInfo(self) -> tuple[int, int]:
        return machine.limit - machine.used[machine.device], machine.limit

    # Peers.

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int(device != peer)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        pair = machine.device, peer
        if pair in machine._peers:
            raise CudaError(PEER_ENABLED)
        machine._peers.add(pair)

    def _deviceEnsurePeerAccess(self, peer: int) -> None:
        machine._peers.add((machine.device, peer))

    # Memory.

    def malloc(self, size: int) -> int:
        return machine.allocate(size, machine.device)

    def mallocManaged(self, size: int, flags: Any = None) -> int:
        return machine.allocate(size, machine.device)

    def free(self, pointer: int) -> None:
        machine.release(pointer)

    def mallocAsync(self, size: int, stream: int) -> int:
        machine.stream(stream)
        return machine.allocate(size, machine.device)

    def freeAsync(self, pointer: int, stream: int) -> None:
        machine.stream(stream)
        machine.release(pointer)

    def hostAlloc(self, size: int, flags: int) -> int:
        return machine.allocate(size, None)

    def freeHost(self, pointer: int) -> None:
        machine.release(pointer, pinned=True)

    def pointerGetMemoryType(self, pointer: int) -> int:
        found = machine.find(pointer)
        return 0 if found is None else 1 if found.device is None else 2

    def pointerGetAttributes(self, pointer: int) -> Any:
        from cupy_backends.cuda.api import runtime

        found = machine.find(pointer)
        if found is None:
            return runtime.PointerAttributes(-2, 0, pointer, 0)
        if found.device is None:
            return runtime.PointerAttributes(machine.device, pointer, pointer, 1)
        return runtime.PointerAttributes(found.device, pointer, 0, 2)

    def hostRegister(self, pointer: int, size: int, flags: int) -> None:
        pass

    def hostUnregister(self, pointer: int) -> None:
        pass

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        if size == 0:
            return
        to_device = {HOST_TO_HOST: False, DEVICE_TO_HOST: False, ANY_WAY: None}.get(kind, True)
        from_device = {HOST_TO_HOST: False, HOST_TO_DEVICE: False, ANY_WAY: None}.get(kind, True)
        machine.check(target, size, to_device)
        machine.check(source, size, from_device)
        ctypes.memmove(target, source, size)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        machine.stream(stream)
        self.memcpy(target, source, size, kind)

    def memcpyPeer(self, target: int, to: int, source: int, device: int, size: int) -> None:
        for pointer, expected in ((target, to), (source, device)):
            found = machine.find(pointer)
            if found is None or found.device != expected:
                raise CudaError(INVALID_VALUE)
        self.memcpy(target, source, size, DEVICE_TO_DEVICE)

    def memcpyPeerAsync(
        self, target: int, to: int, source: int, device: int, size: int, stream: int
    ) -> None:
        machine.stream(stream)
        self.memcpyPeer(target, to, source, device, size)

    def memcpy2D(
        self, target: int, to: int, source: int, pitch: int, width: int, height: int, kind: int
    ) -> None:
        for row in range(height):
            self.memcpy(target + row * to, source + row * pitch, width, kind)

    def memcpy2DAsync(
        self,
        target: int,
        to: int,
        source: int,
        pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> None:
        machine.stream(stream)
        self.memcpy2D(target, to, source, pitch, width, height, kind)

    def memset(self, pointer: int, value: int, size: int) -> None:
        if size:
            machine.check(pointer, size, True)
            ctypes.memset(pointer, value, size)

    def memsetAsync(self, pointer: int, value: int, size: int, stream: int) -> None:
        machine.stream(stream)
        self.memset(pointer, value, size)

    # Streams and events.

    def streamCreate(self) -> int:
        return machine.add(machine._streams, Stream(machine.device))

    def streamCreateWithFlags(self, flags: int) -> int:
        return machine.add(machine._streams, Stream(machine.device, flags))

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return machine.add(machine._streams, Stream(machine.device, flags, priority))

    def streamGetFlags(self, stream: int) -> int:
        return machine.stream(stream).flags

    def streamGetPriority(self, stream: int) -> int:
        return machine.stream(stream).priority

    def streamDestroy(self, stream: int) -> None:
        if machine._streams.pop(stream, None) is None:
            raise CudaError(INVALID_HANDLE)

    def streamSynchronize(self, stream: int) -> None:
        machine.stream(stream)

    def streamQuery(self, stream: int) -> None:
        self.streamSynchronize(stream)

    def streamIsCapturing(self, stream: int) -> int:
        return 0

    def streamWaitEvent(self, stream: int, event: int, flags: Any = None) -> None:
        machine.stream(stream)
        machine.event(event)

    def eventCreate(self) -> int:
        return machine.add(machine._events, Event(machine.device))

    def eventCreateWithFlags(self, flags: int) -> int:
        return machine.add(machine._events, Event(machine.device, flags))

    def eventDestroy(self, event: int) -> None:
        if machine._events.pop(event, None) is None:
            raise CudaError(INVALID_HANDLE)

    def eventRecord(self, event: int, stream: int) -> None:
        found = machine.event(event)
        if machine.stream(stream).device != found.device:
            raise CudaError(INVALID_HANDLE)
        found.time = time.perf_counter()

    def eventSynchronize(self, event: int) -> None:
        machine.event(event)

    def eventQuery(self, event: int) -> int:
        machine.event(event)
        return 0

    def eventElapsedTime(self, start: int, end: int) -> float:
        first, last = machine.event(start), machine.event(end)
        if first.time is None or last.time is None or (first.flags | last.flags) & 2:
            raise CudaError(INVALID_HANDLE)
        return 1e3 * (last.time - first.time)

    def launchHostFunc(self, stream: int, callback: Any, argument: Any) -> None:
        machine.stream(stream)
        callback(argument)

    def profilerStart(self) -> None:
        pass

    def profilerStop(self) -> None:
        pass
