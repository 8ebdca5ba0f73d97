"""World: the instances (processes) that share one program's replicas, in contiguous blocks.
Inside `with world:` the outermost mapped axis spans all of them."""

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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CollectiveMismatchError, GpusimError, InstanceError
from . import activity, environment
from .engines import Buffer, Engine, Pending, Processes, while_waiting

__all__ = ["World", "current_world"]

# What instances tell each other before they exchange anything: is it the same call?
_HEADER = struct.Struct("=16sBH")  # digest, kind, length of the text
_HEADER_BYTES = 1024
_CALL, _LEAVE = range(2)
_LISTEN_EVERY = 0.2  # seconds
_SHOWN = 120  # characters of what differs

Terms = Mapping[str, str]

#: What flows on a channel: values on their way to a fold, results, and what is called.
FLOWS = 3
_RESULTS, _CALLS = 1, 2
CHANNELS = (1 << 20) - 1  # times FLOWS, and a few for others: MPICH has 2**22 tags
#: The channel of what is said outside threads, collectives of lockstep maps included.
MAIN_TAG = 0
#: That of leaving, where calls are not compared: nothing else may be taken for it.
_LEAVING = CHANNELS

_world: ContextVar[World | None] = ContextVar("gpusim world", default=None)


def current_world() -> World | None:
    """The world of the `with` block around the running code, or None."""
    return _world.get()


