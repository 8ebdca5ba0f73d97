"""Ranks spread over the instances of a World, where one machine is too small for their processes.

Each instance forks the processes of its own ranks. All of them have their threads in instance 0,
with its scheduler and exchange, as in `processes`. A process of another instance sends its calls,
and the bytes of their tensors, through a socket to instance 0. A second socket of each instance
tells instance 0 how its processes end, and gives it the end of the launch.

Instance 0 listens while the instances connect. The World tells them the port and a token; a
connection without the token is closed.
"""

from __future__ import annotations

import hmac
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from multiprocessing import connection
from typing import Any

import numpy as np

from ....errors import GpusimError, InstanceError
from ....maps.clock import Work
from ....reduction import current
from ....runtime.world import World
from ..calls.folds import OneReduction
from ..tracebacks import RemoteTraceback
from .messages import Channel, Message, decode_error, encode_error, load, read
from .processes import ProcessLaunch, ProxyRank
from .threads import Rank

__all__ = ["InstancesLaunch"]

TOKEN = 32
"""Bytes of the secret that the instances share."""

PLACE = struct.Struct("=i255pI32s")
"""Instance 0's message to the others: whether it listens, its address, port and token."""

HELLO = struct.Struct("<32sIi")
"""The first message of a connection: the token, the instance, and the rank or -1."""

CONTROL = -1

LIMIT = 60.0
"""Seconds in which the instances have to connect."""

HELLO_LIMIT = 1.0
"""Seconds in which a connection has to say who it is."""

