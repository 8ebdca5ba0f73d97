"""World: the instances (processes) that share one program's replicas, in contiguous blocks.

Inside `with world:` the outermost mapped axis spans all of them.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from operator import index as as_index
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CollectiveMismatchError, GpusimError, InstanceError
from . import activity, environment
from .engines import Buffer, Engine, Pending, Processes, while_waiting
from .frames import at, place_of_error

__all__ = ["World", "current_world", "without_world"]

# The message in which each instance sends its call to the others, before they exchange values.
_HEADER = struct.Struct("=16sBH")  # digest, kind, length of the text
_HEADER_BYTES = 1024
_CALL, _LEAVE = range(2)
_INNER_CALL_POLL = 0.2  # seconds
_MAX_DIFFERENCE = 120  # characters

Terms = Mapping[str, str]

#: The kinds of messages on a channel: values on their way to a fold, results, and calls.
FLOWS = 3
_RESULTS, _CALLS = 1, 2
CHANNELS = (1 << 20) - 1  # times FLOWS, and a few for others: MPICH has 2**22 tags
#: The channel of calls outside threads, including those of lockstep maps.
MAIN_TAG = 0
#: The channel of leaving where calls are not compared: it has no other messages.
_LEAVING = CHANNELS

_world: ContextVar[World | None] = ContextVar("gpusim world", default=None)


def current_world() -> World | None:
    """The world of the `with` block around the running code, or None."""
    return _world.get()


@contextmanager
def without_world() -> Iterator[None]:
    """Run the block outside the current world, so that it can enter another one."""
    token = _world.set(None)
    try:
        yield
    finally:
        _world.reset(token)


class World:
    """R replicas on I instances, each of which holds a contiguous block of them.

    All instances enter it as a context manager. Inside, the outermost mapped axis of vmap, pmap
    and shard_map spans all instances. Each passes the values of its local replicas and receives
    their results. Collectives give the bits that one process with all replicas computes.

    **Attributes**:

    - `replicas`: the number of replicas of all instances.
    - `local_replicas`: the number of replicas of this instance.
    - `replica_offset`: the number of its first replica.
    - `instances`, `instance`: the number of instances, and the number of this one.
    - `counts`: the number of replicas of each instance.

    **Raises** (on leaving, and by collectives inside):

    - CollectiveMismatchError: if instances make different calls; it names them and both calls.
    - InstanceError: if another instance has failed, has left, or is gone; it names it.
    - GpusimError: if an error has ended this world before.

    An error that leaves the block ends the world, and with it all instances, unless the program
    catches the error and goes on alone.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> with gpusim.World.from_environment(replicas=4, environ={}) as world:
    ...     x = np.arange(world.replica_offset, world.replica_offset + world.local_replicas)
    ...     total = gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i", out_axes=None)(x)
    >>> world, int(total)
    (World(replicas=4, instances=1), 6)
    """

    def __init__(
        self,
        counts: Sequence[int],
        engine: Engine | None = None,
        *,
        check: bool | Literal["calls"] = True,
    ) -> None:
        """Make a world; programs usually call `from_environment`.

        **Arguments**:

        - `counts`: the number of replicas of each instance, at least 1.
        - `engine`: the connection to the other instances; None for a single one.
        - `check`: compare the calls of all instances before each exchange, and the arguments and
          results of maps that all replicas share (`in_axes=None`, `out_axes=None`, `P()`). It costs
          a message of one KiB to each, and the hash of those values, of which it reads 20 GB/s.
          "calls" compares calls only, False nothing.

        **Raises**:

        - ValueError: if they do not fit together.
        """
        self.counts = tuple(as_index(count) for count in counts)
        self.engine = engine
        self.instances = 1 if engine is None else engine.instances
        self.instance = 0 if engine is None else engine.instance
        if len(self.counts) != self.instances:
            raise ValueError(f"counts={counts!r}: expected {self.instances}, one for each instance")
        if min(self.counts) < 1:
            raise ValueError(
                f"counts={counts!r}: every instance must hold at least one replica; start at most "
                f"{sum(self.counts)} instances, or ask for more replicas"
            )
        if check not in (True, False, "calls"):
            raise ValueError(f'check={check!r}: expected True, False or "calls"')
        self.check = check
        self.checks_values = check is True
        self._token: Token[World | None] | None = None
        self._over = False
        self._busy: set[int] = set()  # channels in use
        self._begun: set[int] = set()  # channels on which an exchange has begun
        self._lock = threading.Lock()
        self._activities: dict[int, str] = {}  # by thread
        self._agreed = ""  # the last call that all have made
        # Stored, as an isinstance check against a protocol takes longer than a message.
        self._processes = engine if isinstance(engine, Processes) else None
        if self._processes is not None:
            names = [self._who(instance) for instance in range(self.instances)]
            self._processes.name_instances(names, self._circumstances)

    @classmethod
    def from_environment(
        cls,
        replicas: int | None = None,
        *,
        check: bool | Literal["calls"] = True,
        environ: Mapping[str, str] | None = None,
    ) -> World:
        """The world that poprun, mpirun, srun or torchrun has started; one instance without them.

        **Arguments**:

        - `replicas`: the number of replicas of all instances, divided evenly; the first instances
          hold one more. None is one each. Where PopDist's variables are set, as by poprun, they
          count the replicas, and `replicas` must be None or agree.
        - `check`: see `World`.
        - `environ`: the environment, for tests; None is this process's.

        **Raises**:

        - ValueError: for variables that are missing or contradict each other, which it names, and
          for replicas that contradict them.
        - ImportError: for several instances without mpi4py.
        """
        launch = environment.read() if environ is None else environment.read(environ)
        if replicas is not None and as_index(replicas) < 1:
            raise ValueError(f"replicas={replicas!r}: expected a positive number, or None")
        total = launch.total_replicas
        if total is not None and replicas not in (None, total):
            raise ValueError(
                f"replicas={replicas!r}: PopDist's variables say {total}; expected that, or None"
            )
        if launch.instances == 1:
            return cls([total or replicas or 1], check=check)
        from .engines import mpi

        engine = mpi.connect(launch)
        if total is None:
            wanted = launch.instances if replicas is None else replicas
            return cls(environment.spread(wanted, launch.instances), engine, check=check)
        assert launch.local_replicas is not None
        counts = _exchange_counts(engine, launch.local_replicas)
        if sum(counts) != total or sum(counts[: engine.instance]) != launch.replica_offset:
            raise ValueError(
                f"POPDIST_NUM_LOCAL_REPLICAS is {list(counts)} on the instances, which does not "
                f"fit POPDIST_NUM_TOTAL_REPLICAS={total} and, on instance {engine.instance}, "
                f"POPDIST_REPLICA_INDEX_OFFSET={launch.replica_offset}"
            )
        return cls(counts, engine, check=check)

    @property
    def replicas(self) -> int:
        return sum(self.counts)

    @property
    def local_replicas(self) -> int:
        return self.counts[self.instance]

    @property
    def replica_offset(self) -> int:
        return sum(self.counts[: self.instance])

    def __repr__(self) -> str:
        where = f", instance={self.instance}" if self.instances > 1 else ""
        return f"World(replicas={self.replicas}, instances={self.instances}{where})"

    def __enter__(self) -> World:
        if self._token is not None:
            raise GpusimError("this World has been entered already; it holds until its block ends")
        if _world.get() is not None:
            raise GpusimError("a World inside a World: the instances belong to the outer one")
        self._check_running()
        self._token = _world.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._token is not None
        _world.reset(self._token)
        self._token = None
        if self.engine is None:
            return
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if not failed and not self._has_ended():
            by = ""
            if isinstance(error, SystemExit):
                code = "" if error.code is None else repr(error.code)
                by = f" by sys.exit({code}){at(place_of_error(error))}"
            try:
                with self.doing(f"leaving the world{by}"):
                    self._compare(_LEAVE, by, {}, MAIN_TAG if self.check else _LEAVING)
            except GpusimError as refusal:
                raise refusal from error  # which shows where sys.exit was called
        elif error is not None and failed:
            self._over = True
            if self._processes is not None:
                self._processes.fail(error)

    def _has_ended(self) -> bool:
        """Whether an error has ended the world."""
        broken = self._processes is not None and self._processes.broken
        return self._over or broken

    def _check_running(self) -> None:
        if self._has_ended():
            raise GpusimError("this World has ended with an error; start the program again")

    # The interface of the collectives

    @contextmanager
    def call(
        self, text: str, terms: Terms, tag: int = MAIN_TAG, *, within: int | None = None
    ) -> Iterator[None]:
        """A call that all instances make; the block runs when they have agreed on it.

        **Arguments**:

        - `text`: the call, for messages.
        - `terms`: everything that must be equal on all instances, by name.
        - `tag`: the channel of the call.
        - `within`: the channel on which the instances agree, if it is another one.

        **Raises**:

        - CollectiveMismatchError, InstanceError, GpusimError: see `World`.
        """
        self._check_running()
        agreeing = tag if within is None else within
        with self.doing(text):
            if self.check:
                with self.channel(agreeing):
                    self._compare(_CALL, text, {**terms, "channel": str(tag)}, agreeing)
                self._agreed = text
            yield

    def agree(self, text: str, terms: Terms) -> None:
        """Wait until all instances make the same call; see `call`."""
        with self.call(text, terms):
            pass

    def gather(self, text: str, row: NDArray[Any]) -> NDArray[Any]:
        """One row of numbers from each instance, of the same shape and dtype on all."""
        rows = np.zeros((self.instances, *row.shape), row.dtype)
        rows[self.instance] = row
        with self.call(text, {"gather": f"{row.dtype}{row.shape}"}), self.channel(MAIN_TAG):
            self._exchange_all(rows, MAIN_TAG)
        return rows

    def _compare(self, kind: int, text: str, terms: Terms, tag: int) -> None:
        """Exchange calls with all instances; an error if they differ."""
        content = repr(sorted(terms.items())).encode()
        local = _record(kind, hashlib.blake2b(content, digest_size=16).digest(), text)
        records = np.zeros((self.instances, _HEADER_BYTES), np.uint8)
        records[self.instance] = local
        self._exchange_all(records, tag)
        if (records[:, : _HEADER.size - 2] == local[: _HEADER.size - 2]).all():
            return
        self._over = True
        calls = [_Call.read(record) for record in records]
        if any(call.kind == _LEAVE for call in calls):
            raise self._error_of_leaving(calls)
        raise self._mismatch(calls, terms, tag)

    def _exchange_all(self, rows: NDArray[Any], tag: int) -> None:
        """Receive the rows of the other instances."""
        assert self.engine is not None
        local = rows[self.instance].copy()
        others = [i for i in range(self.instances) if i != self.instance]
        pending = self.engine.exchange(
            [(local, i) for i in others], [(rows[i], i) for i in others], FLOWS * tag + _CALLS
        )
        if tag == MAIN_TAG and self._processes is not None:
            with while_waiting(_InnerCallCheck(self, self._processes, pending)):
                pending.wait()
        else:
            pending.wait()

    def _error_of_inner_call(self, instance: int, call: _Call) -> GpusimError:
        self._over = True
        return CollectiveMismatchError(
            f"instances do not make the same call: {self._who(instance)} calls {call.text} in an "
            f"inner map; {self._who(self.instance)} has ended its inner map without that call and "
            f"is in {self._activities[threading.get_ident()]}"
        )

    def _error_of_leaving(self, calls: Sequence[_Call]) -> GpusimError:
        local = calls[self.instance]
        instance = next(i for i, call in enumerate(calls) if call.kind != local.kind)
        if local.kind == _LEAVE:
            return CollectiveMismatchError(
                f"{self._who(self.instance)} leaves the world{local.text}, but "
                f"{self._who(instance)} calls {calls[instance].text}"
            )
        by = calls[instance].text
        return InstanceError(instance, f"{self._who(instance)} has left the world{by}")

    def _mismatch(self, calls: Sequence[_Call], terms: Terms, tag: int) -> GpusimError:
        """The error for calls that differ. All instances make it, so they exchange their terms."""
        content = json.dumps(dict(terms)).encode()
        lengths = np.zeros((self.instances, 1), np.int64)
        lengths[self.instance] = len(content)
        self._exchange_all(lengths, tag)
        contents = np.zeros((self.instances, int(lengths.max())), np.uint8)
        contents[self.instance, : len(content)] = np.frombuffer(content, np.uint8)
        self._exchange_all(contents, tag)
        local = calls[self.instance]
        instance = next(i for i, call in enumerate(calls) if call.digest != local.digest)
        remote = json.loads(contents[instance, : int(lengths[instance, 0])].tobytes())
        differing = [
            _difference(name, str(terms.get(name)), str(remote.get(name)))
            for name in sorted({*terms, *remote})
            if terms.get(name) != remote.get(name)
        ]
        return CollectiveMismatchError(
            f"instances do not make the same call: {self._who(self.instance)} calls {local.text}, "
            f"{self._who(instance)} calls {calls[instance].text}; they differ in "
            + "; ".join(differing)
        )

    def _who(self, instance: int) -> str:
        first, count = sum(self.counts[:instance]), self.counts[instance]
        block = f"replica {first}" if count == 1 else f"replicas {first} to {first + count - 1}"
        return f"instance {instance} ({block})"

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Name what this instance may wait in, for the launcher and for errors about others."""
        thread = threading.get_ident()
        self._activities[thread] = text
        activity.note(text)
        try:
            yield
        except InstanceError as error:
            raise InstanceError(
                error.instance, f"{error}{self._circumstances(error.instance, text)}"
            ) from None
        finally:
            del self._activities[thread]
            activity.note(next(iter(self._activities.copy().values()), None))

    def _circumstances(self, lost: int, text: str | None = None) -> str:
        """The last call of a lost instance, and what this one is doing."""
        text = text or next(iter(self._activities.copy().values()), None)
        was = f"was in {text}" if text else "was running code of its own"
        before = f"; the last call of both was {self._agreed}" if self._agreed else ""
        return f"{before}; {self._who(self.instance)} {was}"

    @contextmanager
    def channel(self, tag: int) -> Iterator[None]:
        """Reserve a channel for this thread.

        The threads of pmap's replicas call collectives at the same time. Threads that belong
        together on different instances use one tag.
        """
        with self._lock:
            if tag in self._busy:
                raise GpusimError(
                    "two threads of one instance exchange with the other instances on one channel; "
                    "call collectives over the world's axis from one thread, or from pmap's"
                )
            self._busy.add(tag)
        try:
            yield
        except BaseException:
            # The others' messages for this call would be taken for those of another.
            self._over |= tag in self._begun
            raise
        finally:
            with self._lock:
                self._busy.discard(tag)
                self._begun.discard(tag)

    def exchange(
        self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int, *, results: bool
    ) -> Pending:
        """Begin to send and receive values, or results, on a channel."""
        assert self.engine is not None
        self._begun.add(tag)
        return self.engine.exchange(sends, receives, FLOWS * tag + (_RESULTS if results else 0))


