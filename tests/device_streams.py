"""The stand-in's streams, events and devices, which check every access to memory for races.

Work runs at once, on the host. What is kept is who waits for whom: each stream has a clock of how
far into every stream's work its own is known to come after, as vector clocks are. An access that
is not after the last write (a write: after all accesses), by streams, events or the host's waiting,
is a race on a GPU, and an AssertionError here. Memory that is given back goes to the stream that it
was allocated on, as CuPy's pool does it, and may be what that stream's next array is made of.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

Clock = dict[int, int]  # by stream, how many of its operations come before

_lock = threading.RLock()
_numbers = itertools.count(1)
_memory: dict[int, Memory] = {}  # by the id of the array that owns it


class Memory:
    """Who has read and written one array's memory."""

    def __init__(self, array: Any, stream: Stream) -> None:
        self.address, self.nbytes = array._host.ctypes.data, array._host.nbytes
        self.arena = stream
        self.written: Clock = {}
        self.read: Clock = dict(stream.given_back)
        self.array = weakref.ref(array)


class _Thread(threading.local):
    """A thread's current device and streams, and what it has waited for."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.known: Clock = {}


_thread = _Thread()


def _merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(count, into.get(stream, 0))


class Stream:
    """cupy.cuda.Stream."""

    null: Stream

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: Any = None,
    ) -> None:
        self.ptr = next(_numbers)
        self.device_id = _thread.device
        self.is_non_blocking = non_blocking
        self.clock: Clock = {}
        self.count = 0
        self.given_back: Clock = {}  # accesses to the memory in its arena
        self._outer: list[Stream] = []

    def __enter__(self) -> Stream:
        self._outer.append(get_current_stream())
        return self.use()

    def __exit__(self, *exception: Any) -> None:
        _thread.streams[self.device_id] = self._outer.pop()

    def use(self) -> Stream:
        if self.device_id != _thread.device:
            raise RuntimeError("the stream belongs to another device than the current one")
        _thread.streams[self.device_id] = self
        return self

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with _lock:
            _merge(self.clock, event.clock)

    def synchronize(self) -> None:
        with _lock:
            waits.append("stream")
            _merge(_thread.known, self.clock)


class Event:
    """cupy.cuda.Event."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.device_id = _thread.device
        self.clock: Clock = {}
        self.done = True

    def record(self, stream: Stream | None = None) -> None:
        stream = get_current_stream() if stream is None else stream
        if stream.device_id != self.device_id:
            raise RuntimeError("cudaErrorInvalidResourceHandle: event and stream of two devices")
        with _lock:
            self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        with _lock:
            waits.append("event")
            _merge(_thread.known, self.clock)


class Device:
    """cupy.cuda.Device."""

    def __init__(self, device: int | None = None) -> None:
        self.id = _thread.device if device is None else int(device)
        self.attributes = {"MultiProcessorCount": 132}
        self._outer: list[int] = []

    def __enter__(self) -> Device:
        self._outer.append(_thread.device)
        _thread.device = self.id
        return self

    def __exit__(self, *exception: Any) -> None:
        _thread.device = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def use(self) -> None:
        _thread.device = self.id


waits: list[str] = []  # the host's waiting, which there should be little of
_null: dict[int, Stream] = {}


def reset() -> None:
    """Forget all that was."""
    with _lock:
        _memory.clear()
        _null.clear()
        waits.clear()
        _thread.streams.clear()
        _thread.known.clear()


def current_device() -> Device:
    return Device()


def get_current_stream(device_id: int = -1) -> Stream:
    device = _thread.device if device_id == -1 else device_id
    with _lock:
        if device not in _null:
            with Device(device):
                _null[device] = Stream(null=True)
        return _thread.streams.setdefault(device, _null[device])


def _owner(array: Any) -> Any:
    return array if array.base is None else array.base


def _memory_of(array: Any, stream: Stream) -> Memory:
    owner = _owner(array)
    found = _memory.get(id(owner))
    if found is None or found.array() is not owner:
        found = _memory[id(owner)] = Memory(owner, stream)
        weakref.finalize(owner, _give_back, id(owner), found)
    return found


def _give_back(key: int, memory: Memory) -> None:
    with _lock:
        if _memory.get(key) is memory:
            del _memory[key]
        _merge(memory.arena.given_back, memory.read)
        _merge(memory.arena.given_back, memory.written)


def _check(access: str, before: Clock, clock: Clock, memory: Memory) -> None:
    for stream, count in before.items():
        assert clock.get(stream, 0) >= count, (
            f"a race: stream {_thread.streams[_thread.device].ptr} {access} memory (allocated on "
            f"stream {memory.arena.ptr}) without waiting for operation {count} of stream {stream}"
        )


def launched(
    reads: Iterable[Any], writes: Iterable[Any], stream: Stream | None = None, peer: bool = False
) -> None:
    """An operation on the current stream that reads and writes these arrays."""
    reads = [array for array in reads if hasattr(array, "_host")]
    for array in (*reads, *writes):
        assert peer or array.device.id == _thread.device, (
            f"an array of GPU {array.device.id} is used while GPU {_thread.device} is current"
        )
    with _lock:
        stream = get_current_stream() if stream is None else stream
        _operation(
            stream,
            [_memory_of(array, stream) for array in reads],
            [_memory_of(array, stream) for array in writes],
        )


