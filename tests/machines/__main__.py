"""make test-machines: gpusim where only a part of what its tests know is installed.

- `wheel`: a user's machine. The wheel is built and installed into a fresh environment, without
  extras, and what a user meets first runs there in an empty folder.
- `image`: a borrowed machine with a GPU. Its image has CuPy, PyTorch and JAX; what else gpusim
  needs comes from the folder that `make gpu-wheels` fills. The page's commands for such a machine
  run there, on a fake GPU.

Both take a copy of the checkout without its repository, so that a file which is not part of it
cannot help. pip needs its index, and the image has several gigabytes with a PyTorch for CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
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
    """The commands for a borrowed machine with `wheels`; the second goes on."""
    base, wanted = "python3.12", IMAGE
    if subprocess.run(f"{base} --version", shell=True, capture_output=True).returncode:
        # Older ones lack these releases.
        base, wanted = sys.executable, IMAGE - {"jax==0.11.2", "numpy==2.5.2"} | {"jax", "numpy"}
    python = environment(WORK / "image", sorted(wanted), keep=True, base=base)
    there = f"from importlib.util import find_spec; print(*filter(find_spec, {ABSENT}))"
    if found := run(python, "-I", "-c", there, quiet=True).stdout.strip():
        raise RuntimeError(f"the image has {found}, so this would prove nothing")
    run(python, "-m", "tests.gpu.wheels", cwd=tree)
    rehearse(python, tree)
    run(python, "-c", LIGHT, cwd=tree, PYTHONPATH=str(tree / ".gpu" / "site"))


def commands() -> list[str]:
    """The commands for a borrowed machine, as the page has them."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    return re.findall(r"^nvidia-smi -L; .*", page, re.MULTILINE)


def rehearse(python: Path, tree: Path) -> None:
    """Run the commands on a fake GPU, each as on a fresh machine that gets what has come back."""
    last, steps = (
        tree / ".gpu" / "last",
        {"smoke", "torch", "speed", "tests", "sanitizer", "profile", "suites", "worlds"},
    )
    for number, line in enumerate(commands()):
        shutil.rmtree(tree / ".gpu" / "kept", ignore_errors=True)
        shutil.rmtree(tree / ".gpu" / "fake-cache", ignore_errors=True)
        last.mkdir(parents=True, exist_ok=True)
        (last / "commit").write_text("a rehearsal\n")
        out = Path(tempfile.mkdtemp(dir=WORK))
        path = f"{python.parent}:{os.environ['PATH']}"
        given = {"OUT": str(out), "PATH": path, "GPUSIM_FAKE_CUDA": "1"}
        code = run("bash", "-c", line, cwd=tree, check=False, **given).returncode
        if code not in (0, UNFINISHED):
            raise RuntimeError(f"command {number + 1} ended with {code}")
        lines = map(json.loads, (out / "gpu-results.jsonl").read_text().splitlines())
        ended = {line["step"]: line["ended"] for line in lines if "ended" in line}
        if not steps <= ended.keys():
            raise RuntimeError(f"command {number + 1} began only {', '.join(ended)}")
        if len([*out.iterdir()]) > 8:
            raise RuntimeError(f"command {number + 1} left more files than come back")
        for file in out.iterdir():
            shutil.move(file, last / file.name)
        out.rmdir()


#: What such a machine has: packages as on the one with the H200.
IMAGE = {"cupy-cuda13x==14.2.0", "torch==2.11.0", "jax==0.11.2", "numpy==2.5.2", "pytest"}
UNFINISHED = 3  # the exit code of `make gpu` when its time is over

MACHINES: dict[str, Callable[[Path], None]] = {"wheel": wheel, "image": image}


def environment(
    folder: Path, requirements: Sequence[str], *, keep: bool = False, base: str = sys.executable
) -> Path:
    """Make an environment with what pip finds for these. Returns its Python.

    `keep`: take the one that is there, if it was made for the same requirements and Python, `base`.
    """
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    content = "\n".join([f"# {base}", *requirements])
    if keep and stamp.exists() and stamp.read_text() == content:
        return python
    run(base, "-m", "venv", "--clear", str(folder))
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
        file = ROOT / name
        if file.is_symlink() or file.is_file():  # else it was removed, or is a repository's folder
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, tree / name, follow_symlinks=False)
    return tree


def run(program: str | Path, *words: str, cwd: Path = WORK, quiet: bool = False,
        check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program as on a machine of its own. What it prints is returned if `quiet`."""
    theirs = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    return subprocess.run(
        [program, *words],
        cwd=cwd,
        env={**theirs, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        text=True,
        check=check,
    )


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
