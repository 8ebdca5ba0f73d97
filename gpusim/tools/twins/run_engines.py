"""Run engines: find those that a Python has, and sum given values in real processes.

The processes run the programs in `workers`, by path, and exchange files with this one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import GpusimError

__all__ = ["Answer", "Request", "Engine", "EngineFailed", "INSTALLS", "engines", "run", "values"]

WORKERS = Path(__file__).parent / "workers"
#: Seconds for one start of an engine.
PATIENCE = 600
#: Binary exponents between which values are spread, so that sums lose bits of most of them; and
#: those for types of 8 bits, whose range is small.
SPREAD, NARROW_SPREAD = (-8, 11), (-4, 4)

#: What installs each engine in the Python that runs the command, or in the one of --python.
INSTALLS = {
    "xla": "pip install 'gpusim[jax]'",
    "openmpi": "pip install 'gpusim[mpi]'",
    "mpich": "pip install mpi4py mpich, in an environment of its own, and --python PATH",
    "gloo": "pip install 'gpusim[torch]'",
}

_PROBE = """
import importlib.util, json
print(json.dumps([n for n in ("mpi4py", "torch", "jax") if importlib.util.find_spec(n)]))
"""


class EngineFailed(GpusimError):
    """The processes of an engine ended without an answer."""


@dataclass(frozen=True)
class Request:
    """A number `sums` of all-reduces, of `size` elements each, by `ranks` processes.

    `settings` are the engine's own: for Open MPI an algorithm's number and a segment size.
    """

    ranks: int
    dtype: str
    size: int
    sums: int = 1
    settings: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Answer:
    """All sums one behind the other, and whether all ranks had the same bits."""

    total: np.ndarray
    alike: bool


@dataclass(frozen=True)
class Engine:
    """An engine: the name of its worker, the Python that has it, and its mpirun."""

    name: str
    python: str
    mpirun: str | None = None


def engines(pythons: Iterable[str] = ()) -> list[Engine]:
    """The engines of this Python and of other ones, each engine once.

    **Raises**: ValueError for a Python that does not run.
    """
    found: dict[str, Engine] = {}
    for python in (sys.executable, *pythons):
        for engine in _engines_of(python):
            found.setdefault(engine.name, engine)
    return list(found.values())


def _engines_of(python: str) -> list[Engine]:
    try:
        done = _execute([python, "-c", _PROBE], os.environ, 60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{python}: expected a Python interpreter ({error})") from None
    if done.returncode:
        raise ValueError(f"{python}: expected a Python interpreter; {done.stderr.strip()[-200:]}")
    packages = json.loads(done.stdout)
    found = []
    mpirun = shutil.which("mpirun", path=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    if "mpi4py" in packages and mpirun:
        kind = _execute([mpirun, "--version"], os.environ, 60).stdout
        names = {"Open MPI": "openmpi", "HYDRA": "mpich"}
        found += [Engine(name, python, mpirun) for word, name in names.items() if word in kind]
    found += [Engine("gloo", python)] * ("torch" in packages)
    found += [Engine("xla", python)] * ("jax" in packages)
    return found


def _execute(
    command: Sequence[str], environ: Any, patience: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=patience, check=False
    )


def values(dtype: str, ranks: int, size: int, seed: int = 0) -> np.ndarray:
    """Members, (ranks, size), of many magnitudes and none subnormal: every order rounds them.

    >>> values("bfloat16", 2, 3).dtype
    dtype(bfloat16)
    """
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    parts = 2 if kind.kind == "c" else 1
    random = np.random.default_rng(seed)
    shape = ranks, parts * size
    drawn = random.uniform(1, 2, shape)
    exponents = SPREAD if kind.itemsize > 1 else NARROW_SPREAD
    np.ldexp(drawn, random.integers(*exponents, shape, np.int32), out=drawn)
    np.negative(drawn, out=drawn, where=random.integers(0, 2, shape, np.bool_))
    return drawn.view(complex).astype(kind) if parts == 2 else drawn.astype(kind)


def run(
    engine: Engine, requests: Sequence[Request]
) -> tuple[str, list[Answer], dict[str, np.ndarray]]:
    """The engine's name and version, its answers, and the members' values by dtype.

    Request k sums elements 0..size-1 of the first `ranks` members, then the next ones, and so on.

    **Raises**: EngineFailed if the processes fail.
    """
    most = max(request.ranks for request in requests)
    sizes: dict[str, int] = {}
    for request in requests:
        sizes[request.dtype] = max(sizes.get(request.dtype, 0), request.size * request.sums)
    members = {dtype: values(dtype, most, size) for dtype, size in sizes.items()}
    with tempfile.TemporaryDirectory(prefix="gpusim-twin-") as name:
        folder = Path(name)
        for dtype, array in members.items():
            known = array.dtype.isbuiltin == 1  # of NumPy's types; else the bits are stored
            stored = array if known else array.view(f"i{array.itemsize}")
            np.save(folder / f"{dtype}.npy", stored)
        cases = [{**asdict(request), "settings": dict(request.settings)} for request in requests]
        (folder / "cases.json").write_text(json.dumps(cases))
        for command in _commands(engine, requests, folder):
            _start(engine, command)
        found: dict[str, np.ndarray] = {}
        for file in sorted(folder.glob("found*.npz")):
            with np.load(file, allow_pickle=False) as part:
                found.update(part)
    answers = []
    for number, request in enumerate(requests):
        if f"sum {number}" not in found:
            raise EngineFailed(f"{engine.name}: no answer to {request}")
        total = found[f"sum {number}"].view(members[request.dtype].dtype)
        answers.append(Answer(total, bool(found[f"alike {number}"])))
    return " ".join(str(found["version"]).split("\n")[0].split()), answers, members


def _commands(engine: Engine, requests: Sequence[Request], folder: Path) -> list[list[str]]:
    if engine.mpirun is None:
        return [[engine.python, str(WORKERS / f"{engine.name}.py"), str(folder)]]
    program = [engine.python, str(WORKERS / "mpi.py"), str(folder)]
    flags = ["--oversubscribe", "--allow-run-as-root"] if engine.name == "openmpi" else []
    ranks = sorted({request.ranks for request in requests})
    return [[engine.mpirun, "-n", str(n), *flags, *program] for n in ranks]


def _start(engine: Engine, command: list[str]) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        done = _execute(command, environ, PATIENCE)
    except subprocess.TimeoutExpired:
        raise EngineFailed(
            f"{engine.name}: no answer in {PATIENCE} s: {' '.join(command)}"
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise EngineFailed(f"{engine.name} failed: {' '.join(command)}\n{said}")