ENDING = 5.0
"""Seconds in which another instance ends a process."""

ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of the sockets: a machine that does not answer counts as gone after ten seconds."""

POLL = 0.2
"""Seconds between two looks at processes whose workers may live on, and hide their end."""


class Instance:
    """Another instance, as instance 0 sees it."""

    def __init__(self, launch: InstancesLaunch, number: int, ranks: range) -> None:
        self.launch, self.number, self.ranks = launch, number, ranks
        self.control: Channel | None = None
        self.processes = {rank: RemoteProcess(self, rank) for rank in ranks}
        self.over = False

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"instance {self.number} ({f'ranks {first} to' if first < last else 'rank'} {last})"

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """Send a message; one to an instance that is gone is lost."""
        if self.control is not None:
            with suppress(OSError):
                self.control.send(message, None, payload)

    def follow(self) -> None:
        """Note what it says of its processes, until it is gone. (In a thread of its own.)"""
        assert self.control is not None
        with suppress(OSError, ValueError):  # closed at the end of the launch
            while (found := self.control.receive()) is not None:
                message = found.message
                process = self.processes[message["rank"]]
                if "work" in message:
                    process.work = None if message["work"] is None else Work(*message["work"])
                    process.is_asked = False
                    continue
                process.exitcode = message["code"]
                process.ended.set()
        self.lose()

    def lose(self) -> None:
        """Note that it is gone, and end the launch."""
        for rank, process in self.processes.items():
            process.ended.set()
            proxy = self.launch.ranks[rank]
            assert isinstance(proxy, ProxyRank)
            if not self.over:
                proxy.channel.shut_down()  # else a thread that sends waits for the machine
        self.launch.begun.wait()
        if not self.over:
            self.launch.abort(self.failure())

    def failure(self) -> InstanceError:
        return InstanceError(self.number, f"{self} is gone, in the midst of a launch")


class RemoteProcess:
    """The process of a rank of another instance."""

    def __init__(self, instance: Instance, rank: int) -> None:
        self.instance, self.rank = instance, rank
        self.exitcode: int | None = None
        self.ended = threading.Event()
        #: Its work as its instance said last; it goes on until the first answer.
        # Both are written by the thread that follows the instance, and `is_asked` by the watcher's
        # as well, which asks only when an answer has come.
        self.work: Work | None = Work(0.0, True, 0.0)
        self.is_asked = False

    def look(self) -> Work | None:
        """The newest work that is known; ask for a newer one. (In the watcher's thread.)"""
        if not self.is_asked:
            self.is_asked = True
            self.instance.send({"rank": self.rank})
        return self.work

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def terminate(self) -> None:
        interrupted = self.instance.launch.interrupted[0]
        number = signal.SIGINT if interrupted else signal.SIGTERM
        self.instance.send({"signal": number, "rank": self.rank})

    def kill(self) -> None:
        if self.is_alive():
            self.instance.send({"signal": signal.SIGKILL, "rank": self.rank})

    def join(self, limit: float | None = None) -> None:
        if not self.ended.wait(ENDING if limit is None else limit) and limit is None:
            self.instance.lose()

    def close(self) -> None:
        pass

    def failure(self) -> InstanceError:
        return self.instance.failure()


class InstancesLaunch(ProcessLaunch):
    """A launch on all instances of a World, each of which makes it."""

    def __init__(
        self,
        instances: World,
        environments: Sequence[Mapping[str, str]],
        run: Callable[[Rank], Any],
        *how: Any,
    ) -> None:
        if len(environments) != instances.replicas:
            raise ValueError(
                f"launch: ranks={len(environments)}: expected {instances.replicas}, as many as the "
                f"{instances.instances} instances of the World have replicas"
            )
        super().__init__(environments, run, *how)
        self.instances = instances
        self.instance = instances.instance
        self.begun = threading.Event()
        self.payloads: dict[int, bytearray] = {}
        self.others: list[Instance] = []
        first = 0
        for number, count in enumerate(instances.counts):
            block = range(first, first + count)
            if number == self.instance:
                self.block = block
            if number and not self.instance:
                self.others.append(Instance(self, number, block))
            first += count

    def execute(self) -> list[Any]:
        chooser = self.chooser
        how = chooser.reduction if isinstance(chooser, OneReduction) else chooser is not None
        terms = {
            "ranks": str(self.size),
            "reduction": f"{how!r}, in {current()!r}",
            "schedule": self.schedule,
            "device": str(self.device),
            "seed": str(self.seed),
            "address": self._address(),
        }
        self.instances.agree("torch.distributed's launch", terms)
        if self.instance:
            with self._processes():
                return self._follow()
        try:
            results = super().execute()
        except BaseException as error:
            self._tell(_encode(error))
            raise
        else:
            payloads = [self.payloads[rank] for rank in range(self.size)]
            self._tell({"sizes": list(map(len, payloads))}, [memoryview(each) for each in payloads])
            return results
        finally:
            for other in self.others:
                if other.control is not None:
                    other.control.close()

    def local_ranks(self) -> Sequence[Rank]:
        return [self.ranks[rank] for rank in self.block]

    def load(self, rank: Rank, payload: bytearray) -> Any:
        self.payloads[rank.index] = payload
        return super().load(rank, payload)

    def look_at(self, process: Any) -> Work | None:
        return process.look() if isinstance(process, RemoteProcess) else super().look_at(process)

    def _address(self) -> str:
        return self.ranks[0].environment[b"MASTER_ADDR"].decode()

    def _share(self, place: bytes) -> bytes:
        """Send what instance 0 says to all."""
        row = np.frombuffer(place, np.uint8).copy()
        rows = self.instances.gather("torch.distributed's launch: where to connect", row)
        return rows[0].tobytes()

    # Instance 0

    def after_forks(self) -> None:
        """Wait for the other instances. (After the forks, as processes inherit all sockets.)"""
        if self.instance:
            return
        token = secrets.token_bytes(TOKEN)
        address = self._address()
        try:
            server = socket.create_server((address, 0), backlog=self.size + 16)
        except OSError as error:
            self._share(PLACE.pack(False, address.encode(), 0, b""))
            raise GpusimError(
                f"launch: instance 0 cannot listen at {address}: {error}; expected an address of "
                "its machine"
            ) from error
        with server:
            self._share(PLACE.pack(True, address.encode(), server.getsockname()[1], token))
            self._accept(server, token)
        for other in self.others:
            threading.Thread(target=other.follow, name=f"gpusim {other}", daemon=True).start()

    def _accept(self, server: socket.socket, token: bytes) -> None:
        owners = {(each.number, CONTROL): each for each in self.others}
        owners |= {(each.number, rank): each for each in self.others for rank in each.ranks}
        end = time.monotonic() + LIMIT
        while owners:
            controls = {
                each.control.fileno(): each for each in self.others if each.control is not None
            }
            listening = server.fileno()
            ready = connection.wait([listening, *controls], max(0, end - time.monotonic()))
            if not ready:
                missing = next(iter(owners.values()))
                raise InstanceError(
                    missing.number, f"{missing} has not connected within {LIMIT:.0f} seconds"
                )
            for number, other in controls.items():
                if number in ready and other.control is not None and other.control.is_over():
                    raise other.failure()
            if listening not in ready:
                time.sleep(0.01)
                continue
            end_of, _ = server.accept()
            found = _read_hello(end_of, token)
            owner = owners.pop(found, None) if found else None
            if found is None or owner is None:
                end_of.close()
                continue
            channel = Channel(end_of)
            rank = found[1]
            if rank == CONTROL:
                owner.control = channel
            else:
                proxy = self.ranks[rank]
                assert isinstance(proxy, ProxyRank)
                proxy.channel, proxy.process = channel, owner.processes[rank]
                self.channels.append(channel)

    def _serve(self, rank: Rank) -> Any:
        self.begun.set()
        return super()._serve(rank)

    def abort(self, error: InstanceError) -> None:
        """End all ranks."""
        with self.scheduler.lock:
            self.call.abort(error)

    def _tell(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """Let the other instances end."""
        for other in self.others:
            other.over = True
            other.send({"end": message}, payload)
        self.begun.set()

    # The others

    def before_forks(self) -> None:
        if not self.instance:
            return
        listens, address, port, token = PLACE.unpack(self._share(bytes(PLACE.size)))
        if not listens:
            raise InstanceError(0, f"instance 0 cannot listen at {address.decode()}")
        self._place = (address.decode(), port), token
        self.control = Channel(self._connect(CONTROL))
        self.channels.append(self.control)

    def open_channel(self, rank: ProxyRank) -> socket.socket:
        return self._connect(rank.index) if self.instance else super().open_channel(rank)

    def _connect(self, rank: int) -> socket.socket:
        where, token = self._place
        try:
            end = socket.create_connection(where, timeout=LIMIT)
            _keep_alive(end)
            end.sendall(HELLO.pack(token, self.instance, rank))
        except OSError as error:
            raise GpusimError(
                f"launch: instance {self.instance} cannot reach instance 0 at "
                f"{where[0]}:{where[1]}: {error}; instances on several machines need the address "
                "of instance 0 as `address`, or --master-addr"
            ) from error
        return end

    def _follow(self) -> list[Any]:
        """Tell of the processes here, until instance 0 says how the launch has ended."""
        living = self.started()
        more = False  # after a message: another one may have been read with it
        while True:
            sentinels = [rank.process.sentinel for rank in living]
            connection.wait([self.control.fileno(), *sentinels], 0 if more else POLL)
            for rank in living[:]:
                if rank.process.exitcode is not None:
                    living.remove(rank)
                    with suppress(OSError):
                        self.control.send({"rank": rank.index, "code": rank.process.exitcode})
            more = self.control.has_more()
            if not more:
                continue
            found = self.control.receive()
            if found is None:
                raise InstanceError(0, "instance 0 is gone, in the midst of a launch")
            message = found.message
            if "rank" in message:
                self._obey(message)
                continue
            said = message["end"]
            if "sizes" not in said:
                raise _decode(said)
            results, rest = [], memoryview(found.payload)
            for size in said["sizes"]:
                results.append(load(BytesIO(rest[:size])) if size else None)
                rest = rest[size:]
            return results

    def _obey(self, message: Message) -> None:
        """Do what instance 0 asks for with a process of this one."""
        rank = message["rank"]
        process = getattr(self.ranks[rank], "process", None)
        if rank not in self.block or process is None:
            return
        if "signal" not in message:
            with suppress(OSError):
                self.control.send({"rank": rank, "work": self.look_at(process)})
            return
        self.interrupted[0] |= message["signal"] == signal.SIGINT
        (process.kill if message["signal"] == signal.SIGKILL else process.terminate)()


def _keep_alive(end: socket.socket) -> None:
    end.settimeout(None)
    for option in ALIVE:
        end.setsockopt(*option)


def _read_hello(end: socket.socket, token: bytes) -> tuple[int, int] | None:
    """The instance and rank of a new connection; None for a stranger."""
    end.settimeout(HELLO_LIMIT)
    try:
        given, instance, rank = HELLO.unpack(read(end, HELLO.size))
        if not hmac.compare_digest(given, token):
            return None
        _keep_alive(end)
    except (EOFError, OSError):
        return None
    return instance, rank


def _encode(error: BaseException) -> Message:
    """An error and its cause."""
    said: Message = {"error": encode_error(error)}
    cause = error.__cause__
    if cause is not None:
        inner = cause.__cause__
        trace = inner.args[0] if isinstance(inner, RemoteTraceback) else ""
        said["cause"] = encode_error(cause, trace)
    return said


def _decode(said: Message) -> BaseException:
    error = decode_error(said["error"])
    if "cause" in said:
        error.__cause__ = decode_error(said["cause"])
    return error
