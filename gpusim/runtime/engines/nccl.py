"""The engine between GPUs: NCCL, through CuPy. Everything travels as bytes, in group calls.

`NcclEngine` is an `Engine` between processes. `send_between_gpus` moves arrays in one process.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ...errors import InstanceError
from ...libraries import allocate, as_bits, copy_array, on_device
from . import Buffer, interruption

__all__ = ["NcclEngine", "NcclExchange", "send_between_gpus", "unique_id"]

Array = Any  # of CuPy

PATIENCE = 600.0
"""Seconds that an instance waits for the others; NCCL itself waits for ever."""

EAGER_POLLS, MIN_SLEEP, MAX_SLEEP = 200, 2e-5, 1e-3

_OPERATORS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_DTYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "bfloat16": "NCCL_BFLOAT16",
}

_lock = threading.Lock()  # of the communicators between this process's GPUs
_communicators: dict[tuple[int, ...], dict[int, Any]] = {}


def _cupy() -> Any:
    from ...cuda.launch import require_cupy

    return require_cupy()


def _bindings() -> Any:
    """cupy.cuda.nccl, which can be imported without NCCL."""
    _cupy()
    return importlib.import_module("cupy.cuda.nccl")


def _nccl() -> Any:
    """cupy.cuda.nccl; an ImportError, which says what to install, without NCCL."""
    nccl = _bindings()
    if not nccl.available:
        raise ImportError(
            "exchange between GPUs needs NCCL, which CuPy did not find: pip install "
            "nvidia-nccl-cu13 (nvidia-nccl-cu12 with CUDA 12)"
        )
    return nccl


def unique_id() -> bytes:
    """An identity for a new communicator. One instance makes it and sends it to the others."""
    identity: Any = _nccl().get_unique_id()
    return bytes(byte % 256 for byte in identity)  # older CuPys give a tuple of signed numbers


def _join(instances: int, identity: bytes, instance: int) -> Any:
    """A communicator; it waits for all others.

    Asking NCCL for an identity, only to see its type, would open a socket that stays.
    """
    create = _nccl().NcclCommunicator
    try:
        return create(instances, identity, instance)
    except TypeError:  # older CuPys take a tuple of signed numbers
        signed = tuple(byte - 256 if byte > 127 else byte for byte in identity)
        return create(instances, signed, instance)


# --- in one process -----------------------------------------------------------------------------


def send_between_gpus(
    moves: Sequence[tuple[Array, int]], streams: Mapping[int, Any]
) -> list[Array]:
    """Copy arrays to other GPUs of this process, in one group of sends and receives.

    Each array is read on the stream of its GPU and written on that of its target, so later work on
    either stream comes after the copy. Without NCCL the driver copies, with events between the
    streams.

    **Arguments**:

    - `moves`: arrays, and the number of the GPU that each goes to.
    - `streams`: the stream of each GPU that takes part.
    """
    cupy = _cupy()
    sources = [_contiguous(array, streams) for array, _ in moves]
    targets = []
    for array, gpu in moves:
        with cupy.cuda.Device(gpu), streams[gpu]:
            targets.append(allocate(cupy.empty, array.shape, array.dtype))
    if _bindings().available:
        _by_nccl(sources, targets, streams)
    else:
        _by_the_driver(sources, targets, streams)
    return targets


def _contiguous(array: Array, streams: Mapping[int, Any]) -> Array:
    if array.flags.c_contiguous:
        return array
    gpu = int(array.device.id)
    with _cupy().cuda.Device(gpu), streams[gpu]:
        return copy_array(array)


def _by_nccl(sources: list[Array], targets: list[Array], streams: Mapping[int, Any]) -> None:
    nccl = _nccl()
    gpus = tuple(sorted(streams))
    ranks = {gpu: rank for rank, gpu in enumerate(gpus)}
    with _lock:
        if gpus not in _communicators:
            created = nccl.NcclCommunicator.initAll(list(gpus))
            _communicators[gpus] = dict(zip(gpus, created, strict=True))
        communicators = _communicators[gpus]
        nccl.groupStart()
        try:
            for source, target in zip(sources, targets, strict=True):
                if not source.nbytes:
                    continue
                start, end = int(source.device.id), int(target.device.id)
                size, kind = source.nbytes, nccl.NCCL_UINT8
                sender, receiver = communicators[start], communicators[end]
                sender.send(source.data.ptr, size, kind, ranks[end], streams[start].ptr)
                receiver.recv(target.data.ptr, size, kind, ranks[start], streams[end].ptr)
        finally:
            nccl.groupEnd()


def _by_the_driver(sources: list[Array], targets: list[Array], streams: Mapping[int, Any]) -> None:
    cupy = _cupy()
    for source, target in zip(sources, targets, strict=True):
        start, end = int(source.device.id), int(target.device.id)
        with cupy.cuda.Device(start):
            before = streams[start].record(cupy.cuda.Event(disable_timing=True))
        with cupy.cuda.Device(end), streams[end]:
            streams[end].wait_event(before)
            np.copyto(as_bits(target), as_bits(source))
            after = streams[end].record(cupy.cuda.Event(disable_timing=True))
        streams[start].wait_event(after)  # later work may overwrite the source


# --- between processes --------------------------------------------------------------------------


class NcclEngine:
    """All instances of one NCCL communicator, a GPU for each; see `gpusim.runtime.engines.Engine`.

    NCCL has no tags: it matches sends and receives by their order. Instances must therefore begin
    their exchanges in the same order, whatever the tags.

    **Arguments**:

    - `instances`, `instance`: the number of instances, and the number of this one.
    - `identity`: the result of `unique_id` on one of them.
    - `gpu`: this instance's GPU; the default is the current one.
    - `patience`: seconds after which an unfinished exchange is an error.

    **Raises**:

    - ImportError: without CuPy or NCCL.
    - InstanceError: by `exchange`'s `wait` and the collective methods, when NCCL reports an error
      or nothing has arrived for `patience` seconds.
    """

    def __init__(
        self,
        instances: int,
        instance: int,
        identity: bytes,
        gpu: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        cupy, nccl = _cupy(), _nccl()
        self._nccl = nccl
        self.instances, self.instance = instances, instance
        self._patience = patience
        self._lock = threading.Lock()  # a group belongs to a thread
        self._gpu = int(cupy.cuda.Device(gpu).id)
        with cupy.cuda.Device(self._gpu):
            self._communicator = _join(instances, identity, instance)
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def prepare(self, array: Array) -> None:
        """Do nothing: the communicator exists."""

    def exchange(
        self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int
    ) -> NcclExchange:
        for buffer, _ in (*sends, *receives):
            self._check(buffer)
        kind = self._nccl.NCCL_UINT8

        def begin() -> None:
            for buffer, other in sends:
                pointer = buffer.data.ptr  # type: ignore[attr-defined]  # CuPy's
                self._communicator.send(pointer, buffer.nbytes, kind, other, self._stream.ptr)
            for buffer, other in receives:
                pointer = buffer.data.ptr  # type: ignore[attr-defined]  # CuPy's
                self._communicator.recv(pointer, buffer.nbytes, kind, other, self._stream.ptr)

        others = sorted({other for _, other in (*sends, *receives)})
        return self._launch(begin, (list(sends), list(receives)), others)

    def all_reduce(self, array: Array, op: str) -> Array:
        cupy = _cupy()
        name = _DTYPES.get(array.dtype.name)
        if op not in _OPERATORS or name is None or not hasattr(self._nccl, name):
            raise TypeError(f"NCCL has no all-reduce for op={op!r} of {array.dtype}")
        source = cupy.ascontiguousarray(array)
        self._check(source)
        total = cupy.empty(source.shape, source.dtype)
        kind, operator = getattr(self._nccl, name), getattr(self._nccl, _OPERATORS[op])

        def begin() -> None:
            self._communicator.allReduce(
                source.data.ptr, total.data.ptr, source.size, kind, operator, self._stream.ptr
            )

        others = [other for other in range(self.instances) if other != self.instance]
        self._launch(begin, (source, total), others).wait()
        return total

    def barrier(self) -> None:
        with _cupy().cuda.Device(self._gpu):
            self.all_reduce(_cupy().zeros(1, np.int32), "sum")

    def abort(self, message: str) -> NoReturn:
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._communicator.abort()
        os._exit(1)

    def close(self) -> None:
        self._communicator.destroy()

    def _check(self, array: Array) -> None:
        if not on_device(array):
            raise TypeError(
                f"NCCL moves arrays on GPUs between instances, got {type(array).__name__}; NumPy's "
                "arrays need MPI"
            )
        if not array.flags.c_contiguous:
            raise ValueError(f"NCCL moves contiguous arrays, got strides {array.strides}")
        if int(array.device.id) != self._gpu:
            raise ValueError(f"this instance is on GPU {self._gpu}, the array on {array.device.id}")

    def _launch(self, begin: Any, buffers: Any, others: Sequence[int]) -> NcclExchange:
        """Begin behind the current stream's work; the current stream goes on behind it."""
        cupy = _cupy()
        with cupy.cuda.Device(self._gpu), self._lock:
            current = cupy.cuda.get_current_stream()
            self._stream.wait_event(current.record(cupy.cuda.Event(disable_timing=True)))
            self._nccl.groupStart()
            try:
                begin()
            finally:
                self._nccl.groupEnd()
            done = self._stream.record(cupy.cuda.Event(disable_timing=True))
            current.wait_event(done)
        return NcclExchange(done, self._communicator, buffers, self._patience, others)


