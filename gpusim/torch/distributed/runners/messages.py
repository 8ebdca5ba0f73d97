"""The messages between a rank's process and its thread of the launching process.

Messages are JSON on a socket, or a few bytes for a call that was made before; see `plans`. Tensors
are bytes in memory that both have mapped, or follow the message where the process belongs to
another instance. Nothing is unpickled, except by `torch.load(weights_only=True)`, which makes data
and tensors only.
"""

from __future__ import annotations

import array
import base64
import ctypes
import dataclasses
import json
import mmap
import os
import select
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from gpusim.fallback import schedules

from .... import formats
from ....reduction import Reduction
from ....wires import Wire
from ..memory import Array
from ..tracebacks import RemoteTraceback

__all__ = [
    "Channel",
    "Copies",
    "Received",
    "SharedMemory",
    "address_of",
    "decode",
    "decode_error",
    "dump",
    "encode",
    "encode_error",
    "load",
    "read",
    "view",
]

HEADER = struct.Struct("<I?Q")
"""The length of a message's JSON, whether a file comes with it, and the length of its payload."""

POLL = struct.pack("@ll", 0, 50_000)
"""The time, as C has it, after which a thread that waits for its process looks whether it is to
end: 0.05 seconds."""

AT_ONCE = 1 << 24
"""Bytes of a payload for which memory is taken before any have come."""

CHUNK = 1 << 14
"""Bytes that are received at once, if there are as many."""

FILE_SPACE = socket.CMSG_LEN(struct.calcsize("i")) if hasattr(socket, "CMSG_LEN") else 0
"""Bytes that come with a file descriptor."""

ALIGNMENT = 64
SEGMENT = 1 << 26
"""Bytes of address space that a rank's first segment takes. Memory is taken where it is used."""

KEPT = 1 << 20
"""Bytes of memory that a rank keeps for its next call."""

Message = dict[str, Any]

to_json = json.JSONEncoder(separators=(",", ":")).encode


class Received(NamedTuple):
    """A message, and what came with it; or a `brief` one, of bytes, and an empty message.

    JSON begins with a brace, and no brief message does.
    """

    message: Message
    file: int | None
    payload: bytearray
    brief: bytes = b""


class Channel:
    """One end of a socket, for messages with a payload and at most one file descriptor each.

    **Attributes**: `shares_memory` says whether the other end is on this machine, so that files
    can be sent: the socket is a Unix socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        #: What has been received beyond the last message. Touched by the thread that receives.
        self._buffer = bytearray()
        self._files: list[int] = []
        self._is_timed = False
        self.shares_memory = end.family == socket.AF_UNIX

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self,
        message: Message | bytes,
        file: int | None = None,
        payload: Sequence[memoryview] = (),
    ) -> None:
        """Send a message. **Raises**: OSError if the other end is gone."""
        content = message if isinstance(message, bytes) else to_json(message).encode()
        size = sum(part.nbytes for part in payload)
        whole = HEADER.pack(len(content), file is not None, size) + content
        with self._lock:
            if file is not None:
                whole = whole[socket.send_fds(self._socket, [whole], [file]) :]
            if whole:
                self._socket.sendall(whole)
            for part in payload:
                self._socket.sendall(part)

    def receive(self, check: Callable[[], object] | None = None) -> Received | None:
        """The next message; None if the other end is gone.

        `check` is called now and then while there is none, and may raise.

        **Raises**: ValueError for anything else than a message.
        """
        if check is not None and not self._is_timed:
            # One system call for each message, in place of poll and recvmsg.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, POLL)
            self._is_timed = True
        try:
            if not self._buffer:
                self._buffer += self._some(check)
            if len(self._buffer) < HEADER.size:
                self._fill(HEADER.size, check)
            length, has_file, size = HEADER.unpack_from(self._buffer)
            begin, end = HEADER.size, HEADER.size + length
            if len(self._buffer) < end:
                self._fill(end, check)
            content = bytes(self._buffer[begin:end])
            payload = self._buffer[end : end + size]
            del self._buffer[: end + size]
            if len(payload) < size:
                payload += read(self._socket, size - len(payload))
        except (EOFError, ConnectionError, TimeoutError):
            while self._files:
                os.close(self._files.pop())
            return None
        if has_file and not self._files:
            raise ValueError("a message names a file that did not come with it")
        came = self._files.pop(0) if has_file else None
        if content[:1] != b"{":
            return Received({}, came, payload, content)
        try:
            return Received(json.loads(content.decode()), came, payload)
        except RecursionError:
            raise ValueError("a message that is nested too deeply") from None

    def _fill(self, size: int, check: Callable[[], object] | None) -> None:
        """Receive until the buffer has so many bytes."""
        while len(self._buffer) < size:
            self._buffer += self._some(check)

    def _some(self, check: Callable[[], object] | None) -> bytes:
        """Some bytes, as soon as there are any. **Raises**: EOFError if the other end is gone."""
        while True:
            try:
                part, more, _, _ = self._socket.recvmsg(CHUNK, FILE_SPACE)
            except BlockingIOError:
                if check is not None:
                    check()
                continue
            for _, _, files in more:
                self._files += array.array("i", files)
            if not part:
                raise EOFError
            return part

    def has_more(self) -> bool:
        """Whether there is something to receive. (In any thread.)"""
        if self._buffer:
            return True
        poll = select.poll()
        with suppress(OSError, ValueError):  # it has been closed
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return False

    def is_over(self) -> bool:
        """Whether the other end is gone. (Where there is something to receive.)"""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut_down(self) -> None:
        """End what other threads do with the channel."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def read(end: socket.socket, size: int) -> bytearray:
    """So many bytes of a socket. **Raises**: EOFError if it ends before."""
    content = bytearray()
    while len(content) < size:
        # Memory for what may be there soon: the other end's word for the rest is not taken.
        begin = len(content)
        content += bytes(min(size - begin, max(AT_ONCE, begin)))
        with memoryview(content) as whole:
            rest = whole[begin:]
            while rest:
                try:
                    count = end.recv_into(rest)
                except BlockingIOError:  # of a socket with a limit: the rest is on its way
                    continue
                if not count:
                    raise EOFError
                rest = rest[count:]
            rest.release()
    return content


