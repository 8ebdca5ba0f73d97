"""The command `gc-info`: lists the devices, and prints the attributes of one.

Its lines have Graphcore's form, so that scripts which read them work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from gpusim.devices.attributes import ARCHITECTURE, Hardware, attributes, inspect
from gpusim.devices.command import complain, parser_of, run
from gpusim.devices.errors import DeviceError
from gpusim.devices.holders import Holder, holders
from gpusim.devices.table import PARTITION, Device, Ipu, Table

__all__ = ["describe", "listing", "main"]

PROGRAM = "gc-info"


def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-info with the arguments `argv` (default: the process's) and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    if arguments.command is show_info and arguments.device_id is None:
        parser.error("--device-info needs --device-id")
    return run(PROGRAM, lambda: arguments.command(arguments.device_id))


def command_line() -> argparse.ArgumentParser:
    """The parser; `command` is the function to call with the device id."""
    parser = parser_of(PROGRAM, "Lists the simulated IPUs, and prints the attributes of one.")
    parser.add_argument(
        "-d",
        "--device-id",
        type=int,
        metavar="ID",
        help="the id of the device, as in the list",
    )
    commands = parser.add_argument_group("commands").add_mutually_exclusive_group()
    for names, command, text in (
        (("-l", "--list-devices"), show_list, "list the devices: single IPUs, then groups"),
        (("-i", "--device-info"), show_info, "print the attributes of the device"),
        (("--ipu-count",), show_count, "print the number of IPUs, of the device or of all"),
        (("--ipu-arch",), show_architecture, "print the architecture that is simulated"),
        (("--tile-clock-speed",), show_clock, "print the clock of the GPU or the host"),
    ):
        commands.add_argument(
            *names, dest="command", action="store_const", const=command, help=text
        )
    return parser


def show_list(id: int | None) -> None:
    table = Table.from_environment()
    chosen = table.devices if id is None else (table.device(id),)
    print("\n".join(listing(chosen)))


def show_info(id: int) -> None:
    device = Table.from_environment().device(id)
    hardware = inspect()
    if hardware.problem:
        complain(PROGRAM, f"NVML does not answer: {hardware.problem}")
    try:
        found = holders(device.ipus)
    except DeviceError as error:  # the other attributes are still worth printing
        complain(PROGRAM, error)
        found = {}
    print("\n".join(describe(device, hardware, found)))


def show_count(id: int | None) -> None:
    table = Table.from_environment()
    print(table.count if id is None else len(table.device(id)))


def show_architecture(id: int | None) -> None:
    Table.from_environment().device(id or 0)
    print(ARCHITECTURE)


def show_clock(id: int | None) -> None:
    first = Table.from_environment().device(id or 0).members[0]
    print(attributes(first, inspect())["clock"])


def listing(devices: Sequence[Device]) -> Iterator[str]:
    """The lines of --list-devices.

    >>> print("\\n".join(listing(Table(2).devices)))
    Graphcore device listing:
    Partition: gpusim [active]
    -+- Id: [0], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [3]
    -+- Id: [1], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [2]
    -+- Id: [2], target: [Multi IPU]
     |--- Id: [0], DNC Id: [0], IPU-M host: [127.0.0.1], IPU#: [3]
     |--- Id: [1], DNC Id: [1], IPU-M host: [127.0.0.1], IPU#: [2]
    """
    yield "Graphcore device listing:"
    yield f"Partition: {PARTITION} [active]"
    for device in devices:
        head = f"-+- Id: [{device.id}], target: [{device.target}]"
        if len(device) == 1:
            yield f"{head}, {address(device.members[0])}"
            continue
        yield head
        for index, ipu in enumerate(device.members):
            yield f" |--- Id: [{ipu.id}], DNC Id: [{index}], {address(ipu)}"


def address(ipu: Ipu) -> str:
    return f"IPU-M host: [{ipu.host}], IPU#: [{ipu.number}]"


def describe(device: Device, hardware: Hardware, found: dict[int, Holder]) -> Iterator[str]:
    """The lines of --device-info: id and target, then `key: value`, sorted by key.

    A group is followed by its IPUs, with their attributes.
    """
    if len(device) > 1:
        yield from block(device, {"ipu count": str(len(device)), "ipu ids": ids(device)})
    for ipu in device.members:
        single = Device(ipu.id, (ipu.id,))
        yield from block(single, attributes(ipu, hardware, found.get(ipu.id)))


def ids(device: Device) -> str:
    return ", ".join(map(str, device.ipus))


def block(device: Device, known: dict[str, str]) -> Iterator[str]:
    yield "Device Info:"
    yield f"  id: {device.id}"
    yield f"  target: {device.target}"
    yield from (f"  {key}: {known[key]}" for key in sorted(known))


if __name__ == "__main__":
    sys.exit(main())
