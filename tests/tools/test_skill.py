"""SKILL.md and llms.txt are true: each command runs, its JSON has the keys, its codes hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE
from tests.tools.inner_runs import ROOT

SKILL = (ROOT / "SKILL.md").read_text()
SECTIONS = {
    section.partition("\n")[0]: section.partition("\n## ")[0]
    for section in SKILL.split("\n### ")[1:]
}
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
DISAGREE = "Deadlocks, mismatches, ranks that agree and are wrong"
EQUAL = "Does the parallel program compute what one rank computes?"
DIFFER = "Where do two runs begin to differ?"
RESUME = "Does a resumed run go on as if it was never interrupted?"
SURVIVE = "Does training survive ranks that die?"
MEASURE = "What does precision cost? In which order does an engine add?"


def shell(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run commands as a reader does; `gpusim` is this environment's."""
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "gpusim"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m gpusim "$@"\n')
    script.chmod(0o755)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COVERAGE"))}
    own["PATH"] = os.pathsep.join([str(script.parent), own["PATH"]])
    return subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=folder,
        env=own | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def parallel_program(folder: Path) -> None:
    for name in ("train.py", "parallel.py"):
        shutil.copy(ROOT / "examples" / "ci" / name, folder / name)


def resumable_program(folder: Path) -> None:
    programs = ROOT / "tests" / "resume" / "programs"
    shutil.copy(programs / "ddp.py", folder / "train.py")
    shutil.copy(programs / "common.py", folder / "common.py")


def faulty_program(folder: Path) -> None:
    shutil.copy(ROOT / "tests/check/planted/gradient_not_reduced_1.py", folder / "train.py")


def commands(title: str) -> str:
    (text,) = BLOCK.findall(SECTIONS[title])
    return str(text)


def keys(title: str, after: str = "JSON") -> list[str]:
    """The names in code, of a section's sentence on JSON."""
    text = re.search(rf"^{after}.*?(?=^Exit codes|\Z)", SECTIONS[title], re.M | re.S)
    assert text
    return re.findall(r"`(\w+)`", text[0])


def has(keys: list[str], data: Any) -> None:
    """All keys are somewhere in the JSON."""
    text = json.dumps(data)
    for key in keys:
        assert f'"{key}":' in text, (key, text[:2000])


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def disagree(folder: Path) -> None:
    parallel_program(folder)
    done = shell(commands(DISAGREE), folder)
    assert done.returncode == 0 and read(folder, "check.json") == [], done.stderr
    (folder / "check.json").unlink()
    faulty_program(folder)
    done = shell(commands(DISAGREE), folder)
    findings = read(folder, "check.json")
    assert done.returncode == 1 and findings
    has(keys(DISAGREE), findings)
    assert re.fullmatch(r".*train\.py:\d+", findings[0]["site"])
    (folder / "check.json").unlink()
    (folder / "train.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank(): dist.barrier()\n"
    )
    done = shell(commands(DISAGREE), folder)
    (finding,) = read(folder, "check.json")
    assert done.returncode == 1 and finding["kind"] == "uneven-calls"
    assert "rank 0 has returned" in done.stderr
    (folder / "train.py").write_text("raise KeyError('weights')\n")
    done = shell(commands(DISAGREE), folder)
    assert done.returncode == 1 and "KeyError: 'weights'" in done.stderr


def equal(folder: Path) -> None:
    parallel_program(folder)
    done = shell(commands(EQUAL), folder)
    assert done.returncode == 0 and read(folder, "equal.json")["equal"] is True, done.stderr
    done = shell(commands(EQUAL), folder, BUG="1")
    found = read(folder, "equal.json")
    assert done.returncode == 1 and found["equal"] is False
    has([*keys(EQUAL), "last_collective"], found)
    (folder / "train.py").write_text("raise SystemExit(3)\n")
    done = shell(commands(EQUAL), folder)
    assert done.returncode == 2 and "rank 0 ended with exit code 3" in done.stderr


