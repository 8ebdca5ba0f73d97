"""The command `gpusim info`: what gpusim can use on this machine, and what to install for more.

Everything is looked up on each call; a broken driver or library is a line of the output.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import gpusim
from gpusim.fallback import kernels
from gpusim.optional import available, tested
from gpusim.runtime import probes

__all__ = ["Survey", "Part", "show", "survey", "to_json", "to_text"]

GIB = 2**30
WIDEST = 40  # column of states


@dataclass(frozen=True)
class Part:
    """A package that gpusim can use: its use, its version, and how to install it."""

    name: str
    use: str
    version: str | None
    problem: str | None = None
    install: str | None = None

    @property
    def state(self) -> str:
        """The version, or else the problem."""
        return self.version or self.problem or "not installed"


@dataclass(frozen=True)
class Survey:
    """The answer of `survey`."""

    gpusim: str
    python: str
    platform: str
    cores: int
    memory_bytes: int | None
    devices: tuple[Mapping[str, Any], ...]
    driver: str | None
    driver_problem: str | None
    parts: tuple[Part, ...]

    @property
    def heading(self) -> str:
        return f"gpusim {self.gpusim}, Python {self.python}, {self.platform}"


def survey() -> Survey:
    """Look up the machine and the installed packages."""
    driver = probes.ask("cuda")
    cuda_extra = "cuda12" if (driver.get("cuda") or "").startswith("12.") else "cuda13"
    return Survey(
        gpusim=gpusim.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cores=usable_cores(),
        memory_bytes=probes.memory_bytes(),
        devices=tuple(driver.get("devices", ())),
        driver=driver.get("cuda"),
        driver_problem=driver.get("problem"),
        parts=(
            *needed(),
            compiled_part(),
            torch_part(),
            jax_part(),
            *gpu_parts(cuda_extra, bool(driver.get("devices"))),
            mpi_part(),
            *study_parts(),
        ),
    )


def needed() -> Iterator[Part]:
    """The dependencies of gpusim itself."""
    yield Part("NumPy", "all arithmetic, on the CPU", version_of("numpy"))
    yield Part("ml_dtypes", "bfloat16 and the 8-bit formats", version_of("ml_dtypes"))
    yield Part("optree", "pytrees", version_of("optree"))
    yield Part("filelock", "exclusive use of simulated IPUs", version_of("filelock"))


def compiled_part() -> Part:
    """The compiler of the kernels that NumPy's are replaced by."""
    use, version = "kernels compiled for this CPU", version_of("ziglang")
    try:
        compiled = kernels.compiled()
    except (RuntimeError, ValueError) as error:  # of the environment variable
        return Part("ziglang", use, None, str(error), None if version else install("fast"))
    if version is None:
        return Part("ziglang", use, None, install=install("fast"))
    unused = "" if compiled else f" ({kernels.SETTING}={kernels.setting()}: not used)"
    return Part("ziglang", use, version + unused)


def torch_part() -> Part:
    """PyTorch, which is not imported for it."""
    use, version = "gpusim torchrun, gpusim.torch, PopTorch", version_of("torch")
    return Part("PyTorch", use, version, install=None if version else install("torch"))


def jax_part() -> Part:
    """JAX, which is not imported for it, and whether its version is one of those tested.

    Its devices are not counted: that would start XLA.
    """
    use, version = "gpusim jaxrun, gpusim.jax", version_of("jax")
    if version is None:
        return Part("JAX", use, None, install=install("jax"))
    if version_of("jaxlib") is None:
        return Part("JAX", use, None, f"jax {version} needs jaxlib", install("jax"))
    plugins = [name for name in JAX_PLUGINS if version_of(name)]
    known = tested("jax")
    test = "tested" if version in known else f"tested: {', '.join(known)}"
    return Part("JAX", use, f"{version} ({', '.join(['cpu', *plugins])}; gpusim.jax {test})")


JAX_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")


