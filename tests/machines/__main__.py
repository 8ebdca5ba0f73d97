"""make test-machines: gpusim where only a part of what its tests know is installed.

- `wheel`: a user's machine. The wheel is built and installed into a fresh environment, without
  extras, and what a user meets first runs there in an empty folder.
- `image`: a borrowed machine with a GPU. Its image has CuPy, PyTorch and JAX; what else gpusim
  needs comes from the folder that `make gpu-wheels` fills. `make gpu` begins there, on a fake GPU.

Both take a copy of the checkout without its repository, so that a file which is not part of it
cannot help. pip needs its index, and the image has several gigabytes with a PyTorch for CUDA.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".machines"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
# Variables by which this machine, or the make that runs this, would reach the other one.
OURS = ("PYTHON", "VIRTUAL_ENV", "GPUSIM_", "MAKE", "MFLAGS", "OUT", "LD_LIBRARY_PATH")
ABSENT = ("gfloat", "hypothesis", "mpi4py", "optree", "rich", "safetensors", "xdist")
HEAVY = ("cupy", "jax", "matplotlib", "mpi4py", "torch")
# Also an import that failed, and was caught, is noticed.
LIGHT = f"""
import sys

class Noticed(list):
    def find_spec(self, name, path=None, target=None):
        self.append(name.partition(".")[0])

noticed = Noticed()
sys.meta_path.insert(0, noticed)
import gpusim
heavy = {set(HEAVY)} & {{*noticed, *sys.modules}}
assert not heavy, f"import gpusim asks for {{heavy}}"
"""


def wheel(tree: Path) -> None:
    """What a user meets first; see `without_extras`."""
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        built, empty = Path(folder, "built"), Path(folder, "empty")
        empty.mkdir()
        run(sys.executable, *PIP, "wheel", "--no-deps", f"--wheel-dir={built}", str(tree))
        python = environment(Path(folder, "env"), [*map(str, built.glob("*.whl"))])
        program = tree / "tests" / "machines" / "without_extras.py"
        pages = [str(tree / "README.md"), *map(str, sorted(tree.glob("docs/*.md")))]
        path = f"{python.parent}:{os.environ['PATH']}"
        devices = str(Path(folder, "devices"))
        for words in (["-c", LIGHT], [str(program), *pages]):
            run(python, "-I", *words, cwd=empty, PATH=path, GPUSIM_RUNTIME_DIR=devices)


def image(tree: Path) -> None:
    """The beginning of `make gpu` with `wheels`."""
    python = environment(WORK / "image", image_requirements(), keep=True)
    there = f"from importlib.util import find_spec; print(*filter(find_spec, {ABSENT}))"
    if found := run(python, "-I", "-c", there, quiet=True).strip():
        raise RuntimeError(f"the image has {found}, so this would prove nothing")
    run(python, "-m", "tests.gpu.wheels", cwd=tree)
    run(python, "-m", "tests.gpu", "--fake", "--only", "smoke", cwd=tree)
    run(python, "-c", LIGHT, cwd=tree, PYTHONPATH=str(tree / ".gpu" / "site"))


def image_requirements() -> list[str]:
    """The releases of CuPy and PyTorch that the tests know, any JAX and NumPy, and pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (cupy,) = (text for text in extras["checks"] if text.startswith("cupy-cuda13x=="))
    (torch,) = (text for text in extras["test"] if text.startswith("torch=="))
    return [cupy, torch, "jax", "numpy", "pytest"]


MACHINES: dict[str, Callable[[Path], None]] = {"wheel": wheel, "image": image}


def environment(folder: Path, requirements: Sequence[str], *, keep: bool = False) -> Path:
    """Make an environment with what pip finds for these. Returns its Python.

    `keep`: take the one that is there, if it was made for the same requirements and Python.
    """
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    content = "\n".join([f"# {sys.version}", *requirements])
    if keep and stamp.exists() and stamp.read_text() == content:
        return python
    run(sys.executable, "-m", "venv", "--clear", str(folder))
    run(python, *PIP, "install", *requirements)
    stamp.write_text(content)  # last, so that an interrupted one is made again
    return python


def checkout() -> Path:
    """A copy of the files that belong to the checkout, changed and new ones as they are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in listed.split("\0"):
        if (ROOT / name).is_file():  # else it was removed, or is a folder with its own repository
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run(python: str | Path, *words: str, cwd: Path = WORK, quiet: bool = False,
        **variables: str) -> str:  # fmt: skip
    """Run a Python as on a machine of its own. Returns what it prints, if `quiet`."""
    theirs = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        [python, *words],
        cwd=cwd,
        env={**theirs, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        text=True,
        check=True,
    )
    return done.stdout or ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make test-machines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("machine", nargs="*", help=f"{' or '.join(MACHINES)}; default: both")
    given = parser.parse_args(arguments)
    if unknown := set(given.machine) - {*MACHINES}:
        parser.error(f"there is no machine {', '.join(sorted(unknown))}: {', '.join(MACHINES)}")
    WORK.mkdir(exist_ok=True)
    tree = checkout()
    failed = []
    for name in given.machine or MACHINES:
        start = time.monotonic()
        print(f"--- {name}", flush=True)
        try:
            MACHINES[name](tree)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"make test-machines: {name}: {error}", file=sys.stderr)
            failed.append(name)
        word = "FAILED" if name in failed else "passed"
        print(f"--- {name} {word} in {time.monotonic() - start:.0f} s", flush=True)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