def _operation(stream: Stream, reads: list[Memory], writes: list[Memory]) -> None:
    _merge(stream.clock, _thread.known)
    for memory in reads:
        _check("reads", memory.written, stream.clock, memory)
    for memory in writes:
        _check("writes", memory.written, stream.clock, memory)
        _check("writes", memory.read, stream.clock, memory)
    stream.count += 1
    stream.clock[stream.ptr] = stream.count
    for memory in reads:
        memory.read[stream.ptr] = stream.count
    for memory in writes:
        memory.written = {stream.ptr: stream.count}
        memory.read = {}


def finish_reading(array: Any) -> None:
    """The host reads an array, and waits for that."""
    launched((array,), ())
    with _lock:
        waits.append("download")
        _merge(_thread.known, get_current_stream().clock)


def _at(address: int) -> list[Memory]:
    return [
        memory
        for memory in _memory.values()
        if memory.array() is not None
        and memory.address <= address < memory.address + max(memory.nbytes, 1)
    ]


def _pointed_to(struct: np.void) -> tuple[list[Memory], list[Memory]]:
    """What a kernel reads and writes, by the addresses in its arguments."""
    reads: list[Memory] = []
    writes: list[Memory] = []
    names = struct.dtype.names or ()
    for name in names:
        if struct.dtype[name].names:
            inner = _pointed_to(struct[name])
            (writes if name == "destination" else reads).extend(inner[0])
            writes.extend(inner[1])
        elif struct.dtype[name] == np.uint64 and struct.dtype[name].shape == ():
            into = writes if name in ("out", "fault") else reads
            found = _at(int(struct[name]))
            into.extend(found)
            if name == "table" and found:
                count = found[0].nbytes // 8
                addresses = (ctypes.c_uint64 * count).from_address(found[0].address)
                into.extend(memory for address in addresses for memory in _at(int(address)))
    return reads, writes


def launched_kernel(arguments: np.ndarray) -> None:
    """An operation of one of gpusim's kernels, on the current stream."""
    with _lock:
        reads, writes = _pointed_to(arguments.reshape(-1)[0])
        _operation(get_current_stream(), reads, writes)


# NCCL: sends and receives of one group meet when it ends.


class _Nccl:
    """cupy.cuda.nccl, as far as gpusim asks for it."""

    available = True
    NCCL_UINT8, NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 1, 0, 1, 2, 3
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_INT64 = 6, 7, 8, 4

    class NcclError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.open: list[tuple[Any, ...]] | None = None
        self.groups = 0
        outer = self

        class NcclCommunicator:
            def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
                self._ndev, self._rank, self._device = ndev, rank, _thread.device

            @staticmethod
            def initAll(devices: list[int]) -> list[Any]:
                made = []
                for rank, device in enumerate(devices):
                    with Device(device):
                        made.append(NcclCommunicator(len(devices), b"", rank))
                return made

            def send(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
                outer.add(("send", self._rank, peer, pointer, count, stream))

            def recv(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
                outer.add(("recv", peer, self._rank, pointer, count, stream))

            def destroy(self) -> None:
                pass

            abort = destroy

        self.NcclCommunicator = NcclCommunicator

    def get_version(self) -> int:
        return 23000

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def groupStart(self) -> None:
        assert self.open is None, "groups do not nest here"
        self.open = []

    def add(self, operation: tuple[Any, ...]) -> None:
        assert self.open is not None, "send and recv outside a group would wait for each other"
        self.open.append(operation)

    def groupEnd(self) -> None:
        assert self.open is not None
        operations, self.open = self.open, None
        self.groups += 1
        sends = [operation for operation in operations if operation[0] == "send"]
        receives = [operation for operation in operations if operation[0] == "recv"]
        assert len(sends) == len(receives), "a receive without its send never ends"
        for send in sends:
            receive = next(r for r in receives if r[1:3] == send[1:3])
            receives.remove(receive)
            assert send[4] == receive[4]
            ctypes.memmove(receive[3], send[3], send[4])
            with _lock:
                from_, to_ = (_streams[operation[5]] for operation in (send, receive))
                _merge(to_.clock, _thread.known)
                _operation(from_, _at(send[3]), [])
                _merge(to_.clock, from_.clock)
                _operation(to_, [], _at(receive[3]))
                _merge(from_.clock, to_.clock)


_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
nccl = _Nccl()


def cuda(gpus: int) -> SimpleNamespace:
    """cupy.cuda."""

    class Known(Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _streams[self.ptr] = self

    return SimpleNamespace(
        Device=Device,
        Stream=Known,
        Event=Event,
        get_current_stream=get_current_stream,
        runtime=SimpleNamespace(getDeviceCount=lambda: gpus, getDevice=lambda: _thread.device),
        nccl=nccl,
    )