def differ(folder: Path) -> None:
    parallel_program(folder)
    done = shell(commands(DIFFER).replace("nccl-ring", "linear"), folder)
    assert done.returncode == 0 and read(folder, "compare.json")["verdict"] is None, done.stderr
    shutil.rmtree(folder / "a")
    shutil.rmtree(folder / "b")
    source = (folder / "train.py").read_text()
    *before, last, compare = commands(DIFFER).splitlines()
    assert shell("\n".join(before), folder).returncode == 0
    (folder / "train.py").write_text(source.replace("lr=0.1", "lr=0.2"))
    assert shell(last, folder).returncode == 0
    done = shell(compare, folder)
    found = read(folder, "compare.json")
    assert done.returncode == 1 and found["equal"] is False
    has(["equal", "verdict", "rows", "classes"], found)
    assert {"cause", "interval"} <= set(found["verdict"])
    assert {"class", "words"} <= set(found["verdict"]["cause"])


def resume(folder: Path) -> None:
    resumable_program(folder)
    done = shell(commands(RESUME), folder)
    assert done.returncode == 0 and read(folder, "resume.json")["same"] is True, done.stderr
    wrong = commands(RESUME).rstrip() + " --bug optimizer-not-loaded"
    done = shell(wrong, folder)
    found = read(folder, "resume.json")
    assert done.returncode == 1 and found["same"] is False
    assert found["pairs"][0]["verdict"] == "different"
    has(["same", "pairs", "save", "load", "verdict", "first"], found)


def survive(folder: Path) -> None:
    parallel_program(folder)
    done = shell(commands(SURVIVE), folder)
    found = read(folder, "faults.json")
    assert done.returncode == 0, done.stderr
    assert sum(found["verdicts"].values()) == len(found["plans"]) == 2
    has(keys(SURVIVE), found)


def measure(folder: Path) -> None:
    done = shell(commands(MEASURE), folder)
    assert done.returncode == 0, done.stderr
    has(["rows", "replicas", "order", "relative_error"], read(folder, "study.json"))
    has(["engine", "calls", "trees"], read(folder, "reveal.json"))


QUICK = {DISAGREE: disagree, EQUAL: equal}
OTHERS = {DIFFER: differ, RESUME: resume, SURVIVE: survive, MEASURE: measure}


@pytest.mark.parametrize(
    ("title", "test"),
    [*QUICK.items(), *slow(*OTHERS.items())],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_each_command_does_what_the_skill_says(
    title: str, test: Callable[[Path], None], tmp_path: Path
) -> None:
    assert title in SECTIONS
    test(tmp_path)


@pytest.mark.rule
def test_all_sections_are_tested() -> None:
    assert set(SECTIONS) == set(QUICK) | set(OTHERS)


def test_wrong_usage_ends_with_2_and_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    lines = [line for text in BLOCK.findall(SKILL) for line in text.splitlines()]
    assert len(lines) > 6
    for line in lines:
        done = shell(re.sub(r"^gpusim \w+ ", r"\g<0>--no-such-option ", line), tmp_path)
        assert done.returncode == 2, (line, done.stderr)
        assert "--no-such-option" in done.stderr.splitlines()[-1], (line, done.stderr)


@pytest.mark.rule
def test_front_matter() -> None:
    head = re.match(r"---\nname: ([a-z-]{1,64})\ndescription: (.{1,1024})\n---\n", SKILL)
    assert head and head[1] == "gpusim"


@pytest.mark.rule
@pytest.mark.parametrize("name", ["SKILL.md", "llms.txt"])
def test_links_exist(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text())
    assert targets and all((ROOT / target).is_file() for target in targets), targets


@pytest.mark.rule
def test_llms_txt_has_the_parts_of_its_format() -> None:
    """A title, a summary, then sections that hold lists of links."""
    text = (ROOT / "llms.txt").read_text()
    assert re.match(r"# gpusim\n\n> [^\n]+\n\n", text)
    for section in text.split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        lines = [line for line in rest.splitlines() if line]
        assert lines and all(re.fullmatch(r"- \[[^]]+\]\([^)]+\): .+", line) for line in lines), (
            title
        )