class _InnerCallCheck:
    """Finds an instance that calls from inside an inner map, while this one is outside.

    This instance waits on the main channel, so its inner maps have ended. A call that another one
    makes in an inner map before it gets here has no counterpart.
    """

    def __init__(self, world: World, engine: Processes, pending: Pending) -> None:
        self._world, self._engine, self._pending = world, engine, pending
        self._next = time.monotonic() + _INNER_CALL_POLL

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INNER_CALL_POLL
        for instance in self._pending.awaited():
            message = self._engine.receive_unexpected(instance, lambda tag: tag % FLOWS == _CALLS)
            # If it has arrived here meanwhile, the message belongs to its next call.
            if message is not None and instance in self._pending.awaited():
                raise self._world._error_of_inner_call(instance, _Call.read(message))


class _Call(NamedTuple):
    """The message with which an instance announces its call."""

    kind: int
    digest: bytes
    text: str

    @classmethod
    def read(cls, record: np.ndarray) -> _Call:
        raw = record.tobytes()
        digest, kind, length = _HEADER.unpack_from(raw)
        return cls(kind, digest, raw[_HEADER.size : _HEADER.size + length].decode(errors="replace"))


def _record(kind: int, digest: bytes, text: str) -> np.ndarray:
    content = text.encode()[: _HEADER_BYTES - _HEADER.size]
    record = np.zeros(_HEADER_BYTES, np.uint8)
    raw = _HEADER.pack(digest, kind, len(content)) + content
    record[: len(raw)] = np.frombuffer(raw, np.uint8)
    return record


def _difference(name: str, local: str, remote: str) -> str:
    """Both texts, from a little before the first character that differs.

    >>> _difference("perm", "[0, 1]", "[1, 0]")
    'perm: [0, 1] against [1, 0]'
    """
    same = next((k for k, (a, b) in enumerate(zip(local, remote, strict=False)) if a != b), 0)
    longest = max(len(local), len(remote))
    first = max(0, same - _MAX_DIFFERENCE // 4) if longest > _MAX_DIFFERENCE else 0

    def cut(text: str) -> str:
        part = text[first : first + _MAX_DIFFERENCE]
        return "..." * (first > 0) + part + "..." * (len(text) > first + _MAX_DIFFERENCE)

    return f"{name}: {cut(local)} against {cut(remote)}"


def _exchange_counts(engine: Engine, local_replicas: int) -> tuple[int, ...]:
    """The number of replicas of each instance."""
    counts = np.zeros((engine.instances, 1), np.int64)
    counts[engine.instance] = local_replicas
    others = [i for i in range(engine.instances) if i != engine.instance]
    local = counts[engine.instance].copy()
    engine.exchange([(local, i) for i in others], [(counts[i], i) for i in others], MAIN_TAG).wait()
    return tuple(counts[:, 0].tolist())
