"""The command `gc-monitor`: shows the IPUs and the processes that use them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from gpusim.devices.attributes import UNKNOWN
from gpusim.devices.command import parser_of, run
from gpusim.devices.holders import Holder, holders
from gpusim.devices.placement import gpus, place
from gpusim.devices.table import IPUS_PER_MACHINE, PARTITION, Table

__all__ = ["attached", "cards", "main"]

PROGRAM = "gc-monitor"
WIDEST_COMMAND = 48  # characters

Row = tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-monitor with the arguments `argv` (default: the process's); return its exit code."""
    parser = parser_of(PROGRAM, "Shows the simulated IPUs and the processes that use them.")
    parser.add_argument(
        "--no-card-info", action="store_true", help="leave out the table of the IPUs"
    )
    arguments = parser.parse_args(argv)
    return run(PROGRAM, lambda: show(with_cards=not arguments.no_card_info))


def show(*, with_cards: bool) -> None:
    table = Table.from_environment()
    found = holders(range(table.count))
    if with_cards:
        print("\n".join(cards(table, len(gpus()))))
    print("\n".join(attached(found, time.time())))


def cards(table: Table, gpus: int) -> Iterator[str]:
    """The table of the IPUs, with a rule between IPU-Machines."""
    title = f"{PROGRAM}: partition {PARTITION} [active] has {table.count} IPUs"
    rows = [(ipu.host, str(ipu.id), str(ipu.number), str(place(ipu, gpus))) for ipu in table.ipus]
    machines = [rows[k : k + IPUS_PER_MACHINE] for k in range(0, len(rows), IPUS_PER_MACHINE)]
    return boxed(title, ("IPU-M", "ID", "IPU#", "Backend"), machines)


def attached(found: dict[int, Holder], now: float) -> Iterator[str]:
    """The table of the attached IPUs: a row each, with a rule between attachments."""
    if not found:
        return boxed(f"No attached processes in partition {PARTITION}", (), [])
    attachments: dict[tuple[object, ...], list[Row]] = {}
    for holder in found.values():
        key = (holder.pid, holder.device, holder.since)
        attachments.setdefault(key, []).append(row(holder, now))
    head = ("PID", "Command", "Since", "Time", "User", "Device", "ID")
    title = f"Attached processes in partition {PARTITION}"
    return boxed(title, head, list(attachments.values()))


def row(holder: Holder, now: float) -> Row:
    command = holder.command or UNKNOWN
    if len(command) > WIDEST_COMMAND:
        command = command[: WIDEST_COMMAND - 3] + "..."
    started = holder.started
    return (
        UNKNOWN if holder.pid is None else str(holder.pid),
        command,
        f"{started.astimezone():%Y-%m-%d %H:%M:%S}" if started else UNKNOWN,
        UNKNOWN if holder.since is None else duration(now - holder.since),
        holder.user or UNKNOWN,
        UNKNOWN if holder.device is None else str(holder.device),
        str(holder.ipu),
    )


def duration(seconds: float) -> str:
    """The two largest units; 0s if the clock was set back.

    >>> [duration(s) for s in (9.7, 75, 7384, 200000)]
    ['9s', '1m15s', '2h3m', '2d7h']
    """
    whole = max(int(seconds), 0)
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    shown: list[str] = []
    for name, size in units:
        count, whole = divmod(whole, size)
        if count or shown or size == 1:
            shown.append(f"{count}{name}")
    return "".join(shown[:2])


def boxed(title: str, head: Row, groups: Sequence[Sequence[Row]]) -> Iterator[str]:
    """A table in ASCII: the title, the head, and groups of rows between rules."""
    rows = [head, *(row for group in groups for row in group)] if head else []
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    inner = max(sum(widths) + len(widths) - 1, len(title) + 2)
    if widths:
        widths[-1] += inner - (sum(widths) + len(widths) - 1)
    whole, rule = f"+{'-' * inner}+", f"+{'+'.join('-' * width for width in widths)}+"

    def line(row: Row) -> str:
        return f"|{'|'.join(f'{cell:^{width}}' for cell, width in zip(row, widths, strict=True))}|"

    yield whole
    yield f"|{title:^{inner}}|"
    if not head:
        yield whole
        return
    yield from (rule, line(head), rule)
    for group in groups:
        yield from map(line, group)
        yield rule


if __name__ == "__main__":
    sys.exit(main())
