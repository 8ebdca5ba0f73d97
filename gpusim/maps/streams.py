"""Replicas on GPUs: streams, and events that order what they exchange.

The caller of pmap, its replicas and their rendezvous each work on a stream of their own (more than
STREAMS replicas share so many), and the host waits for none of them. A stream waits for the streams
that computed its inputs:

- a replica's stream waits for the caller's before it begins, and the caller's for all replicas'
  when they have ended;
- a rendezvous's stream waits for the streams of all replicas that have arrived, and theirs for the
  rendezvous's before the operands are given up and the replicas continue.

That orders memory too. CuPy returns the memory of an unreferenced array to the stream that
allocated it, which may reuse it at once, although other streams may still read it. So results of a
rendezvous come from its stream, which always waits for all replicas that hold them, and a stream is
lent to one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..libraries import allocate, as_bits, on_device, to_host, to_library_of
from .axis_environment import AxisEntry
from .mapped_array.array import Array, MappedArray, unpack, wrap

HOST = ("cpu", "host")

STREAMS = 128
"""Streams of the replicas of one call on a GPU. Each has an arena of its own in CuPy's pool."""

# --- where replicas run -------------------------------------------------------------------------


def check_devices(devices: Any) -> None:
    """Check the type of pmap's `devices`. Whether they exist is checked when the replicas start.

    **Raises**:

    - TypeError: if it is neither None nor a sequence.
    - ValueError: if it is empty, or an entry does not name a device.
    """
    if devices is None:
        return
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"pmap devices must be None or a sequence of devices, but got {devices!r}")
    if not devices:
        raise ValueError("pmap devices is empty: it must be None or name at least one device")
    for device in devices:
        if not (
            _is_host(device)
            or _is_number(device)
            or hasattr(device, "gpu")
            or hasattr(device, "gpu_of")
        ):
            raise ValueError(
                f"pmap devices has {device!r}; expected 'cpu', 'host', the number of a GPU, or a "
                "Placement or Ipu of gpusim.devices"
            )


def _is_host(device: Any) -> bool:
    return isinstance(device, str) and device in HOST


def _is_number(device: Any) -> bool:
    number = isinstance(device, (int, np.integer)) and not isinstance(device, bool)
    return number and bool(device >= 0)


def gpus_of_replicas(
    devices: Sequence[Any] | None, leaves: Sequence[Any], size: int, outer: StreamSlot | None
) -> list[int | None]:
    """The GPU of each replica, None for the host. `devices` repeat in their order.

    Without `devices`, all replicas run on the GPU of the first argument that is on one, else on
    that of the calling replica.

    **Raises**:

    - ImportError: if CuPy is not installed and a GPU is named.
    - ValueError: if a GPU does not exist.
    """
    if devices is None:
        arrays = (unpack(leaf)[0] for leaf in leaves)
        calling = None if outer is None else outer.gpu
        found = next((int(array.device.id) for array in arrays if on_device(array)), calling)
        return [found] * size
    chosen = [_gpu_of(device) for device in devices]
    return [chosen[index % len(chosen)] for index in range(size)]


def _gpu_of(device: Any) -> int | None:
    if _is_host(device):
        return None
    gpus = _gpus()
    number = int(device) if _is_number(device) else None
    if number is None:  # a device that is simulated on a GPU names it
        number = device.gpu_of(gpus) if hasattr(device, "gpu_of") else device.gpu
    if number is not None and number >= gpus:
        raise ValueError(f"pmap devices has GPU {number}, but there are {gpus} GPUs")
    return number


def _cupy() -> Any:
    from ..cuda.launch import require_cupy

    return require_cupy()


def _gpus() -> int:
    count: int = _cupy().cuda.runtime.getDeviceCount()
    return count


# --- streams ------------------------------------------------------------------------------------


