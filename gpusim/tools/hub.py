"""The hub of a command: a process in which ranks meet that a script starts by itself.

`gpusim run` and `gpusim torchrun` fork it before the script begins. It listens at a socket that
the environment names, with a token, so that every process of the script finds it. A process whose
`init_process_group` comes connects, and says which rank of which world it is. When a world is
complete, the hub forks a process that makes the calls of its ranks: `torch.distributed.worlds`.

The hub has one thread, and imports torch when the first rank comes. It is in a session of its own,
as Ctrl-C ends the ranks first, and lives until the command and all ranks have ended.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpusim.startup import gpusim_ranks
from gpusim.tools.arrivals import could_come
from gpusim.tools.members import Forming, Member, World
from gpusim.tools.options import note
from gpusim.tools.outputs import RankOutputs
from gpusim.tools.records import numbered, record_of, show_summary
from gpusim.words import count

__all__ = ["hub"]

STARTUP = str(Path(gpusim_ranks.__file__).parent)
PACKAGES = str(Path(__file__).parents[2])
TOKEN = 32
"""Bytes of the secret."""

HELLO_LIMIT = 65536
"""Bytes of a first message."""

CREDENTIALS = struct.Struct("3i")
"""The kernel's answer about a socket's other end: its process, user and group."""

LOOK = 250.0
"""Milliseconds between two looks at the script's processes, while ranks wait for others."""


@dataclass
class Command:
    """The end of the command that has started a hub.

    **Attributes**: `interrupted` is set after Ctrl-C or SIGTERM.
    """

    control: socket.socket
    interrupted: bool = False

    def finish(self) -> None:
        """Wait until what has ended is shown; after an interrupt, end ranks that still run."""
        with suppress(OSError):
            self.control.sendall(b"e" if self.interrupted else b"d")
            self.control.recv(1)
        self.control.close()


@contextmanager
def hub(
    options: argparse.Namespace,
    devices: int,
    first: int = 1,
    hooks_torch: bool = False,
    starts_none: bool = False,
) -> Iterator[Command | None]:
    """A block in which processes that a script starts become ranks.

    **Arguments**:

    - `options`: `reduction`, `summary`, `record`, `arrays`, `limit`, `trace`, `check`, `verbose`
      and `quiet` of the `command`.
    - `devices`: how many GPUs the CPU plays in each process; 0 for none.
    - `first`: the number of the script's first world; those from the second on have records of
      their own.
    - `hooks_torch`: imports torch and hooks it in the block, for ranks that are forked from here.
      Else the program of this process imports it, and is hooked as those that it starts.
    - `starts_none`: no process that may become a rank comes from this one, only from its children.
    """
    if sys.platform != "linux":
        yield None
        return
    if hooks_torch:
        import torch  # before the fork: the hub has it then
    name, token = f"gpusim-{secrets.token_hex(8)}", secrets.token_hex(TOKEN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")  # in no folder, so that nothing is left behind
    server.listen(256)
    about = {
        "name": name,
        "token": token,
        "interpreter": [sys.prefix, *sys.version_info[:2]],
        "client": "gpusim.torch.distributed.runners.client",
        "path": PACKAGES,
        "devices": devices,
        "reduction": options.reduction,
    }
    own, far = socket.socketpair()
    root = Root(os.getpid(), starts_none)
    _fork(lambda: Hub(server, far, token, options, first, root).run(), own)
    server.close()
    far.close()
    command = Command(own)
    with ExitStack() as stack:
        paths = os.environ.get("PYTHONPATH")
        _set(stack, "PYTHONPATH", STARTUP + (os.pathsep + paths if paths else ""))
        _set(stack, gpusim_ranks.VARIABLE, json.dumps(about))
        if hooks_torch:
            gpusim_ranks.hook(torch, stack, plays=False)
        else:
            gpusim_ranks.install(stack)
        try:
            yield command
        except KeyboardInterrupt:
            command.interrupted = True
            raise
        finally:
            command.finish()


def _set(stack: ExitStack, name: str, value: str) -> None:
    before = os.environ.get(name)
    if before is None:
        stack.callback(os.environ.pop, name, None)
    else:
        stack.callback(os.environ.__setitem__, name, before)
    os.environ[name] = value


def _fork(run: Callable[[], object], *closed: socket.socket) -> None:
    """Run a function in a process that is no child of this one, and gets no signals of its."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        return
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for each in closed:
            each.close()
        run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


class Root(NamedTuple):
    """The script's first process, or the command's if `starts_none`."""

    process: int
    starts_none: bool


class Hub:
    """The hub's process: who is connected, which worlds form, and which there are."""

    def __init__(
        self,
        server: socket.socket,
        control: socket.socket,
        token: str,
        options: argparse.Namespace,
        first: int,
        root: Root,
    ) -> None:
        self.server, self.control = server, control
        self.token, self.options, self.number, self.root = token, options, first, root
        self.poll = select.poll()
        #: What to do when a file is ready, by its number.
        self.ready: dict[int, Callable[[], None]] = {}
        self.forming: dict[str, Forming] = {}
        self.worlds: list[World] = []
        #: Processes that wait in a join, by the socket that they hold meanwhile: for whom they do.
        self.joining: dict[socket.socket, tuple[int, list[int]]] = {}
        #: Whether the command waits for what has ended to be shown.
        self.finishing = False
        self.open = True

    def run(self) -> None:
        self.watch(self.server, self.accept)
        self.watch(self.control, self.hear)
        while self.open or self.worlds or self.forming:
            limits = [member.limit for each in self.forming.values() for member in each.members]
            rest = min(limits, default=None)
            wait = None if rest is None else max(0.0, rest - time.monotonic()) * 1000 + 1
            if self.forming and (self.joining or self.root.starts_none):
                wait = LOOK if wait is None else min(wait, LOOK)
            if self.finishing:
                wait = 20.0
            for number, _ in self.poll.poll(wait):
                act = self.ready.get(number)
                if act is not None:
                    act()
            self.expire()
            self.reap()

    def members(self) -> list[Member]:
        """All processes that are, or are to be, ranks."""
        forming = [member for each in self.forming.values() for member in each.members]
        return forming + [member for world in self.worlds for member in world.members]

    def watch(self, end: Any, act: Callable[[], None], events: int | None = None) -> None:
        self.ready[end.fileno()] = act
        self.poll.register(end, select.POLLIN if events is None else events)

    def forget(self, end: socket.socket) -> None:
        if self.ready.pop(end.fileno(), None) is not None:
            self.poll.unregister(end)

    # The command

    def hear(self) -> None:
        """The command ends: it says how, or is gone."""
        try:
            word = self.control.recv(1)
        except OSError:
            word = b""
        self.forget(self.control)
        self.finishing, self.open = True, False
        if word != b"d":  # it was interrupted or killed: so are the ranks
            for member in self.members():
                with suppress(OSError):
                    os.kill(member.process, signal.SIGTERM)
        if not word:
            self.finishing = False

    def reap(self) -> None:
        """Note which worlds have ended, and tell the command when none of them is about to."""
        for world in self.worlds[:]:
            process, _ = os.waitpid(world.process, os.WNOHANG)
            if process:
                self.worlds.remove(world)
                self.forget(world.end)
                world.close()
        if self.finishing and not any(world.is_left() for world in self.worlds):
            self.finishing = False
            with suppress(OSError):
                self.control.sendall(b"x")
            self.control.close()
            if not self.worlds:
                self.forget(self.server)
                self.server.close()

    # Processes that want to be ranks

    def accept(self) -> None:
        end, _ = self.server.accept()
        process, user, _ = CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        if user != os.getuid():
            end.close()
            return
        end.setblocking(False)
        received = bytearray()
        self.watch(end, lambda: self.read(end, process, received))

    def read(self, end: socket.socket, process: int, received: bytearray) -> None:
        """Read a part of the first message, a line of JSON."""
        try:
            part = end.recv(HELLO_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        received += part
        if part and not received.endswith(b"\n") and len(received) < HELLO_LIMIT:
            return
        self.forget(end)
        try:
            about = json.loads(received)
            if not hmac.compare_digest(str(about["token"]).encode(), self.token.encode()):
                raise ValueError("a stranger")
            if "joins" in about:
                self.joining[end] = process, [int(each) for each in about["joins"]]
                self.watch(end, lambda: self.end_join(end))
                return
            member = Member(end, process, about)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            end.close()
            return
        end.setblocking(True)
        self.admit(member)

    def admit(self, member: Member) -> None:
        """Let a process wait for the others of its world, or begin the world."""
        import gpusim.torch.distributed.runners.worlds  # noqa: F401  # which worlds inherit

        forming = self.forming.setdefault(member.key, Forming(member.key, member.size))
        wrong = forming.refusal(member) or self._in_use(member)
        if wrong:
            if not forming.members:
                del self.forming[member.key]
            member.refuse("RuntimeError", wrong)
            return
        forming.add(member)
        if forming.is_complete():
            del self.forming[member.key]
            for each in forming.members:
                self.forget(each.end)
            self.begin(forming)
        else:
            self.watch(member.end, lambda: self.lose(forming, member))

    def _in_use(self, member: Member) -> str:
        """An error for a rank 0 if that of another world still has the port, as torch has it.

        The others wait: a world's rank 0 may be the last to destroy it before all meet again.
        """
        for world in self.worlds if member.rank == 0 else ():
            if member.key == world.key and world.size > 1 and not world.first.is_gone():
                return (
                    f"init_process_group: {member.key} is in use (EADDRINUSE) by a world of "
                    f"{count(world.size, 'rank')}, whose rank 0 (process "
                    f"{world.first.process}) has not "
                    "destroyed its group"
                )
        return ""

    def lose(self, forming: Forming, member: Member) -> None:
        """A process has ended, or has given up, before its world was complete."""
        self.forget(member.end)
        member.end.close()
        forming.members.remove(member)
        if not forming.members:
            self.forming.pop(forming.key, None)

    def end_join(self, end: socket.socket) -> None:
        """A process has come back from its join."""
        self.forget(end)
        del self.joining[end]
        end.close()

    def expire(self) -> None:
        """Tell who is missing, to those who have waited as long as they wanted, or wait in vain."""
        waiting = [each.process for forming in self.forming.values() for each in forming.members]
        idle = [self.root.process] if self.root.starts_none else []
        if waiting and not could_come(
            self.root.process, waiting, dict(self.joining.values()), idle
        ):
            for forming in list(self.forming.values()):
                for member in list(forming.members):
                    member.refuse("DistStoreError", forming.in_vain(), close=False)
                while forming.members:
                    self.lose(forming, forming.members[0])
        for forming in list(self.forming.values()):
            for member in list(forming.members):
                if member.limit <= time.monotonic():
                    member.refuse("DistStoreError", forming.timed_out(member), close=False)
                    self.lose(forming, member)

    def begin(self, forming: Forming) -> None:
        """Fork the process of a world."""
        number, self.number = self.number, self.number + 1
        note(
            self.options,
            f"world {number}: {forming.size} rank{'s' * (forming.size > 1)}, processes that the "
            f"program has started; sums: {self.options.reduction or 'linear'}",
        )
        if self.options.command == "run" and self.options.check:
            print(
                f"gpusim run: check: the {count(forming.size, 'rank')} of world {number} are "
                "not checked; "
                "gpusim torchrun --check checks ranks, and starts them itself",
                file=sys.stderr,
                flush=True,
            )
        own, far = socket.socketpair()
        process = os.fork()
        if not process:
            own.close()
            self._serve(forming, number)
        far.close()
        world = World(forming.key, forming.members, process, own)
        self.worlds.append(world)
        self.watch(own, lambda: None, select.POLLIN)

    def _serve(self, forming: Forming, number: int) -> None:
        """Be a world's process."""
        from gpusim.torch.distributed.runners import worlds

        try:
            for end in [self.server, self.control]:
                end.close()
            for end in [*(member.end for member in self.members()), *self.joining]:
                end.close()
            ranks = [worlds.Member(each.end, each.process) for each in forming.in_order()]
            options = argparse.Namespace(**vars(self.options))
            options.record = numbered(options.record, number)
            options.trace = numbered(options.trace, number)
            with record_of(options, forming.size, RankOutputs(None, None)) as recorder:
                dismiss = worlds.serve(ranks, options.reduction, recorder)
            if options.summary and recorder is not None:
                show_summary(recorder, forming.size)
            dismiss()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