class NcclExchange:
    """A pending exchange, and the buffers that must live as long as it does.

    Later work on the stream that was current comes after it anyway; `wait` is for the host.
    """

    def __init__(
        self, done: Any, communicator: Any, buffers: Any, patience: float, others: Sequence[int]
    ) -> None:
        self._done, self._communicator = done, communicator
        self._buffers, self._patience, self._others = buffers, patience, others

    def awaited(self) -> Sequence[int]:
        """The instances that have not yet done their part."""
        return [] if self._done.done else self._others

    def wait(self) -> None:
        """Return when the exchange is complete; calls `interruption` meanwhile.

        **Raises**:

        - InstanceError: if NCCL reports an error, or after the engine's patience.
        """
        end = time.monotonic() + self._patience
        polls, sleep = 0, MIN_SLEEP
        while not self._done.done:
            polls += 1
            if polls < EAGER_POLLS:
                continue
            if (check := interruption.get()) is not None:
                check()
            self._check_errors()
            if time.monotonic() > end:
                self._fail(f"an exchange by NCCL has not ended within {self._patience:g} s")
            time.sleep(sleep)
            sleep = min(2 * sleep, MAX_SLEEP)
        self._buffers = None

    def _check_errors(self) -> None:
        try:
            self._communicator.check_async_error()
        except RuntimeError as error:  # NcclError
            self._fail(f"NCCL: {error}", error)

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        self._communicator.abort()
        names = ", ".join(map(str, self._others)) or "none"
        raise InstanceError(
            self._others[0] if self._others else -1,
            f"{what}, in an exchange with instances {names}",
        ) from cause