def gpu_parts(extra: str, found: bool) -> Iterator[Part]:
    """CuPy, and NCCL, which it finds where it is installed; needed if GPUs are `found`."""
    wanted = install(extra) if found else None
    cupy_use, nccl_use = "arrays on GPUs", "exchange between GPUs"
    package = next((name for name in CUPY_PACKAGES if version_of(name)), None)
    if package is None:
        yield Part("CuPy", cupy_use, None, install=wanted)
        yield Part("NCCL", nccl_use, None, problem="needs CuPy")
        return
    answer = probes.ask("cupy")
    if problem := answer.get("problem"):
        broken = f"{package} {version_of(package)} does not work: {problem}"
        yield Part("CuPy", cupy_use, None, broken, wanted)
        yield Part("NCCL", nccl_use, None, problem="needs CuPy")
        return
    yield Part("CuPy", cupy_use, f"{answer['version']} (CUDA {answer['cuda']})")
    wheel = None if answer["nccl"] else f"pip install nvidia-nccl-{extra.replace('cuda', 'cu')}"
    yield Part("NCCL", nccl_use, answer["nccl"], "CuPy found none", wheel)


CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # the last is built from source


def mpi_part() -> Part:
    """MPI, through mpi4py."""
    use = "several processes: poprun, World"
    version = version_of("mpi4py")
    if version is None:
        return Part("MPI", use, None, install=install("mpi"))
    answer = probes.ask("mpi")
    if problem := answer.get("problem"):
        broken = f"mpi4py {version} does not work: {problem}"
        return Part("MPI", use, None, broken, install("mpi"))
    return Part("MPI", use, f"mpi4py {version}, {answer['library'].split(',')[0]}")


def study_parts() -> Iterator[Part]:
    """The packages behind the demo."""
    for package, use in STUDY.items():
        version = version_of(package)
        yield Part(package, use, version, install=None if version else install("study"))


STUDY = {
    "scikit-learn": "the demo's handwritten digits",
    "matplotlib": "pictures",
    "rich": "tables and progress bars",
}


def install(extra: str) -> str:
    """The command that installs the extra `extra`."""
    return f"pip install 'gpusim[{extra}]'"


def version_of(package: str) -> str | None:
    """The installed version of a distribution package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---------------------------------------------------------------- printing

Row = tuple[str, str, str]  # name, state, use


def rows(machine: Survey) -> list[Row]:
    """The table's rows: the machine, then the packages."""
    memory = f"{machine.memory_bytes / GIB:.1f} GiB" if machine.memory_bytes else "unknown"
    table = [("cores", str(machine.cores), "usable by this process"), ("memory", memory, "")]
    for device in machine.devices:
        described = f"{device['name']}, {device['memory_bytes'] / GIB:.0f} GiB"
        table.append((f"GPU {device['index']}", described, f"CUDA {machine.driver}"))
    if not machine.devices:
        table.append(("GPUs", "none", machine.driver_problem or "the driver has no devices"))
    return table + [(part.name, part.state, part.use) for part in machine.parts]


def installs(machine: Survey) -> list[str]:
    """The commands that install the missing packages, each once."""
    return list(dict.fromkeys(part.install for part in machine.parts if part.install))


def to_json(machine: Survey) -> str:
    """The survey as JSON, for scripts and bug reports."""
    return json.dumps(asdict(machine), indent=2)


def to_text(machine: Survey) -> str:
    """The survey as plain text, one line a row."""
    table = rows(machine)
    name_width = max(len(row[0]) for row in table)
    state_width = max(len(row[1]) for row in table if len(row[1]) <= WIDEST)  # others stick out
    lines = [f"  {n:{name_width}}  {s:{state_width}}  {note}".rstrip() for n, s, note in table]
    more = [f"  {command}" for command in installs(machine)]
    return "\n".join([machine.heading, *lines, *(["To install for more:", *more] if more else [])])


def show(machine: Survey) -> None:
    """Print the survey: as a table on a terminal with rich, else as plain text."""
    if not (sys.stdout.isatty() and available("rich")):
        print(to_text(machine))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=machine.heading, title_justify="left", show_header=False)
    for row in rows(machine):
        table.add_row(*map(Text, row))  # Text: brackets are not markup
    console = Console()
    console.print(table)
    if more := installs(machine):
        console.print(Text("\n".join(["To install for more:", *(f"  {line}" for line in more)])))
