"""Records of torch.distributed's calls, as the commands' options ask for them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpusim.recording import RecordedCall, Recorder
from gpusim.recording.traces import Trace
from gpusim.tools.outputs import RankOutputs
from gpusim.tools.tables import print_table
from gpusim.words import count

__all__ = ["numbered", "record_of", "show_summary"]

SHOWN = 20
"""Rows of the table."""


@contextmanager
def record_of(
    options: argparse.Namespace, ranks: int, outputs: RankOutputs
) -> Iterator[Recorder | None]:
    """The recorder that the options, and a terminal, ask for; None if they do not.

    The trace is written when the block ends.
    """
    shown = outputs.terminal is not None
    record: dict[str, Any] = {"path": options.record, "keep": 0}
    if options.record is not None and options.record.suffix != ".jsonl":
        record |= {"digests": True, "arrays": options.arrays, "limit": options.limit}
    if options.trace is None:
        asked = shown or options.summary or options.record is not None
        each = outputs.show_progress if shown else None
        yield Recorder(**record, each=each) if asked else None
        return
    trace = Trace(options.trace.absolute(), {"unit of ts": "a call of the rank, not a time"})
    rows = [trace.row("ranks", f"rank {rank}") for rank in range(ranks)]

    def add(call: RecordedCall) -> None:
        fields = {name: value for name, value in call._asdict().items() if value is not None}
        begin = call.sequence * 1e-6  # ts counts microseconds
        trace.add(rows[call.rank], call.operation, "collective", begin, begin + 1e-6, **fields)
        if shown:
            outputs.show_progress(call)

    try:
        yield Recorder(**record, each=add)
    finally:
        trace.close()


def show_summary(recorder: Recorder, ranks: int) -> None:
    """Print a table of all calls, those with most bytes, on one screen."""
    rows = recorder.summary()
    cells = [
        [
            shorten_site(row.site),
            f"{row.operation} {row.op}".strip(),
            row.order,
            row.dtype,
            row.description,
            str(row.group_size),
            str(row.ranks),
            f"{row.calls:,}",
            f"{row.bytes:,}",
        ]
        for row in rows[:SHOWN]
    ]
    title = (
        f"Collectives of {count(ranks, 'rank')}, with the calls and bytes of the rank "
        "that makes most"
    )
    if len(rows) > SHOWN:
        title += f" (the {SHOWN} with most bytes of {len(rows)})"
    headings = ["place", "operation", "order", "dtype", "group", "size", "ranks", "calls", "bytes"]
    print_table(title, headings, cells, left=headings[:5])


def shorten_site(site: str) -> str:
    """A call site relative to the current folder, or the end of its path."""
    folder = os.getcwd() + os.sep
    if site.startswith(folder):
        return site.removeprefix(folder)
    return os.sep.join(Path(site).parts[-2:])


def numbered(path: Path | None, number: int) -> Path | None:
    """The path for the world of this number: from the second on it has the number in its name.

    >>> str(numbered(Path("calls.jsonl"), 2))
    'calls-2.jsonl'
    """
    if path is None or number == 1:
        return path
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
