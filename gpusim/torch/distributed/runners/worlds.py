"""A world of processes that a script has started by itself: the process that makes their calls.

It is a launch whose ranks' processes connect to it, instead of being forked. They run as they like,
as real processes do, and keep their signals, output and exit codes. gpusim adds up for them what
they send. So

- all ranks run at a time: none of them waits for a turn, and a rank may wait for another in a
  queue or a barrier of multiprocessing's;
- a rank leaves when it destroys its group, or ends;
- an error of the launch is raised by each rank's next call, and ends no process;
- that a rank has failed is an error when the others wait for it in vain.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ....errors import GpusimError, ReplicaError
from ....maps.ending import ReplicaEnded
from ....recording import Recorder
from ..calls.folds import as_chooser
from .messages import Channel, encode_error
from .processes import ProcessLaunch, Proxy, ProxyRank
from .threads import Rank, environment_of

__all__ = ["Member", "serve"]

NOTICE = 1.0
"""Seconds in which the parent of a process that has failed may notice it, before other ranks hear
of it: so `torch.multiprocessing.spawn` reports the rank that failed first."""

POLL = 0.01

MAKING = ("group", "describe")
"""Requests that make a group. They succeed after an error of the launch, so that a rank that comes
late to its init_process_group is told by its first call, as the others are."""


class Member(NamedTuple):
    """A process that is a rank: its end of the connection, and its number."""

    end: socket.socket
    process: int


# Its thread is in the world's process, and is the only one that answers the member. The member's
# own thread waits for the answer meanwhile, so that both together do one thing at a time.
class MemberRank(ProxyRank):
    """A rank whose process has connected."""

    # Set once, by the launch, before any thread runs.
    member: Member
    #: Why the process no longer is a rank; empty while it is one.
    # Written by the rank's thread when the member leaves; read by others under the scheduler's
    # lock, to describe a stall. An old value would only say less.
    end_in_words = ""

    def failure(self) -> GpusimError:
        return ReplicaError(self.index, f"rank {self.index} {self.end_in_words or GONE}")


GONE = "is gone: its process has ended without a word"


class WorldLaunch(ProcessLaunch):
    """A launch of a world's members."""

    rank_type = MemberRank

    def __init__(
        self,
        members: Sequence[Member],
        environments: Sequence[Mapping[str, str]],
        run: Callable[[Rank], Any],
        *how: Any,
    ) -> None:
        super().__init__(environments, run, *how)
        # All ranks run at a time: a member is a process that nothing can hold up, and it may wait
        # for another one in a queue of the script's. A turn would then be a deadlock that is never
        # seen.
        self.scheduler.slots = self.size
        # It speaks of pmap's caller, which could end the ranks.
        setattr(self.call, "announce_wait", lambda *about: None)  # noqa: B010  # mypy: a method
        #: How many ranks have left. (Under the scheduler's lock.)
        # Lock: the scheduler's, as several ranks may leave at a time.
        self.left = 0
        #: The last rank to leave, which waits until the record is written.
        # Written by one rank's thread, read by the world's main thread after all have ended: no
        # lock.
        self.last_to_leave: list[MemberRank] = []
        for rank, member in zip(self.ranks, members, strict=True):
            assert isinstance(rank, MemberRank)
            rank.member, rank.channel = member, Channel(member.end)
            self.channels.append(rank.channel)

    def execute(self) -> list[Any]:
        # Past ProcessLaunch's own, which forks: the processes are there. And no one ends them.
        return super(ProcessLaunch, self).execute()

    def _serve(self, rank: Rank) -> Any:
        assert isinstance(rank, MemberRank)
        rank.stay_inside()
        proxy = MemberProxy(self, rank)
        try:
            return proxy.serve()
        finally:
            proxy.close()

    def leave(self, rank: MemberRank) -> None:
        """Let a rank go at once, unless it is the last."""
        with self.scheduler.lock:
            self.left += 1
            # The last one waits for its "bye" until the record is written: a script that reads the
            # record after its last rank has ended finds all of it.
            is_last = self.left == self.size
        if is_last:
            self.last_to_leave.append(rank)
        else:
            self.dismiss(rank)

    def dismiss(self, rank: MemberRank) -> None:
        with suppress(OSError):
            rank.channel.send({"bye": True})
        # The end of the socket says that the rank is free, also if the message was not read.
        rank.channel.shut_down()

    def describe_stall(self) -> str:
        doing: dict[str, list[int]] = {}
        for rank, thread in zip(self.ranks, self.call.replicas, strict=True):
            assert isinstance(rank, MemberRank)
            waits = f"in {rank.waits_for}" if rank.waits_for else "elsewhere"
            ended = rank.end_in_words or GONE
            doing.setdefault(ended if thread.finished else f"waits {waits}", []).append(rank.index)
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
            f"{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''} {_plural(text, ranks)}"
            for text, ranks in sorted(doing.items(), key=lambda each: each[1])
        ]
        return self.explained(f"no rank can go on: {'; '.join(parts)}")


