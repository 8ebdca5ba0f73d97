"""`import gpusim` is light, and the wheel with its dependencies is complete."""

from __future__ import annotations

import importlib
import pdb
import rlcompleter
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gpusim
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
HEAVY = (
    "cupy",
    "jax",
    "matplotlib",
    "mpi4py",
    "pynvml",
    "rich",
    "scipy",
    "sklearn",
    "torch",
    "ziglang",
)
USERS = "fallback, tests, bench"  # modules that a user may have beside a script
KINDS = ("*.py", "py.typed", "*.cu", "*.cuh", "*.h")
LOADED = f"""
import gpusim, sys
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, f'import gpusim loads {{heavy}}'
"""


def python(*arguments: str, run: str | Path = sys.executable, cwd: Path = ROOT) -> str:
    # -E: another Python than this one does not take modules from PYTHONPATH.
    command = [run, *([] if run == sys.executable else ["-E"]), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    python("-c", LOADED)


def test_help_loads_nothing_heavy() -> None:
    python("-c", f"import gpusim.tools.cli; gpusim.tools.cli.command_line()\n{LOADED}")


@pytest.mark.parametrize("first", ["fallback.schedules", "gpusim.fallback.schedules"])
def test_the_folders_name_gives_the_same_modules(first: str) -> None:
    program = f"""
import {first}, fallback.schedules, gpusim.fallback
from fallback import fold
assert fallback.schedules is gpusim.fallback.schedules
assert fold is fallback.fold is gpusim.fallback.fold
"""
    python("-c", program)


def test_modules_of_users_hide_none_of_gpusims(tmp_path: Path) -> None:
    for name in USERS.split(", "):
        (tmp_path / f"{name}.py").write_text("MINE = True")
    (tmp_path / "train.py").write_text(f"""
import torch, torch.distributed as dist
import {USERS}
dist.init_process_group()
total = torch.ones(())
dist.all_reduce(total)
print("sum", total.item(), all(each.MINE for each in ({USERS})))
""")
    program = f"import gpusim, {USERS}; print(gpusim.Reduction(), fallback.MINE)"
    assert python("-c", program, cwd=tmp_path).endswith("True\n")
    for mode in ("--threads", "--processes"):
        said = python(
            *("-m", "gpusim", "torchrun", mode, "--nproc-per-node", "3", "train.py"), cwd=tmp_path
        )
        assert said.count("sum 3.0 True") == 3


def test_version_is_the_distributions() -> None:
    assert gpusim.__version__ == metadata.version("gpusim")


def test_every_public_name_exists() -> None:
    for name in gpusim.__all__:
        assert hasattr(gpusim, name), name


@pytest.mark.parametrize(
    "name", ["gpusim", "gpusim.lax", "gpusim.collectives", "gpusim.torch", "gpusim.poptorch"]
)
def test_dir_shows_the_public_names_and_completion_finds_them(name: str) -> None:
    module = importlib.import_module(name)
    listed = {found for found in dir(module) if not found.startswith("__")}
    loaded = gpusim._MODULES & {*vars(gpusim)} if name == "gpusim" else set()
    assert listed == {found for found in module.__all__ if not found.startswith("__")} | loaded
    assert {"__name__", "__file__", "__doc__"} <= {*dir(module)}
    # as the debugger and the interpreter complete
    words = set(rlcompleter.Completer({"here": module}).attr_matches("here."))
    assert {word.removeprefix("here.").rstrip("()") for word in words} >= listed
    completer = pdb.Pdb()
    completer.curframe_locals = {"here": module}
    completer.curframe = sys._getframe()
    assert {f"here.{found}" for found in listed} <= {
        *completer._complete_expression("here.", "here.", 0, 5)
    }


def test_dir_lists_public_modules_once_they_are_imported() -> None:
    program = """
import importlib, gpusim
assert not gpusim._MODULES & {*dir(gpusim)}, dir(gpusim)
import gpusim.study, gpusim.popdist
assert gpusim._MODULES & {*dir(gpusim)} == {"study", "popdist"}
assert all(importlib.util.find_spec(f"gpusim.{name}") for name in gpusim._MODULES)
"""
    python("-c", program)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    python("-m", "pip", "wheel", "--quiet", *offline, "--wheel-dir", str(folder), ".")
    (built,) = folder.glob("gpusim-*.whl")
    return built


def dependencies(package: str) -> set[str]:
    """Return the distributions that `package` requires without extras, directly or indirectly."""
    needed = set()
    for requirement in map(Requirement, metadata.requires(package) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed |= {requirement.name} | dependencies(requirement.name)
    return needed


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that holds only the wheel and its dependencies.

    The dependencies are links to those of this environment, so no network is needed.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    executable = folder / "bin" / "python"
    offline = ("--no-deps", "--no-index")
    python("-m", "pip", "--python", str(executable), "install", "--quiet", *offline, str(wheel))
    asked = python("-c", "import sysconfig; print(sysconfig.get_path('platlib'))", run=executable)
    site = Path(asked.strip())
    for name in dependencies("gpusim"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return executable


def test_wheel_holds_all_sources_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert folders == {"gpusim", "pytest_gpusim.py"}
    roots = (*folders, "gpusim/fallback")  # a link, which ** does not follow
    sources = (ROOT.glob(f"{folder}/**/{kind}") for folder in roots for kind in KINDS)
    assert {str(path.relative_to(ROOT)) for paths in sources for path in paths} <= set(names)


def test_the_source_distribution_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build = "from hatchling.builders.{0} import {1} as B; print(*B({2!r}).build(directory={3!r}))"
    made = python("-c", build.format("sdist", "SdistBuilder", str(ROOT), str(tmp_path))).strip()
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    made = python("-c", build.format("wheel", "WheelBuilder", str(source), str(tmp_path))).strip()
    assert set(zipfile.ZipFile(made).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_wheel_works_in_a_fresh_environment(fresh: Path, tmp_path: Path) -> None:
    program = """
import numpy as np, gpusim, sys
from gpusim import lax
assert gpusim.__file__.startswith(sys.prefix), gpusim.__file__
print(gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(np.arange(4.0))[0])
"""
    assert python("-c", program, run=fresh, cwd=tmp_path) == "6.0\n"


def test_fresh_environment_says_what_to_install(fresh: Path, tmp_path: Path) -> None:
    assert "pip install 'gpusim[study]'" in python("-m", "gpusim", "info", run=fresh, cwd=tmp_path)
    demo = subprocess.run([fresh, "-E", "-m", "gpusim", "demo"], cwd=tmp_path, capture_output=True)
    assert demo.returncode == 2
    assert b"needs scikit-learn, matplotlib, rich: pip install 'gpusim[study]'" in demo.stderr
