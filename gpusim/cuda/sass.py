"""Count the loads that a kernel's machine code has in flight before it uses the first one.
The code is read from nvdisasm's listing of a cubin; no GPU is needed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECTION = re.compile(r"^\.text\.(\w+):$(.*?)(?=^\s*\.section|\Z)", re.DOTALL | re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);")
_REGISTER = re.compile(r"(?<!U)R(\d+)")
_BITS = ("U8", "S8", "U16", "S16", "64", "128")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its name with all modifiers, and its operands as they are listed."""

    name: str
    operands: str

    @property
    def loads(self) -> bool:
        """Whether it loads from global memory into registers."""
        return self.name.startswith("LDG.")

    @property
    def bytes(self) -> int:
        """The bytes that an access moves for each thread."""
        parts = self.name.split(".")
        bits = next((part for part in parts if part in _BITS), "32")
        return int(bits.lstrip("US")) // 8


@dataclass(frozen=True)
class Batch:
    """Loads that are issued before one of them is used.

    **Attributes**:

    - `loads`, `bytes`: their number, and the bytes of each.
    - `loops`: whether they are in a loop.
    """

    loads: int
    bytes: int
    loops: bool


def disassembler() -> Path | None:
    """The path of nvdisasm: on PATH, or in the wheel nvidia-cuda-nvdisasm; None without both."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    tools = [path for place in places for path in Path(place).glob("*/bin/nvdisasm")]
    return min(tools, default=None)


def listing(cubin: Path) -> dict[str, str]:
    """The machine code of each function of a cubin, as text.

    **Raises**: FileNotFoundError without nvdisasm.
    """
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    command = [str(tool), "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(_SECTION.findall(text))


def instructions(text: str) -> list[Instruction]:
    """The instructions of a listing, in order."""
    return [Instruction(*found) for line in text.splitlines() for found in _LINE.findall(line)]


def _loops(text: str) -> list[tuple[int, int]]:
    """First and last line of each loop: the target of a branch backward, and the branch."""
    lines = text.splitlines()
    labels = {m[1]: number for number, line in enumerate(lines) if (m := _LABEL.match(line))}
    found = []
    for number, line in enumerate(lines):
        if "BRA" in line and (m := re.search(r"\(?(\.L_x_\d+)\)?", line)):
            target = labels.get(m[1], number)
            if target < number - 1:
                found.append((target, number))
    return found


def batches(text: str) -> list[Batch]:
    """The loads of a listing, in groups of one width that are in flight together.

    A group ends at the first instruction that uses a register that one of its loads fills. Loads of
    one register by different branches count once.

    >>> code = '''
    ... /*0000*/ LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
    ... /*0010*/ @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;
    ... /*0020*/ FADD R5, R5, R20 ;
    ... /*0030*/ LDG.E R4, desc[UR4][R2.64] ;
    ... /*0040*/ FADD R4, R4, R21 ;
    ... '''
    >>> batches(code)
    [Batch(loads=2, bytes=16, loops=False), Batch(loads=1, bytes=4, loops=False)]
    """
    loops = _loops(text)
    return list(_batches(text, loops))


def _batches(text: str, loops: list[tuple[int, int]]) -> Iterator[Batch]:
    pending: dict[int, tuple[int, int]] = {}  # a load's first register: its bytes and line
    for number, line in enumerate(text.splitlines()):
        for name, operands in _LINE.findall(line):
            instruction = Instruction(name, operands)
            used = [int(register) for register in _REGISTER.findall(operands)]
            if instruction.loads:
                filled, used = used[0], used[1:]
            hits = {
                size
                for first, (size, _) in pending.items()
                if any(first <= register < first + max(1, size // 4) for register in used)
            }
            for size in hits:
                lines = [place for other, place in pending.values() if other == size]
                looped = any(low <= min(lines) and number <= high for low, high in loops)
                yield Batch(len(lines), size, looped)
                pending = {first: load for first, load in pending.items() if load[0] != size}
            if instruction.loads:
                pending[filled] = instruction.bytes, number


def copies(text: str) -> int:
    """The asynchronous copies to shared memory (LDGSTS) of a listing."""
    return sum(each.name.startswith("LDGSTS") for each in instructions(text))
