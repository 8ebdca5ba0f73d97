"""The stand-in's streams, events and devices, which check every access to memory for races.

Work runs at once, on the host. Each stream has a vector clock: for every stream, the last piece of
work that its own is known to follow. An access that does not follow the last write (a write: all
accesses), by streams, events or waits of the host, is a race on a GPU, and an AssertionError here.
Freed memory goes back to the stream that it was allocated on, as in CuPy's pool, and that stream's
next array may reuse it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.oracles.machine_time import PATIENCE

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
            self.time = time.perf_counter()

    def synchronize(self) -> None:
        with _lock:
            waits.append("event")
            _merge(_thread.known, self.clock)


class Device:
    """cupy.cuda.Device."""

    def __init__(self, device: int | None = None) -> None:
        self.id = _thread.device if device is None else int(device)
        self.attributes = {
            "MultiProcessorCount": 132,
            "MaxSharedMemoryPerMultiprocessor": 228 << 10,
        }
        self.compute_capability = "90"
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


def allocated(array: Any) -> None:
    """New memory, which only the current stream uses."""
    with _lock:
        _memory_of(array, get_current_stream())


def finish_reading(array: Any) -> None:
    """The host reads an array, and waits for that."""
    launched((array,), ())
    with _lock:
        waits.append("download")
        _merge(_thread.known, get_current_stream().clock)


def _at(address: int) -> list[Memory]:
    return [
        memory
        for memory in list(_memory.values())  # which shrinks when arrays are collected
        if memory.array() is not None
        and memory.address <= address < memory.address + max(memory.nbytes, 1)
    ]


def _pointed_to(struct: np.void) -> tuple[list[Memory], list[Memory]]:
    """The memory that a kernel reads and writes, by the addresses in its arguments."""
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


# NCCL: the sends and receives of a group meet those of the other ranks, wherever these are.


class _Ranks:
    """All ranks of one communicator: what they have sent, by sender and receiver."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], list[Sent]] = {}
        self.meeting = threading.Barrier(count)
        self.given: list[Any] = [None] * count


class Sent:
    """A send, which is over when it has been received."""

    def __init__(self, pointer: int, size: int, stream: Stream) -> None:
        self.pointer, self.size, self.stream = pointer, size, stream
        self.over = False


class Nccl:
    """cupy.cuda.nccl, as far as gpusim asks for it."""

    NCCL_UINT8, NCCL_INT32, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(5)
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = np.add, np.multiply, np.maximum, np.minimum
    DTYPES = (np.uint8, np.int32, np.float16, np.float32, np.float64)

    def __init__(self) -> None:
        self.available = True
        self.groups = 0
        self._open = threading.local()
        self._ranks: dict[Any, _Ranks] = {}
        outer = self

        class NcclCommunicator:
            def __init__(self, ndev: int, commId: Any, rank: int, config: Any = None) -> None:
                self.rank = rank
                self.ranks = outer._ranks.setdefault(commId, _Ranks(ndev))

            @staticmethod
            def initAll(devices: list[int]) -> list[Any]:
                identity = object()
                count = len(devices)
                return [NcclCommunicator(count, identity, rank) for rank in range(count)]

            def send(self, pointer: int, size: int, kind: int, peer: int, stream: int) -> None:
                sent = Sent(pointer, size, _streams[stream])
                outer.group().append((self.ranks, (self.rank, peer), sent, True))

            def recv(self, pointer: int, size: int, kind: int, peer: int, stream: int) -> None:
                into = Sent(pointer, size, _streams[stream])
                outer.group().append((self.ranks, (peer, self.rank), into, False))

            def allReduce(
                self, source: int, target: int, size: int, kind: int, op: Any, stream: int
            ) -> None:
                dtype = np.dtype(outer.DTYPES[kind])
                memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(source)
                self.ranks.given[self.rank] = np.frombuffer(memory, dtype).copy()
                self.ranks.meeting.wait(PATIENCE)
                total = op.reduce(np.stack(self.ranks.given), axis=0, dtype=dtype)
                self.ranks.meeting.wait(PATIENCE)
                ctypes.memmove(target, total.ctypes.data, total.nbytes)
                with _lock:
                    _operation(_streams[stream], _at(source), _at(target))

            def check_async_error(self) -> None:
                pass

            def destroy(self) -> None:
                pass

            abort = destroy

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> bytes:
        return next(_numbers).to_bytes(128, "big")

    def get_version(self) -> int:
        return 23000

    def groupStart(self) -> None:
        assert getattr(self._open, "group", None) is None, "groups do not nest here"
        self._open.group = []

    def group(self) -> list[Any]:
        group: list[Any] | None = getattr(self._open, "group", None)
        assert group is not None, "a send outside a group would wait for its receive"
        return group

    def groupEnd(self) -> None:
        group, self._open.group = self.group(), None
        self.groups += 1
        for ranks, way, sent, sends in group:
            if sends:
                with ranks.changed:
                    ranks.sent.setdefault(way, []).append(sent)
                    ranks.changed.notify_all()
        for ranks, way, into, sends in group:
            if not sends:
                self._await_send(ranks, way, into)
        for ranks, _, sent, sends in group:
            if sends:
                with ranks.changed:
                    over = ranks.changed.wait_for(partial(getattr, sent, "over"), PATIENCE)
                    assert over, "a send that is never received"

    def _await_send(self, ranks: _Ranks, way: tuple[int, int], into: Sent) -> None:
        with ranks.changed:
            there = ranks.changed.wait_for(lambda: ranks.sent.get(way), PATIENCE)
            assert there, "a receive whose send never comes"
            self._receive(ranks.sent[way].pop(0), into)
            ranks.changed.notify_all()

    def _receive(self, sent: Sent, into: Sent) -> None:
        assert sent.size == into.size
        ctypes.memmove(into.pointer, sent.pointer, sent.size)
        with _lock:  # both streams are held until the other one has come
            before = {**into.stream.clock}
            _merge(into.stream.clock, sent.stream.clock)
            _merge(sent.stream.clock, before)
            _operation(sent.stream, _at(sent.pointer), [])
            _operation(into.stream, [], _at(into.pointer))
            _merge(sent.stream.clock, into.stream.clock)
        sent.over = True


_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


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
        get_elapsed_time=lambda first, last: 1e3 * (last.time - first.time),
        runtime=SimpleNamespace(
            getDeviceCount=lambda: gpus,
            getDevice=lambda: _thread.device,
            getDeviceProperties=lambda number: {
                "name": b"Stand-in GPU",
                "totalGlobalMem": 2**30,
                "multiProcessorCount": 132,
                "major": 9,
                "minor": 0,
            },
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
        ),
        nccl=Nccl(),
    )
