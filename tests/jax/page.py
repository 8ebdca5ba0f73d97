"""The figures of docs/jax.md: what programs of examples/ train to under several reductions.

`python -m tests.jax.page --page` writes them into the page; without --page it shows them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "jax.md"
DEVICES = 8
WIDTH = 120
END = "<!-- end -->"

REDUCTIONS = ("", "xla-cpu", "ring", "tree", "ring accumulate=bfloat16")
"""The rows of the table; the empty text leaves sums to XLA."""

PROGRAMS = ("jax_data_parallel.py", "jax_fsdp.py", "jax_moe.py")
"""The columns. The last one installs the Reduction itself: it is its argument."""

RECORDED = "gpusim jaxrun --devices 8 --arrays 0-5 --record"
CASE = (
    f"{RECORDED} once --reduction ring examples/jax_fsdp.py",
    f"{RECORDED} hops --reduction nccl-ring examples/jax_fsdp.py",
    "gpusim compare once hops",
)
"""The commands of the case."""

LINE = re.compile(r"8 devices: loss (?P<loss>\S+), (parameters|gradients) (?P<digest>\w+)")


class Found(NamedTuple):
    """The end of a program: the loss in all digits, and a digest of its arrays."""

    loss: str
    digest: str

    @property
    def cell(self) -> str:
        """Both, as the table has them."""
        return f"{self.loss} `{self.digest}`"


def output(command: str, folder: Path) -> str:
    """The output of a command, in a folder that has examples/."""
    first, *rest = shlex.split(command)
    modules = {"gpusim": [sys.executable, "-m", "gpusim"], "python": [sys.executable]}
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("JAX_ENABLE_X64", None)
    done = subprocess.run(
        [*modules[first], *rest], cwd=folder, env=environment, capture_output=True, text=True
    )
    expected = 1 if "compare" in rest else 0  # it finds a difference
    assert done.returncode == expected, f"{command}: {done}"
    return done.stdout


def command_of(program: str, reduction: str) -> str:
    """The command of a cell of the table."""
    text = shlex.quote(reduction)
    if program == "jax_moe.py":
        return f"python examples/{program}" + (f" {text}" if reduction else "")
    option = f" --reduction {text}" if reduction else ""
    return f"gpusim jaxrun --devices {DEVICES}{option} examples/{program}"


def cells_of(program: str) -> dict[str, Found]:
    """The ends of a program, by reduction."""
    found = {}
    for reduction in REDUCTIONS:
        said = output(command_of(program, reduction), ROOT)
        line = LINE.search(said)
        assert line and said.endswith("agreed\n"), said
        found[reduction] = Found(line["loss"], line["digest"])
    return found


def table(columns: Mapping[str, Mapping[str, Found]]) -> str:
    """The table of the page."""
    lines = ["| sums | " + " | ".join(f"`{name}`" for name in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for reduction in REDUCTIONS:
        name = f"`{reduction}`" if reduction else "XLA's own"
        cells = [column[reduction].cell for column in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_table(text: str) -> dict[str, dict[str, Found]]:
    """The cells of the page's table, by program and reduction."""
    head, _, *rows = text.strip().splitlines()
    programs = re.findall(r"`([^`]+)`", head)
    found: dict[str, dict[str, Found]] = {program: {} for program in programs}
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for program, cell in zip(programs, cells, strict=True):
            loss, digest = cell.replace("`", "").split()
            found[program][name.strip("`").replace("XLA's own", "")] = Found(loss, digest)
    return found


def case() -> dict[str, list[str]]:
    """The commands of the case, and the lines that the page has of what they print."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT / "examples", Path(scratch) / "examples")
        said = {command: output(command, Path(scratch)) for command in CASE}
    chosen = re.compile(r"8 devices|The cause|.* elements of the results")
    return {
        command: [line for line in text.splitlines() if chosen.match(line)]
        for command, text in said.items()
    }


def session(said: Mapping[str, list[str]]) -> str:
    """The case as the page shows it."""
    lines = []
    for command, printed in said.items():
        lines.append(f"$ {command}")
        for line in printed:
            lines += textwrap.wrap(line, WIDTH)
    return "```console\n" + "\n".join(lines) + "\n```"


MADE: dict[str, Callable[[], str]] = {
    "case": lambda: session(case()),
    "table": lambda: table({program: cells_of(program) for program in PROGRAMS}),
}
"""The parts of the page that are made, by name."""


def begin(name: str) -> str:
    """The line before a part."""
    return f"<!-- python -m tests.jax.page --page, {name} -->"


def part(name: str) -> str:
    """A part, as the page has it."""
    _, found, rest = PAGE.read_text().partition(begin(name))
    made, closed, _ = rest.partition(END)
    assert found and closed, f"{PAGE.name}: expected the lines {begin(name)} and {END}"
    return made.strip()


def write(name: str, made: str) -> None:
    """Put a part into the page."""
    text = PAGE.read_text()
    old = f"{begin(name)}{text.partition(begin(name))[2].partition(END)[0]}{END}"
    PAGE.write_text(text.replace(old, f"{begin(name)}\n\n{made}\n\n{END}"))


def main() -> None:
    """Make the parts of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write them into docs/jax.md")
    options = parser.parse_args()
    for name, make in MADE.items():
        made = make()
        print(f"{made}\n")
        if options.page:
            write(name, made)


if __name__ == "__main__":
    main()
