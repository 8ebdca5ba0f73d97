"""A process that a script has started by itself, as a rank from its init_process_group on.

It connects to the hub of the command, which is in its environment, and is the rank until it
destroys its group or ends. Its calls go to the process of its world, `worlds`.
"""

from __future__ import annotations

import atexit
import inspect
import json
import multiprocessing
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import util
from typing import Any

import torch
from torch import distributed as dist

from ....errors import GpusimError
from ....maps.call_site import call_site
from ....platforms import after_fork
from ....startup import gpusim_ranks
from ..accelerator import cpu_as_accelerator, simulated_gpus
from ..calls.folds import as_chooser
from ..own.environment import process_environments
from ..own.threads import enter, rank_of_thread, record_of_starter, threads_of_ranks
from ..private import c10d
from ..private_groups import RanksWorld, leave_groups, ranks_as_threads, stores_are_met
from .child import ProcessExchange, ProcessRank, ProcessStore
from .messages import Channel, Message, Received
from .threads import Launch, Rank

__all__ = ["destroy_process_group", "init_process_group", "play_devices"]

OURS = ("cuda", "gloo", "gpusim", "mccl", "nccl", "ucc", "undefined", "xccl")
"""Backends that gpusim takes the place of. Others, such as fake, mpi and a script's own, stay."""


class MemberChannel(Channel):
    """The way to the world's process. It has no answer for a call that was interrupted."""

    def __init__(self, end: socket.socket, rank: int) -> None:
        super().__init__(end)
        self.rank, self.asked, self.process = rank, False, os.getpid()

    def send(
        self,
        message: Message | bytes,
        file: int | None = None,
        payload: Sequence[memoryview] = (),
    ) -> None:
        if isinstance(message, bytes) or message.get("do", "left") != "left":
            if os.getpid() != self.process:
                raise GpusimError(
                    f"a process that rank {self.rank} has forked calls torch.distributed on the "
                    "rank's group; the rank calls it itself"
                )
            if self.asked:
                raise GpusimError(
                    f"rank {self.rank} was interrupted in the midst of a call of torch.distributed "
                    "and can make no others"
                )
            self.asked = True
        try:
            super().send(message, file, payload)
        except OSError:
            raise self.gone() from None

    def receive(self, check: Callable[[], object] | None = None) -> Received | None:
        received = super().receive(check)
        if received is None:
            raise self.gone()
        if "choose" not in received.message:
            self.asked = False
        return received

    def gone(self) -> GpusimError:
        return GpusimError(
            f"rank {self.rank}: the process that makes the calls of its world is gone, as the "
            "command gpusim was ended"
        )


class MemberLaunch(Launch):
    """The world as one of its ranks knows it."""

    interrupted: Any

    def __init__(self, size: int, reduction: str | None, devices: int) -> None:
        self.size, self.schedule, self.in_turns = size, "free", False
        self.device = "cpu" if devices else None
        self.chooser = as_chooser(reduction, "--reduction")
        self.recorder = self.draws = None  # the process draws by itself
        self.run, self.around = (lambda rank: None), (lambda index: nullcontext())
        self.process = {}
        self.pid = 0  # of no process in which ranks wait for a turn
        self.interrupted = bytearray(1)  # read by ProcessRank; signals are the program's here


class MemberRank(ProcessRank):
    """The rank that this process is, from init_process_group on."""

    channel: MemberChannel

    def begin(self, stack: ExitStack) -> None:
        """Give the calling thread a torch.distributed of the rank's."""
        launch = self.launch
        self.stack = stack
        launch.world = stack.enter_context(
            ranks_as_threads(launch._rendezvous, launch._admit, record_of_starter)
        )
        stack.enter_context(threads_of_ranks())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        enter(self)
        stack.callback(enter, None)
        self.record = launch.world.enter()
        stack.callback(launch.world.leave)

    def leave(self, error: BaseException | None = None) -> None:
        """Be a rank no longer, and have what is recorded of it written."""
        global _member
        _member = None
        if os.getpid() != self.channel.process:
            return
        waits = not self.channel.asked
        try:
            self.channel.send({"do": "left", "error": _in_words(error)})
            while waits and "bye" not in self._received():
                pass
        except (GpusimError, OSError):
            pass
        finally:
            self.channel.close()

    def _received(self) -> Message:
        received = self.channel.receive()
        assert received is not None
        return received.message

    def withdraw(self) -> None:
        """Give torch's functions back."""
        self.unfinished.clear()
        self.record = None
        leave_groups()
        hook = sys.excepthook  # with the rank's tag, which stays after the group
        self.stack.close()
        sys.excepthook = hook


_member: MemberRank | None = None
_finalized_in = 0  # the process that leaves when it ends


def _in_words(error: BaseException | None) -> str | None:
    """How a program has failed; None if it has ended well."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        if error.__context__ is None:
            return f"has ended with exit code {error.code}"
        error = error.__context__  # as torch.multiprocessing's processes end
    if error is None:
        return None
    text = f": {error}" if str(error) else ""
    return f"raised {type(error).__name__}{text}"


def _at_end() -> None:
    """Leave, as the process ends, with the error that ends it."""
    if _member is not None:
        _member.leave(sys.exc_info()[1] or getattr(sys, "last_value", None))


def _close_in_child() -> None:
    """Let the rank's end be seen, also if a process that it has forked lives on."""
    if _member is not None:
        _member.channel.close()


after_fork(_close_in_child)

# What scripts call