def _plural(text: str, ranks: Sequence[int]) -> str:
    """The text about several ranks, where `text` is about one."""
    if len(ranks) == 1:
        return text
    for one, several in (("waits ", "wait "), ("has ", "have "), ("is ", "are ")):
        if text.startswith(one):
            return several + text.removeprefix(one)
    return text


class MemberProxy(Proxy):
    """The calls of one process, until it leaves."""

    rank: MemberRank

    def serve(self) -> None:
        rank, thread, over = self.rank, self.rank.thread(), False
        self._send({"begin": True})
        # In the rank's thread, without a lock and with a slot: there are as many as ranks. It is in
        # no block of `outside`, so that none is taken away. A stall is when all ranks wait in a
        # Completion.
        while (received := rank.channel.receive()) is not None:
            message, file, payload, brief = received
            kind = "call" if brief else message["do"]
            if kind == "left":
                self._note(message["error"])
                break
            try:
                if kind not in MAKING:
                    # An error of the launch is raised by each rank's next call. It ends no process:
                    # the script's parent decides about them, as with real ranks.
                    thread.check_ended()
                if brief:
                    self._answer_planned(brief, file)
                else:
                    self._answer(kind, message, file, payload)
            except ReplicaEnded:
                # Once: the thread of an ended replica goes on here and answers with the error, as
                # long as its process asks. It must not count as running, or no stall would ever be
                # seen.
                if not over:
                    over = True
                    thread.absorb_posted()
                    self._let_others_run(1)
                rank.waits_for = ""
                error = rank.launch.call.error or GpusimError("the launch has ended")
                self._send({"raise": encode_error(error), "done": []})
            except ReplicaError:
                pass  # the process is gone
            finally:
                if file is not None:
                    os.close(file)
        else:
            self._note(GONE)
        if over:
            self._let_others_run(-1)

    def _note(self, error: str | None) -> None:
        """The process is a rank no longer, with an error in words if it has failed."""
        rank, launch = self.rank, self.launch
        assert isinstance(launch, WorldLaunch)
        # Before `leave`: who looks at a rank that has ended finds how.
        rank.end_in_words = error or "has left its group"
        # Before the wait below: the process must be able to end.
        launch.leave(rank)
        if error is not None:
            limit = time.monotonic() + NOTICE
            while os.path.exists(f"/proc/{rank.member.process}") and time.monotonic() < limit:
                time.sleep(POLL)

    def _let_others_run(self, slots: int) -> None:
        """Give the thread's slot away, or take it back before the thread ends."""
        scheduler = self.launch.scheduler
        with scheduler.lock:
            scheduler.running -= slots
            if slots > 0:
                scheduler.fill_slots()

    def _send(self, message: Any, payload: Sequence[memoryview] = ()) -> None:
        with suppress(OSError):  # the next message says that the process is gone
            self.rank.channel.send(message, None, payload)


def serve(
    members: Sequence[Member], reduction: str | None, recorder: Recorder | None
) -> Callable[[], None]:
    """Make the calls of a world, of which all ranks have come, until all have left.

    **Returns**: a function that lets the last of them go, once what is recorded has been shown.
    """
    size = len(members)
    environments = [environment_of(rank, size, size) for rank in range(size)]
    how = (as_chooser(reduction, "--reduction"), "free", recorder, None)
    launch = WorldLaunch(members, environments, lambda rank: None, *how)
    # In the main thread of the world's process, which waits until all members have left.
    with suppress(GpusimError):  # which the ranks raise
        launch.execute()

    def dismiss() -> None:
        for rank in launch.last_to_leave:
            launch.dismiss(rank)

    return dismiss