class _Pool:
    """Streams that no call holds. They wait already for all their earlier users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Any]] = {}

    def take(self, gpu: int) -> Any:
        """A stream of the GPU that does not wait for the null stream."""
        with self._lock:
            free = self._free.setdefault(gpu, [])
            if free:
                return free.pop()
        cupy = _cupy()
        with cupy.cuda.Device(gpu):
            return cupy.cuda.Stream(non_blocking=True)

    def give_back(self, gpu: int, stream: Any) -> None:
        with self._lock:
            self._free.setdefault(gpu, []).append(stream)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


pool = _Pool()


def _record(stream: Any) -> Any:
    """An event after all work on the stream, whose GPU must be the current one."""
    return stream.record(_cupy().cuda.Event(disable_timing=True))


def _record_current(gpu: int) -> Any:
    cupy = _cupy()
    with cupy.cuda.Device(gpu):
        return _record(cupy.cuda.get_current_stream())


@dataclass
class StreamSlot:
    """The GPU and the stream of one replica.

    **Attributes**:

    - `gpu`, `stream`: CUDA's number of the GPU, and one of its streams.
    - `rendezvous_streams`: the streams of the outermost call's rendezvous, by slots and by GPU.
    - `end`: the event after the replica's last work.
    """

    gpu: int
    stream: Any
    rendezvous_streams: dict[tuple[int, ...], dict[int, Any]]
    end: Any = None


class StreamSlots:
    """The stream slots of one pmap call's replicas; `of` has None for a replica on the host.

    A context: on leaving, the caller's streams wait for all replicas, and the streams are returned
    to the pool.
    """

    def __init__(
        self, gpus: Sequence[int | None], leaves: Sequence[Any], outer: StreamSlot | None
    ) -> None:
        self._root = outer is None
        self.rendezvous_streams = {} if outer is None else outer.rendezvous_streams
        self._gpus = sorted({gpu for gpu in gpus if gpu is not None})
        self._begin = [_record_current(gpu) for gpu in sorted({*self._gpus, *_gpus_of(leaves)})]
        self.of: list[StreamSlot | None] = []
        taken: dict[int, list[Any]] = {gpu: [] for gpu in self._gpus}
        for gpu in gpus:
            if gpu is None:
                self.of.append(None)
                continue
            streams = taken[gpu]
            stream = pool.take(gpu) if len(streams) < STREAMS else streams[-STREAMS]
            streams.append(stream)
            self.of.append(StreamSlot(gpu, stream, self.rendezvous_streams))
        self.home = self.of[0].gpu if self.of[0] is not None else None

    def __enter__(self) -> StreamSlots:
        return self

    def __exit__(self, *exception: object) -> None:
        self.follow()
        # A replica that pmap has abandoned still works on its stream, and may meet others.
        slots = [slot for slot in self.of if slot is not None]
        working = {id(slot.stream) for slot in slots if slot.end is None}
        lent = {id(slot.stream): (slot.gpu, slot.stream) for slot in slots}
        held = [pair for key, pair in lent.items() if key not in working]
        if self._root and not working:
            held += [
                pair for streams in self.rendezvous_streams.values() for pair in streams.items()
            ]
            self.rendezvous_streams.clear()
        # Gathering on one GPU read from all GPUs: later work waits for that.
        behind = [_record_current(gpu) for gpu in self._gpus]
        for gpu, stream in held:
            for event in behind:
                stream.wait_event(event)
            pool.give_back(gpu, stream)

    def follow(self) -> None:
        """Let the caller's streams wait for the work of all replicas."""
        cupy = _cupy()
        ends = [slot.end for slot in self.of if slot is not None and slot.end is not None]
        for gpu in self._gpus:
            with cupy.cuda.Device(gpu):
                stream = cupy.cuda.get_current_stream()
            for end in ends:
                stream.wait_event(end)

    @contextmanager
    def on_stream(self, index: int, entry: AxisEntry) -> Iterator[None]:
        """A block whose work runs on a replica's stream, after the caller's work."""
        slot = self.of[index]
        if slot is None:
            yield
            return
        cupy = _cupy()
        with cupy.cuda.Device(slot.gpu), slot.stream:
            for event in self._begin:
                slot.stream.wait_event(event)
            entry.like = cupy.empty(0)
            try:
                yield
            finally:
                slot.end = _record(slot.stream)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """A block of the caller's work, on the first replica's GPU."""
        self.follow()
        with nullcontext() if self.home is None else _cupy().cuda.Device(self.home):
            yield

    def place(self, index: int) -> int | None:
        """The replica's GPU."""
        slot = self.of[index]
        return None if slot is None else slot.gpu


def _gpus_of(leaves: Sequence[Any]) -> set[int]:
    arrays = (unpack(leaf)[0] for leaf in leaves)
    return {int(array.device.id) for array in arrays if on_device(array)}


# --- moving -------------------------------------------------------------------------------------


def move(value: Any, gpu: int | None) -> Any:
    """An array on `gpu`, which is the current one (None: on the host); other values stay.

    Copies run on the current stream.
    """
    if isinstance(value, MappedArray):
        data, axes = unpack(value)
        return wrap(move(data, gpu), axes)
    if gpu is None:
        return to_host(value) if on_device(value) else value
    if on_device(value):
        return value if int(value.device.id) == gpu else _from_another_gpu(value)
    host = isinstance(value, (np.ndarray, np.generic))
    return to_library_of(_cupy().empty(0), value) if host else value