def init_process_group(genuine: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """torch's init_process_group, after which this process is a rank of a world of the hub's."""
    global _member, _finalized_in
    try:
        bound = inspect.signature(genuine).bind(*args, **named)
    except TypeError:
        return genuine(*args, **named)  # which raises it too
    how = bound.arguments
    if not _is_ours(how.get("backend")) or _is_rank_of_launch():
        return genuine(*args, **named)
    both = how.get("store") is not None and how.get("init_method") is not None
    if both or dist.is_initialized() or not isinstance(how.get("timeout"), timedelta | None):
        return genuine(*args, **named)  # which are errors
    about = gpusim_ranks.settings()
    assert about is not None
    _leave_launch()
    with _meeting(how) as (store, rank, size, key):
        channel = _connect(about, how, rank, size, key)
    member = _make(about, channel, rank, size)
    try:
        with ExitStack() as stack:
            member.begin(stack)
            if store is None:
                store = dist.PrefixStore("default_pg", ProcessStore(member.launch, member))
            more = {**how, "init_method": None, "store": store, "rank": rank, "world_size": size}
            genuine(**more)
            member.stack = stack.pop_all()
    except BaseException as error:
        member.leave(error)
        raise
    _member = member
    if _finalized_in != os.getpid():
        _finalized_in = os.getpid()
        util.Finalize(None, _at_end, exitpriority=-100)


def destroy_process_group(genuine: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """torch's destroy_process_group, after which this process is a rank no longer."""
    result = genuine(*args, **named)
    member = _member
    if member is not None and not dist.is_initialized():
        member.leave()
        member.withdraw()
    return result


def play_devices(count: int, stack: ExitStack | None) -> None:
    """Let the CPU play the GPUs in this process, until the stack, or the process, ends."""
    if stack is None:
        stack = ExitStack()
        atexit.register(stack.close)
    stack.enter_context(cpu_as_accelerator())
    stack.enter_context(simulated_gpus(count, lambda index: secrets.randbits(63)))  # as torch does


# How a process becomes a rank


def _is_ours(backend: Any) -> bool:
    if backend is None:
        return True
    if not isinstance(backend, str):
        return False
    names = [each.rpartition(":")[2].lower() for each in backend.split(",")]
    return all(name in OURS for name in names)


def _is_rank_of_launch() -> bool:
    """Whether the calling thread is a rank already, of a launch in this process."""
    rank = rank_of_thread()
    return rank is not None and rank.home == os.getpid()


def _leave_launch() -> None:
    """In a process that a rank of a launch has forked: be no part of that launch."""
    if rank_of_thread() is None:
        return
    both = process_environments()
    own = dict(both[0]._data)
    for environment in both:
        environment._data = own
    enter(None)
    while isinstance(c10d._world, RanksWorld):
        c10d._world.leave()
        c10d._world = c10d._world.original


@contextmanager
def _meeting(how: dict[str, Any]) -> Iterator[tuple[dist.Store | None, int, int, str]]:
    """The store that the program has given, its rank and world size, and where the ranks meet."""
    store, rank, size = how.get("store"), how.get("rank", -1), how.get("world_size", -1)
    timeout = how.get("timeout") or c10d.default_pg_timeout
    if store is None:
        with stores_are_met() as keys:
            url = how.get("init_method") or "env://"
            store, rank, size = next(iter(c10d.rendezvous(url, rank, size, timeout=timeout)))
        if keys:
            yield None, rank, size, keys[-1]
            return
        store = dist.PrefixStore("default_pg", store)
    elif size <= 0 or rank < 0:
        word = "world_size must be positive" if size <= 0 else "rank must be non-negative"
        raise AssertionError(f"{word} if using store")  # as torch says it
    yield store, rank, size, _meet_by(store, rank)


def _meet_by(store: dist.Store, rank: int) -> str:
    """A name for the world that all its ranks get from a store of the script's."""
    number = store.add(f"gpusim/rank {rank}", 1)  # of worlds that the rank has made by it
    if rank == 0:
        store.set(f"gpusim/world {number}", secrets.token_hex(8))
    name = bytes(store.get(f"gpusim/world {number}"))
    return f"a store of the script's ({name.decode()})"


def _connect(
    about: dict[str, Any], how: dict[str, Any], rank: int, size: int, key: str
) -> MemberChannel:
    """Say to the hub which rank this is, and wait until the world is complete."""
    timeout: timedelta = how.get("timeout") or c10d.default_pg_timeout
    hello = {
        "token": about["token"],
        "key": key,
        "rank": rank,
        "size": size,
        "name": multiprocessing.current_process().name,
        "site": call_site("gpusim"),
        "timeout": timeout.total_seconds(),
    }
    end = socket.socket(socket.AF_UNIX)
    channel = MemberChannel(end, rank)
    try:
        try:
            end.connect(f"\0{about['name']}")
            end.sendall(json.dumps(hello).encode() + b"\n")
        except OSError:
            raise channel.gone() from None
        received = channel.receive()
        assert received is not None
        if "error" in received.message:
            kinds = {"DistStoreError": dist.DistStoreError, "RuntimeError": RuntimeError}
            raise kinds[received.message["error"]](received.message["text"])
    except BaseException:
        channel.close()
        raise
    return channel


def _make(about: dict[str, Any], channel: MemberChannel, rank: int, size: int) -> MemberRank:
    launch: Any = MemberLaunch(size, about["reduction"], about["devices"])
    member = object.__new__(MemberRank)
    member.join(launch, Rank(launch, rank, {}), channel)
    member.streams = []  # the process writes its output itself
    launch.ranks = {rank: member}
    launch.store, launch.exchange = ProcessStore(launch, member), ProcessExchange(member)
    return member
