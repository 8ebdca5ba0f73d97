"""The check of one launch: it begins in each rank, and ends with the logs of all."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from gpusim.errors import GpusimError
from gpusim.maps.ending import ReplicaEnded

from . import draws, files, flights, here, log, means, order, replicas, results, streams
from .completions import turns_of
from .findings import Finding, merged, shown
from .watch import GAVE_UP, Watch

if TYPE_CHECKING:
    from ..runners.threads import Rank

__all__ = ["ENGINES", "Check", "CheckError", "as_check"]

ENGINES = ("nccl", "gloo")

PARTS = (files, flights, replicas, draws, means, results, streams)


class Check:
    """The check of a launch.

    **Arguments**: `engine` is "nccl" or "gloo", whose rules hold for all calls; "" for the rules of
    the backend that the program names, NCCL's where it names none. `is_script` says that the ranks
    run a script: what it has not read at its end is read by none. `order` is the number of another
    order of completions and turns, None for the usual one, and `keeps_values` says that orders are
    to be compared; see `completions`.

    **Attributes**: `findings` are those of the last launch, once it has ended, and `gave_up` says
    what the check itself failed to look at, which is a fault of gpusim's.

    **Raises**: ValueError for another engine.
    """

    def __init__(
        self,
        engine: str = "",
        is_script: bool = False,
        order: int | None = None,
        keeps_values: bool = False,
    ) -> None:
        if engine not in ("", *ENGINES):
            raise ValueError(f"check={engine!r}: expected True, 'nccl' or 'gloo'")
        self.engine, self.is_script, self.order = engine, is_script, order
        self.keeps_values = keeps_values
        #: By rank, what calls were posted with; see `Values`.
        self.values: dict[int, list[list[str]]] = {}
        self.findings: list[Finding] = []
        self.gave_up: list[str] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        # Of ranks that are threads: how many run, and what is installed for them. `_lock` guards
        # both; in processes each has its own copy, and the lock is free when they are forked.
        self._lock = threading.Lock()
        self._running = 0
        self._installed: ExitStack | None = None

    def __enter__(self) -> Check:
        self._folder = tempfile.TemporaryDirectory(prefix="gpusim-check-")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        folder, self._folder = self._folder, None
        assert folder is not None
        with folder:
            logs = log.read(Path(folder.name))
        self.values = {each.rank: each.rows.get("values", []) for each in logs}
        self.gave_up = [
            f"rank {own.rank}: {text}" for own in logs for text in own.rows.get(GAVE_UP, [])
        ]
        self.findings = self._analysed(logs, "" if error is None else str(error))

    def pick_turns(self) -> Callable[[int], int] | None:
        """Which of so many ranks that can go on has the next turn; None for the first."""
        return None if self.order is None else turns_of(self.order)

    @contextmanager
    def of_rank(self, rank: Rank) -> Iterator[None]:
        """A block in which a rank's program runs."""
        assert self._folder is not None
        in_turns = rank.launch.in_turns
        self._enter(in_turns)
        own = ExitStack()
        if in_turns:
            replicas.follow_steps(own)
        watch = rank.watch = Watch(rank, self)
        ended = ""
        try:
            yield
        except SystemExit as error:
            ended = "" if error.code in (None, 0) else "SystemExit"
            raise
        except ReplicaEnded:
            ended = "ReplicaEnded"
            raise
        except BaseException as error:
            ended = type(error).__name__
            raise
        finally:
            own.close()
            watch.finish(ended)
            rank.watch = None
            watch.log.write(Path(self._folder.name))
            self._leave()

    def _enter(self, in_turns: bool) -> None:
        with self._lock:
            self._running += 1
            if self._installed is None:
                self._installed = ExitStack()
                for part in (order, *PARTS):
                    part.install(self._installed)
                here.install(self._installed)
                # In turns each rank has tables of hooks of its own. Those that are shared must not
                # change while another rank goes through them.
                if not in_turns:
                    replicas.follow_steps(self._installed)

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running and self._installed is not None:
                stack, self._installed = self._installed, None
                stack.close()

    def leave_out(self, kind: str) -> None:
        """Drop the findings of a kind."""
        self.findings = [each for each in self.findings if each.kind != kind]

    def raise_findings(self) -> None:
        """**Raises**: CheckError if there are findings."""
        if self.findings:
            raise CheckError(self.findings, str(self))

    def _analysed(self, logs: list[log.Log], failure: str) -> list[Finding]:
        """The findings of all ranks, and those from their logs together."""
        found = [each for own in logs for each in own.findings]
        parts = [partial(order.analyse, failure=failure), *(part.analyse for part in PARTS)]
        for analyse in parts:
            try:
                found += analyse(logs)
            except Exception as error:
                self.gave_up.append(f"{analyse}: {type(error).__name__}: {error}")
        return merged(found)

    def __str__(self) -> str:
        lines = [f"check: gave up a part: {text}" for text in dict.fromkeys(self.gave_up)]
        return "\n".join([shown(self.findings, self.engine), *lines])


class CheckError(GpusimError):
    """The ranks of a launch have ended well, and the check has findings.

    **Attributes**: `findings`, each a `Finding`.
    """

    def __init__(self, findings: list[Finding], text: str) -> None:
        super().__init__(text)
        self.findings = findings


def as_check(given: object) -> Check:
    """A check by what `launch` takes for one: True, an engine, or a Check.

    **Raises**: ValueError for another engine, TypeError for another type.
    """
    if isinstance(given, Check):
        return given
    if given is not True and not isinstance(given, str):
        raise TypeError(f"check={given!r:.60}: expected True, False, 'nccl', 'gloo' or a Check")
    return Check("" if given is True else given)