# Values


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """A value as JSON has it. Tensors are put into the list, and their numbers into the JSON.

    **Raises**: TypeError for a value of another type than torch's collectives take.
    """
    match value:
        case None | bool() | str() | float():
            return value
        case Integral():
            return int(value)
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case list():
            return [encode(each, tensors) for each in value]
        case tuple():
            return {"tuple": [encode(each, tensors) for each in value]}
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case timedelta():
            return {"seconds": value.total_seconds()}
        case np.dtype():
            return {"dtype": value.name}
        case dist.ReduceOp() | dist.ReduceOp.RedOpType():
            name = str(getattr(value, "op", value)).rpartition(".")[2]
            if name != "PREMUL_SUM":
                return {"operator": name}
            factor: Any = getattr(value, "factor", None)
            return {"factor": encode(factor, tensors)}
    if type(value) in CLASSES.values():
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        fields = {name: encode(each, tensors) for name, each in fields.items()}
        return {"class": type(value).__name__, "fields": fields}
    names = ("reduceOp", "rootRank", "rootTensor")
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not fields and not type(value).__module__.startswith("torch."):
        raise TypeError(f"a rank's process cannot send a {type(value).__qualname__}: {value!r:.60}")
    return {"options": {name: encode(each, tensors) for name, each in fields.items()}}


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items())):
        case "bytes", text:
            return base64.b64decode(text)
        case "tuple", items:
            return tuple(decode(each, tensors) for each in items)
        case "tensor", number:
            return tensors[number]
        case "seconds", number:
            return timedelta(seconds=number)
        case "dtype", name:
            return np.dtype(name)
        case "operator", name:
            return getattr(dist.ReduceOp, name)
        case "factor", factor:
            make: Any = dist._make_nccl_premul_sum
            return make(decode(factor, tensors))
        case "class", name:
            fields = {key: decode(each, tensors) for key, each in value["fields"].items()}
            return CLASSES[name](**fields)
        case "options", fields:
            found = {key: decode(each, tensors) for key, each in fields.items()}
            return types.SimpleNamespace(**found)
        case other:
            raise ValueError(f"a rank's process sent {other}")


#: What a Reduction is made of.
CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        Reduction,
        Wire,
        formats.Format,
        schedules.Schedule,
        schedules.Case,
        schedules.Walk,
        schedules.Tree,
        schedules.Binary,
        schedules.Exact,
        schedules.Balanced,
        schedules.Segments,
        schedules.Loops,
    )
}


# Memory


class Copies:
    """A block of shared memory, and the results that are to be copied out of it.

    **Attributes**: results are `pairs` of arrays, and `moves`: addresses to copy to, those to copy
    from, and numbers of bytes. `spans` are the addresses of memory that results go to, with their
    ends, and `owners` keep it. `received` has the parts of the block that come with the results,
    as start and length, where the memory is not shared. `address` is that of the block.
    """

    def __init__(self, memory: mmap.mmap | None, start: int, address: int = 0) -> None:
        self.memory, self.start, self.address = memory, start, address
        self.pairs: list[tuple[Array, Array]] = []
        self.moves: list[tuple[int, int, int]] = []
        self.spans: list[tuple[int, int]] = []
        self.owners: Sequence[Tensor] = ()
        self.received: list[tuple[int, int]] = []

    def finish(self) -> None:
        """Copy the results to where they go."""
        for target, source, size in self.moves:
            ctypes.memmove(target, source, size)
        for to, value in self.pairs:
            np.copyto(to, value)

    def clear(self) -> None:
        """Forget where results go."""
        self.pairs.clear()
        self.moves.clear()
        self.owners = ()

    def part(self, start: int, size: int) -> memoryview:
        """Bytes of the block."""
        assert self.memory is not None
        return memoryview(self.memory)[self.start + start : self.start + start + size]


