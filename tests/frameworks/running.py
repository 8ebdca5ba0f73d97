"""Runs a program under a launcher, and measures its time and its memory.

Owner of a run: the thread that calls `run`. It polls, so that Ctrl-C ends the launcher's processes
too. A run that makes no progress is ended by `tests.oracles.progress.Watch`, which shows stacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.oracles.progress import TICK, Watch, descendants, processes

__all__ = ["HOST", "LAUNCHERS", "PROGRAMS", "ROOT", "Run", "difference", "run"]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "gloo": [str(BIN / "torchrun")],
    "gpusim": [str(BIN / "gpusim"), "torchrun", "--quiet"],
}
#: Whose sums simulated ranks make: gloo's, or those of GPUs that the host plays.
HOST = ["--reduction", "gloo-ring"]
GPUS = ["--reduction", "nccl-ring", "--device", "cpu"]
#: Nothing is fetched, nothing competes for the cores, and no library draws bars.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "",  # on a machine with GPUs too
}
#: Settings of frameworks that the user may have.
FOREIGN = ("ACCELERATE_", "DS_", "FSDP_", "PL_", "TORCH_", "TRITON_")
LOOK = 0.5  # seconds between two looks at the memory, which may take a fifth of the time
NUMBER = r"-?(?:\b(?:nan|inf)\b|\d[\d.]*(?:e[-+]?\d+)?)"
LAST = 30  # lines of an output that is shown


@dataclass(frozen=True)
class Run:
    """How a program ran.

    **Attributes**: `error`, why it failed, or ''; `output`, its last lines; `lines`, of each
    rank, what `programs/digest.py` wrote; `seconds`; `megabytes`, the largest sum of its
    processes' memory, where pages that processes share count once.
    """

    error: str
    output: str
    lines: dict[str, list[str]]
    seconds: float
    megabytes: float

    @property
    def steps(self) -> int:
        """The fewest optimizer steps of any rank."""
        kinds = ([json.loads(line)[0] for line in lines] for lines in self.lines.values())
        return min((sum(kind in ("step", "model") for kind in each) for each in kinds), default=0)

    @property
    def digest(self) -> str:
        """One digest of all lines of all ranks."""
        text = json.dumps(self.lines, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def values(self) -> list[float]:
        """All numbers that rank 0 evaluated."""
        said = [json.loads(line) for line in self.lines.get("rank-0", ())]
        texts = (what for kind, what in said if kind not in ("step", "model"))
        return [float(each) for text in texts for each in re.findall(NUMBER, text)]


def run(
    launcher: str,
    program: str,
    ranks: int,
    folder: Path,
    *,
    gpu: bool = False,
    preload: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Run:
    """Run a program with its arguments in a folder, which is made; see `Run`.

    `gpu`: the host plays GPUs. `preload`: what simulated ranks import once. `more`: options of the
    launcher.
    """
    for name in ("digests", "work", "now"):
        (folder / name).mkdir(parents=True)
    script, *arguments = shlex.split(program)
    ways = ["--standalone"] if launcher == "gloo" else GPUS if gpu else HOST
    ways = [*ways, *more, *(f"--preload={module}" for module in preload)]
    command = [*LAUNCHERS[launcher], *ways, "--nproc-per-node", str(ranks)]
    command += [str(PROGRAMS / script), *arguments]
    own = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    environment = own | ENVIRONMENT
    environment |= {"FRAMEWORKS_OUT": str(folder / "digests"), "FRAMEWORKS_LAUNCHER": launcher}
    begin = time.monotonic()
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder / "work",
            env=environment,
            start_new_session=True,
        )
        (folder / "now" / str(process.pid)).write_text(f"{launcher} {program} on {ranks}")
        watch = Watch(folder / "now")
        try:
            megabytes = max(_memories(process, watch), default=0.0)
        finally:
            seconds = time.monotonic() - begin
            _end(str(folder / "digests"))
            process.wait()
        output.seek(0)
        text = output.read()
    lines = {
        file.stem: file.read_text().splitlines() for file in sorted((folder / "digests").iterdir())
    }
    error = "made no progress, and was ended" if watch.stopped else ""
    if not error and process.returncode:
        error = f"exit code {process.returncode}: {_reason(text)}"
    result = Run(error, "\n".join(text.splitlines()[-LAST:]), lines, seconds, megabytes)
    if not error and (len(lines) != ranks or not result.steps):
        error = f"{len(lines)} of {ranks} ranks wrote digests, of {result.steps} steps or more"
    return replace(result, error=error)


def difference(one: Run, other: Run) -> str:
    """Say where two runs first differ, or ''.

    >>> from dataclasses import replace
    >>> one = Run("", "", {"rank-0": ['["step", ["ab/01", "cd"]]']}, 1.0, 1.0)
    >>> difference(one, one)
    ''
    >>> difference(one, replace(one, lines={"rank-0": ['["step", ["ab/01", "ce"]]']}))
    'rank-0, line 1 (step), tensor 1: cd, ce'
    >>> difference(one, replace(one, lines={"rank-0": []}))
    'rank-0 wrote 1 and 0 lines'
    """
    if one.lines.keys() != other.lines.keys():
        return f"{len(one.lines)} and {len(other.lines)} ranks wrote lines"
    for rank, lines in one.lines.items():
        pairs = zip(map(json.loads, lines), map(json.loads, other.lines[rank]), strict=False)
        for number, (mine, theirs) in enumerate(pairs, 1):
            if mine != theirs:
                return f"{rank}, line {number} ({mine[0]}){_where(mine[1], theirs[1])}"
        if len(lines) != len(other.lines[rank]):
            return f"{rank} wrote {len(lines)} and {len(other.lines[rank])} lines"
    return ""


def _where(mine: Any, theirs: Any) -> str:
    if isinstance(mine, list) and isinstance(theirs, list):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            if one != other:
                return f", tensor {number}: {one}, {other}"
    return f": {mine}, {theirs}"


def _memories(process: subprocess.Popen[bytes], watch: Watch) -> Iterator[float]:
    """Yield the megabytes of a process and those below it, until it ends."""
    looked = pause = 0.0
    while process.poll() is None:
        now = time.monotonic()
        if now - looked > TICK:
            watch.look()
            looked = now
        if (now := time.monotonic()) >= pause:
            below = descendants(process.pid, processes())
            yield sum(map(_megabytes, (process.pid, *below)))
            pause = now + max(LOOK, 4 * (time.monotonic() - now))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _megabytes(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _end(folder: str) -> None:
    """End what is left of a run. torchrun's ranks have sessions of their own."""
    mark = f"FRAMEWORKS_OUT={folder}\0".encode()
    for pid in processes():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _reason(output: str) -> str:
    """The last line that names an error, and not that ranks have failed; else the last.

    >>> _reason("Traceback ...\\n[rank1]: ValueError: odd\\nbye")
    'ValueError: odd'
    """
    lines = [re.sub(r"^\[rank\d+\]: ", "", each).strip() for each in output.splitlines()]
    lines = [line for line in lines if "ChildFailedError" not in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    # A rank that is alone, as others have failed, says that it finds them no more.
    errors = [line for line in errors if "Gloo connectFullMesh" not in line] or errors
    return (errors or [line for line in lines if line] or ["no output"])[-1][:300]
