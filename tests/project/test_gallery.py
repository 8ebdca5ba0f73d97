"""Each program of the gallery agrees with one replica, draws its picture, and is on its page."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GALLERY = sorted((ROOT / "examples" / "gallery").glob("*.py"))
PAGE = (ROOT / "docs" / "gallery.md").read_text()


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_the_page_shows_what_the_program_prints(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(path))["main"]()  # compares itself with one replica
    name = path.relative_to(ROOT)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("agreed with ")
    assert f"$ python {name}\n{printed}```" in PAGE
    assert f'--8<-- "{name}"' in PAGE
    assert len(path.read_text().splitlines()) < 80  # a screen


@pytest.mark.parametrize("path", [path for path in GALLERY if "picture" in path.read_text()])
def test_pictures_are_drawn(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    runpy.run_path(str(path))["main"](str(picture))
    assert b"<svg" in picture.read_bytes()
    assert f"images/gallery-{path.stem.replace('_', '-')}." in PAGE