class SharedMemory:
    """Memory of one rank's process for the tensors of its calls, which its thread maps as well.

    It grows by a new segment, a file without a name, which is twice as large as what is needed.
    If it is not `shared`, a segment is the process's own memory.
    """

    def __init__(self, shared: bool = True) -> None:
        self._shared = shared
        self.memory: mmap.mmap | None = None
        self._address = 0
        self._live: dict[int, int] = {}  # ends of the blocks in use, by their starts
        self._touched = 0

    def allocate(self, size: int) -> tuple[Copies, int | None]:
        """A block, and the file of its segment if that is a new one."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for used in sorted(self._live):
            if used - start >= size:
                break
            start = self._live[used]
        file = None
        if self.memory is None or start + size > len(self.memory):
            length = max(SEGMENT, 1 << (2 * size).bit_length())
            if self._shared:
                file = os.memfd_create("gpusim", os.MFD_CLOEXEC)
                os.ftruncate(file, length)
            self.memory = mmap.mmap(-1 if file is None else file, length)
            self._address = address_of(self.memory)
            self._live, self._touched, start = {}, 0, 0
        self._live[start] = start + size
        self._touched = max(self._touched, start + size)
        return Copies(self.memory, start, self._address + start), file

    def free(self, copies: Copies) -> None:
        """Give a block back. Much memory that no block uses returns to the system."""
        if copies.memory is None or copies.memory is not self.memory:
            return
        del self._live[copies.start]
        if not self._live and self._touched > KEPT:
            self.memory.madvise(mmap.MADV_REMOVE)
            self._touched = 0


def address_of(memory: mmap.mmap) -> int:
    """Where mapped memory is. It stays there as long as the mmap does."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def view(memory: mmap.mmap | bytearray, kind: Any) -> Tensor:
    """The tensor in memory that is described by its dtype, shape, strides and start."""
    name, shape, strides, start = kind
    dtype: torch.dtype = getattr(torch, name)
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    count = (last + 1) * dtype.itemsize
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=count)
    return flat.view(dtype).as_strided(shape, strides)


# Exceptions


def encode_error(error: BaseException, trace: str = "") -> Message:
    """An exception: its type, text and notes, and its arguments if they are plain."""
    try:
        arguments: Any = error.__reduce__()[1]
    except Exception:
        arguments = error.args
    plain = all(isinstance(each, str | int | float | None) for each in arguments)
    return {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "arguments": list(arguments) if plain else None,
        "text": str(error),
        "notes": getattr(error, "__notes__", []),
        "trace": trace,
    }


def decode_error(message: Message) -> BaseException:
    """The exception, of a type of its name if its own cannot be made of plain arguments."""
    found: Any = sys.modules.get(message["module"])
    for name in message["name"].split("."):
        found = getattr(found, name, None)
    error: BaseException | None = None
    if isinstance(found, type) and issubclass(found, BaseException):
        try:
            error = found(*message["arguments"])
        except Exception:
            error = None
    if error is None or str(error) != message["text"]:
        names = {"__module__": message["module"], "__qualname__": message["name"]}
        error = type(message["name"].rpartition(".")[2], (Exception,), names)(message["text"])
    for note in message["notes"]:
        error.add_note(note)
    if message["trace"]:
        error.__cause__ = RemoteTraceback(message["trace"])
    return error


# Results


def dump(value: Any) -> memoryview:
    """The result of a rank, as bytes.

    **Raises**: TypeError for what is not tensors, arrays and plain data.
    """
    content = BytesIO()
    try:
        torch.save(value, content)
        load(content)
    except Exception as error:
        raise TypeError(
            f"a rank's process returned {value!r:.60}, which cannot be handed back: "
            "expected tensors, NumPy arrays, numbers, texts, and lists, tuples, dicts and sets of "
            f"them ({str(error).splitlines()[-1].strip() or type(error).__name__})"
        ) from None
    return content.getbuffer()


def load(content: BytesIO) -> Any:
    """The result that `dump` was given."""
    content.seek(0)
    with torch.serialization.safe_globals(NUMPY):
        return torch.load(content, weights_only=True)


_numpy: Any = np
_multiarray: Any = sys.modules.get("numpy._core.multiarray") or _numpy.core.multiarray  # NumPy 1
NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    _multiarray._reconstruct,
    _multiarray.scalar,
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSU"},
]