class World:
    """R replicas on I instances, each of which holds a contiguous block of them.

    Used as a context manager, by all instances alike: inside, the outermost mapped axis of vmap,
    pmap and shard_map spans all instances. Each passes the values of its own replicas and receives
    theirs; collectives give the bits that one process with all replicas would compute.

    Attributes:
        replicas: how many replicas there are in all.
        local_replicas: how many this instance holds.
        replica_offset: the number of the first of them.
        instances, instance: how many instances there are, and which this is.
        counts: how many replicas each instance holds.

    Raises (on leaving, and by collectives inside):
        CollectiveMismatchError: instances made different calls; names them and both calls.
        InstanceError: another instance has failed, left, or is gone; names it.
        GpusimError: an error has ended this world before.

    An error that leaves the block ends the world for good, and all instances with it unless the
    program catches the error: then it may go on alone.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> with gpusim.World.from_environment(replicas=4, environ={}) as world:
        ...     mine = np.arange(world.replica_offset, world.replica_offset + world.local_replicas)
        ...     total = gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i", out_axes=None)(mine)
        >>> world, int(total)
        (World(replicas=4, instances=1), 6)
    """

    def __init__(
        self, counts: Sequence[int], engine: Engine | None = None, *, check: bool = True
    ) -> None:
        """Usually `from_environment` makes worlds.

        Args:
            counts: how many replicas each instance holds, at least 1.
            engine: what reaches the other instances; None for a single one.
            check: compare what is called, before each exchange, between all instances. It costs
                a message of one KiB to each.
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
        self.check = check
        self._token: Token[World | None] | None = None
        self._over = False
        self._busy: set[int] = set()  # channels in use
        self._begun: set[int] = set()  # those on which something has been sent, or asked for
        self._lock = threading.Lock()
        self._doing: dict[int, str] = {}  # by thread
        self._agreed = ""  # the last call that all have made
        # Found out once: asking whether an object follows a protocol takes longer than a message.
        self._processes = engine if isinstance(engine, Processes) else None
        if self._processes is not None:
            names = [self._who(instance) for instance in range(self.instances)]
            self._processes.name_instances(names, self._circumstances)

    @classmethod
    def from_environment(
        cls,
        replicas: int | None = None,
        *,
        check: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> World:
        """The world that poprun, mpirun, srun or torchrun has started; one instance without them.

        Args:
            replicas: the number of replicas of all instances, spread evenly, the first instances
                holding one more. None is one each. PopDist's variables (poprun sets them) say how
                many each instance holds; `replicas` must then be None or agree.
            check: see `World`.
            environ: the environment, for tests; None is this process's.

        Raises:
            ValueError: for an environment that is half set, naming the variables, and for replicas
                that do not fit.
            ImportError: for several instances without mpi4py.
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

        engine = mpi.connect()
        if (engine.instances, engine.instance) != (launch.instances, launch.instance):
            raise ValueError(
                f"{launch.launcher} has started instance {launch.instance} of {launch.instances}, "
                f"but MPI counts it as {engine.instance} of {engine.instances}: mpi4py belongs to "
                "another MPI library than the launcher"
            )
        if total is None:
            wanted = launch.instances if replicas is None else replicas
            return cls(environment.spread(wanted, launch.instances), engine, check=check)
        assert launch.local_replicas is not None
        counts = _counts(engine, launch.local_replicas)
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
            raise GpusimError("a World inside a World: the instances are shared out already")
        self._check_going_on()
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
            with self.doing("leaving the world"):
                self._say(_LEAVE, "leaves", {}, MAIN_TAG if self.check else _LEAVING)
        elif error is not None and failed:
            self._over = True
            if self._processes is not None:
                self._processes.fail(error)

    def _has_ended(self) -> bool:
        """Whether an error has put the instances out of step."""
        broken = self._processes is not None and self._processes.broken
        return self._over or broken

    def _check_going_on(self) -> None:
        if self._has_ended():
            raise GpusimError("this World has ended with an error; start the program again")

    # What the collectives use

    @contextmanager
    def call(
        self, text: str, terms: Terms, tag: int = MAIN_TAG, *, within: int | None = None
    ) -> Iterator[None]:
        """A call that all instances make; the block runs when they have agreed on it.

        Args:
            text: the call, for people.
            terms: all that must be the same on all instances, by name.
            tag: of the channel on which this instance's counterparts call.
            within: the channel on which they agree, if it is another one.

        Raises:
            CollectiveMismatchError, InstanceError, GpusimError: see `World`.
        """
        self._check_going_on()
        agreeing = tag if within is None else within
        with self.doing(text):
            if self.check:
                with self.channel(agreeing):
                    self._say(_CALL, text, {**terms, "channel": str(tag)}, agreeing)
                self._agreed = text
            yield

    def agree(self, text: str, terms: Terms) -> None:
        """Return when all instances make the same call; see `call`."""
        with self.call(text, terms):
            pass

    def _say(self, kind: int, text: str, terms: Terms, tag: int) -> None:
        said = repr(sorted(terms.items())).encode()
        own = _record(kind, hashlib.blake2b(said, digest_size=16).digest(), text)
        records = np.zeros((self.instances, _HEADER_BYTES), np.uint8)
        records[self.instance] = own
        self._exchange_all(records, tag)
        if (records[:, : _HEADER.size - 2] == own[: _HEADER.size - 2]).all():
            return
        self._over = True
        everybody = [_Said.read(record) for record in records]
        if any(said.kind == _LEAVE for said in everybody):
            raise self._departure(everybody)
        raise self._mismatch(everybody, terms, tag)

    def _exchange_all(self, rows: NDArray[Any], tag: int) -> None:
        """Fill in the rows of the others."""
        assert self.engine is not None
        own = rows[self.instance].copy()
        others = [i for i in range(self.instances) if i != self.instance]
        pending = self.engine.exchange(
            [(own, i) for i in others], [(rows[i], i) for i in others], FLOWS * tag + _CALLS
        )
        if tag == MAIN_TAG and self._processes is not None:
            with while_waiting(_Eavesdropper(self, self._processes, pending)):
                pending.wait()
        else:
            pending.wait()

    def _other_map(self, instance: int, there: _Said) -> GpusimError:
        self._over = True
        return CollectiveMismatchError(
            f"instances do not make the same call: {self._who(instance)} calls {there.text} in an "
            f"inner map, of which {self._who(self.instance)} has ended its own without that call; "
            f"it is in {self._doing[threading.get_ident()]}"
        )

    def _departure(self, said: Sequence[_Said]) -> GpusimError:
        here = said[self.instance]
        instance = next(i for i, there in enumerate(said) if there.kind != here.kind)
        if here.kind == _LEAVE:
            return CollectiveMismatchError(
                f"{self._who(self.instance)} leaves the world, but {self._who(instance)} calls "
                f"{said[instance].text}"
            )
        return InstanceError(instance, f"{self._who(instance)} has left the world")

    def _mismatch(self, said: Sequence[_Said], terms: Terms, tag: int) -> GpusimError:
        """The error for calls that differ. All instances make it, so they tell each other more."""
        own = json.dumps(dict(terms)).encode()
        lengths = np.zeros((self.instances, 1), np.int64)
        lengths[self.instance] = len(own)
        self._exchange_all(lengths, tag)
        bodies = np.zeros((self.instances, int(lengths.max())), np.uint8)
        bodies[self.instance, : len(own)] = np.frombuffer(own, np.uint8)
        self._exchange_all(bodies, tag)
        here = said[self.instance]
        instance = next(i for i, there in enumerate(said) if there.digest != here.digest)
        theirs = json.loads(bodies[instance, : int(lengths[instance, 0])].tobytes())
        differing = [
            _difference(name, str(terms.get(name)), str(theirs.get(name)))
            for name in sorted({*terms, *theirs})
            if terms.get(name) != theirs.get(name)
        ]
        return CollectiveMismatchError(
            f"instances do not make the same call: {self._who(self.instance)} calls {here.text}, "
            f"{self._who(instance)} calls {said[instance].text}; they differ in "
            + "; ".join(differing)
        )

    def _who(self, instance: int) -> str:
        first, count = sum(self.counts[:instance]), self.counts[instance]
        held = f"replica {first}" if count == 1 else f"replicas {first} to {first + count - 1}"
        return f"instance {instance} ({held})"

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Tell the launcher, and errors about other instances, what this one may be waiting in."""
        thread = threading.get_ident()
        self._doing[thread] = text
        activity.note(text)
        try:
            yield
        except InstanceError as error:
            raise InstanceError(
                error.instance, f"{error}{self._circumstances(error.instance, text)}"
            ) from None
        finally:
            del self._doing[thread]
            activity.note(next(iter(self._doing.copy().values()), None))

    def _circumstances(self, lost: int, text: str | None = None) -> str:
        """What an instance that is lost called last, and where this one is."""
        text = text or next(iter(self._doing.copy().values()), None)
        was = f"was in {text}" if text else "was running code of its own"
        before = f"; the last call of both was {self._agreed}" if self._agreed else ""
        return f"{before}; {self._who(self.instance)} {was}"

    @contextmanager
    def channel(self, tag: int) -> Iterator[None]:
        """Use a channel, which no other thread of this instance uses meanwhile.

        Threads of pmap replicas call collectives at the same time; those that belong together on
        different instances use one tag.
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
            # What the others send for this call would be taken for something else.
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


