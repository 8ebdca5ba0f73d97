"""docs/jax.md shows what programs print. Its Python runs, and the recipe of docs/testing.md too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax import page
from tests.jax.page import CASE, DEVICES, PAGE, PROGRAMS, ROOT, Found
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

TITLED = re.compile(r'^```\{\.py title="(?P<name>\w+\.py)"\}\n(?P<text>.*?)^```$', re.M | re.S)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python, which has neither devices nor flags for XLA from this process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_ENABLE_X64", "XLA_FLAGS"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def equal_rows(column: dict[str, Found]) -> set[frozenset[str]]:
    """The Reductions that have the same digest."""
    digests = {found.digest for found in column.values()}
    return {frozenset(r for r in column if column[r].digest == each) for each in digests}


@pytest.mark.parametrize("program", [PROGRAMS[0], *slow(*PROGRAMS[1:])])
def test_programs_train_to_what_the_page_shows(program: str) -> None:
    """All digits where XLA's own are those of the page: its code differs between CPUs."""
    shown = page.read_table(page.part("table"))[program]
    found = page.cells_of(program)
    assert equal_rows(found) == equal_rows(shown)
    for reduction, cell in shown.items():
        assert float(found[reduction].loss) == pytest.approx(float(cell.loss), rel=1e-3)
    if found[""] == shown[""]:
        assert found == shown


def test_the_case_names_the_sum_of_the_page() -> None:
    shown = " ".join(page.part("case").split())
    said = page.case()
    for command in CASE:
        assert f"$ {command} " in shown
    cause, size = said[CASE[-1]]
    assert re.sub(r"bfloat16\[.*?\]", "", cause) in re.sub(r"bfloat16\[.*?\]", "", shown)
    assert re.fullmatch(r"[\d,]+ of 8,192 elements of the results differ, .*", size)


def test_a_table_is_read_as_it_is_written() -> None:
    cells = {text: Found(f"0.{len(text)}", f"{len(text):08x}") for text in page.REDUCTIONS}
    columns = {"a.py": cells, "b.py": cells}
    assert page.read_table(page.table(columns)) == columns


def test_python_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) > 3
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = python("-W", "error::gpusim.jax.ReductionWarning", "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_recipe_for_tests_passes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "testing.md").read_text().partition("\n## JAX programs")[2]
    files = {match["name"]: match["text"] for match in TITLED.finditer(text)}
    assert "conftest.py" in files and f'"{DEVICES}"' in files["conftest.py"]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout
