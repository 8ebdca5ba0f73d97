"""Vector clocks of the streams of a GPU: what each has waited for, and the host."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Clock", "Clocks", "Line"]

Clock = Mapping[int, int]
"""By the keys of lines: up to which of a line's times all its work is done."""


class Line:
    """A line of work on the GPU, of which one piece runs after the other: a stream.

    `time` is that of the work that is enqueued now. It steps on whenever something comes to wait
    for the line: work of one time has been waited for by the same others.
    """

    __slots__ = ("clock", "host", "is_nccl", "key", "name", "time")

    def __init__(self, key: int, name: str, is_nccl: bool = False) -> None:
        self.key, self.name, self.is_nccl = key, name, is_nccl
        self.time = 1
        self.clock: dict[int, int] = {}
        # The host's clock that `clock` contains, by identity.
        self.host: Clock = {}


# Owner: the rank. Its own thread does all but wait on the host, which threads that the rank has
# started do too: `host` is replaced, and never written to.
class Clocks:
    """The lines of a rank, and what its host has waited for.

    Work that the host enqueues runs after all that the host has waited for before.
    """

    def __init__(self) -> None:
        self.host: Clock = {}
        self.lines: list[Line] = []

    def new(self, name: str, is_nccl: bool = False) -> Line:
        """A line that has no work yet."""
        line = Line(len(self.lines), name, is_nccl)
        self.lines.append(line)
        return line

    def clock(self, line: Line) -> Clock:
        """The work of other lines that comes before what is enqueued now on a line."""
        host = self.host
        if line.host is not host:
            line.host = host
            _join(line.clock, host)
        return line.clock

    def point(self, line: Line) -> Clock:
        """The point behind the work of a line: all that has run when that has."""
        point = {**self.clock(line), line.key: line.time}
        line.time += 1
        return point

    def everything(self) -> Clock:
        """The point behind all work of all lines."""
        point = {}
        for line in tuple(self.lines):
            point[line.key] = line.time
            line.time += 1
        return point

    def wait(self, line: Line, point: Clock) -> None:
        """Let a line wait for a point."""
        _join(line.clock, point)

    def host_waits(self, point: Clock) -> None:
        """Let the host wait for a point."""
        own = self.host
        if any(own.get(key, 0) < time for key, time in point.items()):
            joined = dict(own)
            _join(joined, point)
            self.host = joined


def _join(clock: dict[int, int], point: Clock) -> None:
    for key, time in point.items():
        if clock.get(key, 0) < time:
            clock[key] = time