class _Eavesdropper:
    """Finds out that an instance calls from inside an inner map, where this one is outside.

    All inner maps are over here when all wait on the main channel: what another instance calls in
    one before it comes here has no counterpart.
    """

    def __init__(self, world: World, engine: Processes, pending: Pending) -> None:
        self._world, self._engine, self._pending = world, engine, pending
        self._next = time.monotonic() + _LISTEN_EVERY

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LISTEN_EVERY
        for instance in self._pending.awaited():
            message = self._engine.overhear(instance, lambda tag: tag % FLOWS == _CALLS)
            # Once it has come here, what it calls is what comes next.
            if message is not None and instance in self._pending.awaited():
                raise self._world._other_map(instance, _Said.read(message))


class _Said(NamedTuple):
    """What an instance says before it exchanges anything."""

    kind: int
    digest: bytes
    text: str

    @classmethod
    def read(cls, record: np.ndarray) -> _Said:
        raw = record.tobytes()
        digest, kind, length = _HEADER.unpack_from(raw)
        return cls(kind, digest, raw[_HEADER.size : _HEADER.size + length].decode(errors="replace"))


def _record(kind: int, digest: bytes, text: str) -> np.ndarray:
    said = text.encode()[: _HEADER_BYTES - _HEADER.size]
    record = np.zeros(_HEADER_BYTES, np.uint8)
    raw = _HEADER.pack(digest, kind, len(said)) + said
    record[: len(raw)] = np.frombuffer(raw, np.uint8)
    return record


def _difference(name: str, here: str, there: str) -> str:
    """What differs, from a little before the first character that does.

    >>> _difference("perm", "[0, 1]", "[1, 0]")
    'perm: [0, 1] against [1, 0]'
    """
    same = next((k for k, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
    first = max(0, same - _SHOWN // 4) if max(len(here), len(there)) > _SHOWN else 0

    def shown(text: str) -> str:
        part = text[first : first + _SHOWN]
        return "..." * (first > 0) + part + "..." * (len(text) > first + _SHOWN)

    return f"{name}: {shown(here)} against {shown(there)}"


def _counts(engine: Engine, own: int) -> tuple[int, ...]:
    """How many replicas each instance holds, as they tell each other."""
    counts = np.zeros((engine.instances, 1), np.int64)
    counts[engine.instance] = own
    others = [i for i in range(engine.instances) if i != engine.instance]
    mine = counts[engine.instance].copy()
    engine.exchange([(mine, i) for i in others], [(counts[i], i) for i in others], MAIN_TAG).wait()
    return tuple(counts[:, 0].tolist())
