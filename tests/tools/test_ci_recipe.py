"""The workflows that users paste: their steps run here, as a CI machine runs them.

Steps with `uses:` (checkout, Python, upload) are GitHub's, and are left out. In place of the step
`Install`, this environment's folder of scripts stands first in PATH, and PYTHONPATH names the
checkout. GitHub's conditions are read as "always". All other `run:` texts are run as they are, by
`bash -e`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE
from tests.tools.inner_runs import ROOT

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples" / "ci"
FILES = ("parallel.py", "train.py", "test_parallel.py", ".coveragerc")


def github_steps() -> list[dict[str, Any]]:
    workflow = yaml.safe_load((FOLDER / "github-actions.yml").read_text())
    (job,) = workflow["jobs"].values()
    steps: list[dict[str, Any]] = job["steps"]
    return steps


def gitlab_job() -> dict[str, Any]:
    (job,) = yaml.safe_load((FOLDER / "gitlab-ci.yml").read_text()).values()
    return dict(job)


def run(text: str, folder: Path, bug: str) -> subprocess.CompletedProcess[str]:
    """Run the text of a step as GitHub's runner does."""
    own = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COVERAGE", "GPUSIM"))
    }
    paths = [str(Path(sys.executable).parent), own["PATH"]]
    own |= {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT), "CI": "true"}
    own |= {"BUG": bug, "PYTEST_ADDOPTS": "-p pytest_gpusim -W ignore"}
    return subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def project(folder: Path) -> Path:
    for name in FILES:
        shutil.copy(FOLDER / name, folder / name)
    return folder


def codes(folder: Path, bug: str) -> dict[str, int]:
    """Run all steps; their exit codes by name."""
    found, text = {}, ""
    for step in github_steps():
        if "run" in step and step["name"] != "Install":
            done = run(step["run"], folder, bug)
            found[step["name"]] = done.returncode
            text += f"== {step['name']}\n{done.stdout}{done.stderr}"
    (folder / "log").write_text(text)
    return found


def test_the_workflows_steps_pass_and_cover_what_only_ranks_run(tmp_path: Path) -> None:
    folder = project(tmp_path)
    assert set(codes(folder, "").values()) == {0}, (folder / "log").read_text()
    suites = ElementTree.parse(folder / "reports" / "junit.xml").getroot()
    assert [(each.get("tests"), each.get("failures")) for each in suites] == [("4", "0")]
    assert json.loads((folder / "reports" / "equal.json").read_text())["equal"] is True
    assert json.loads((folder / "reports" / "check.json").read_text()) == []
    assert list((folder / "reports" / "record").iterdir())
    # Lines of train.py and of the gradients are run in forked ranks alone.
    classes = ElementTree.parse(folder / "reports" / "coverage.xml").getroot().iter("class")
    rates = {each.get("filename"): float(each.get("line-rate") or 0) for each in classes}
    assert rates["train.py"] == 1 and rates["parallel.py"] == 1, rates


@pytest.mark.parametrize("bug", slow("1"))
def test_a_gradient_that_is_not_summed_fails_the_steps(tmp_path: Path, bug: str) -> None:
    found = codes(project(tmp_path), bug)
    assert found["Tests on simulated ranks"] == 1 and found["The same as on one rank"] == 1
    verdict = json.loads((tmp_path / "reports" / "equal.json").read_text())
    assert verdict["equal"] is False and verdict["first"]["reason"] == "never reduced"
    assert (tmp_path / "reports" / "equal.html").stat().st_size
    failures = ElementTree.parse(tmp_path / "reports" / "junit.xml").getroot()[0].get("failures")
    assert failures == "2"  # on 2 and on 4 ranks


def test_both_workflows_run_the_same_commands() -> None:
    def words(lines: list[str]) -> list[list[str]]:
        text = "\n".join(lines).replace("\\\n", " ")
        return [line.split() for line in text.splitlines() if line.strip()]

    runs = [step["run"] for step in github_steps() if "run" in step]
    job = gitlab_job()
    assert sorted(words(runs)) == sorted(words(job["before_script"] + job["script"]))
    assert re.search(job["coverage"].strip("/"), "TOTAL      71      0     16      0   100%")


def test_what_install_names_is_what_the_steps_have() -> None:
    (text,) = (step["run"] for step in github_steps() if step.get("name") == "Install")
    words = {re.split("[>=]", word.strip('"'))[0] for word in text.split()}
    named = words & {"torch", "pytest", "pytest-xdist", "coverage"}
    assert named == {"torch", "pytest", "pytest-xdist", "coverage"}
    for name in named:
        assert metadata.version(name)
    matrix = yaml.safe_load((FOLDER / "github-actions.yml").read_text())["jobs"]["ranks"]
    assert matrix["strategy"]["matrix"]["python"] == gitlab_job()["parallel"]["matrix"][0]["PYTHON"]


def test_the_page_has_the_files() -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    for name in ("github-actions.yml", "gitlab-ci.yml", ".coveragerc"):
        assert (FOLDER / name).read_text() in page, name


def test_the_pages_annotations_are_githubs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    (text,) = re.findall(r"^```\{\.yaml\}\n(.*?)^```$", page, re.M | re.S)
    (step,) = yaml.safe_load(text)
    (tmp_path / "reports").mkdir()
    row = {"site": "a/train.py:7", "kind": "unreduced", "text": "never\nreduced"}
    (tmp_path / "reports" / "check.json").write_text(json.dumps([row]))
    done = run(step["run"], tmp_path, "")
    assert done.stdout == "::error file=a/train.py,line=7::unreduced: never%0Areduced\n", done