def _from_another_gpu(array: Array) -> Array:
    target = allocate(_cupy().empty, array.shape, array.dtype)
    np.copyto(as_bits(target), as_bits(array))
    return target


# --- rendezvous ---------------------------------------------------------------------------------


@dataclass
class Arrival:
    """A replica at a rendezvous, and the events after its work."""

    slot: StreamSlot
    streams: list[Any]  # the slot's, and the current one if that is another
    ready: list[Any]

    def depart(self, done: Any) -> None:
        """Let the replica's streams wait for the event after the rendezvous."""
        for stream in self.streams:
            stream.wait_event(done)


def arrive(slot: StreamSlot) -> Arrival:
    """Record the work of this thread's replica before a rendezvous."""
    cupy = _cupy()
    with cupy.cuda.Device(slot.gpu):  # f may have made another GPU or stream the current one
        current = cupy.cuda.get_current_stream()
        streams = [slot.stream] if current.ptr == slot.stream.ptr else [slot.stream, current]
        return Arrival(slot, streams, [_record(stream) for stream in streams])


class DeviceRendezvous:
    """A rendezvous of replicas on GPUs: operands are gathered on one GPU, results are handed out.

    If all are on one GPU nothing is copied: kernels take the replicas' own pointers.
    """

    def __init__(self, arrivals: Sequence[Arrival | None]) -> None:
        self.arrivals = arrivals
        self._present = [arrival for arrival in arrivals if arrival is not None]
        first = self._present[0].slot
        self.home = first.gpu
        key = tuple(id(arrival.slot) for arrival in self._present)
        self._streams = first.rendezvous_streams.setdefault(key, {})
        for gpu in {arrival.slot.gpu for arrival in self._present} - self._streams.keys():
            self._streams[gpu] = pool.take(gpu)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block whose work runs on the rendezvous's own stream, after all replicas' work."""
        cupy = _cupy()
        for arrival in self._present:
            for event in arrival.ready:
                self._streams[arrival.slot.gpu].wait_event(event)
        home = self._streams[self.home]
        with cupy.cuda.Device(self.home), home:
            try:
                yield
            finally:
                behind = {self.home: _record(home)}
                for gpu, stream in self._streams.items():
                    if gpu != self.home:  # the rendezvous has read its memory
                        stream.wait_event(behind[self.home])
                        with cupy.cuda.Device(gpu):
                            behind[gpu] = _record(stream)
                # Here, not in the replicas' threads: the operands are still held, whose memory
                # another replica of the stream may be given.
                for arrival in self._present:
                    arrival.depart(behind[arrival.slot.gpu])

    def gather(self, values: list[Any]) -> list[Any]:
        """One operand of each replica, on the rendezvous's GPU; NumPy arrays stay if all are."""
        if not any(on_device(unpack(value)[0]) for value in values):
            return values
        return self._exchange([(value, self.home) for value in values], collecting=True)

    def hand_out(self, values: list[tuple[Any, int]]) -> list[Any]:
        """Results for replicas, given by position: one copy for each GPU. NumPy arrays stay."""
        places = [None if a is None else a.slot.gpu for a in self.arrivals]
        return self._exchange([(value, places[replica]) for value, replica in values])

    def _exchange(
        self, wanted: list[tuple[Any, int | None]], collecting: bool = False
    ) -> list[Any]:
        moves: dict[tuple[int, int], tuple[Array, int]] = {}
        for value, gpu in wanted:
            data = unpack(value)[0]
            if gpu is not None and on_device(data) and int(data.device.id) != gpu:
                moves[id(data), gpu] = data, gpu
        arrived = dict(zip(moves, self._between_gpus([*moves.values()]), strict=True))
        results = []
        for value, gpu in wanted:
            data, axes = unpack(value)
            if (id(data), gpu) in moves:
                data = arrived[id(data), gpu]  # type: ignore[index]  # a GPU's, being in moves
            elif gpu is None:
                data = to_host(data) if on_device(data) else data
            elif collecting:
                data = move(data, gpu)
            results.append(wrap(data, axes) if isinstance(value, MappedArray) else data)
        return results

    def _between_gpus(self, moves: list[tuple[Array, int]]) -> list[Array]:
        """Copies on other GPUs, by the rendezvous's streams on both."""
        if not moves:
            return []
        from ..runtime.engines.nccl import send_between_gpus

        return send_between_gpus(moves, self._streams)
