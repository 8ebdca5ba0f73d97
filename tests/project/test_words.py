"""Messages take their plurals from `gpusim.words`: none says "1 ranks" or "all 2 ranks"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpusim
from gpusim.words import count, every, plural

PACKAGE = Path(gpusim.__file__).parent
FOLDERS = (
    "tools/demo", "tools/equal", "tools/faults", "tools/launch", "tools/resume", "tools/reveal",
    "tools/twins", "torch/distributed/calls", "torch/distributed/runners",
)  # fmt: skip
FILES = tuple(f"tools/{name}.py" for name in (
    "arrivals", "cli", "elastic", "error_files", "findings", "hub", "info", "jaxrun", "members",
    "options", "orders", "outputs", "program", "records", "run", "schedule", "torchrun",
))  # fmt: skip
NOUNS = (
    "calls", "collectives", "devices", "elements", "files", "findings", "instances", "plans",
    "processes", "ranks", "replicas", "runs", "seeds", "steps", "tensors", "trees", "twins",
)  # fmt: skip
ALONE = ("tools/reveal/reveal_order.py", "tools/reveal/gloo_ranks.py", "tools/twins/workers")
"""Programs that run where gpusim is not."""
MEANT = {
    "{MOST_COPIED} files": "a constant",
    "{ranks[-1]} ranks": "the end of a range",
    "{number} runs": "a verb: --check-order 3 runs it again",
    "{rank.index} calls": "a verb: rank 3 calls",
    "{layout.replicas} replicas": "more than a host has IPUs for",
    "{len(layout.instances)} instances": "the same",
    "{len(tensors)} tensors": "not the one that is expected",
    "{expected} tensors": "as torch's own message",
    "{self.size} ranks": "as torch's own message",
    "{source.size} elements": "as torch's own message",
    "{instances.instances} instances": "of a World of several",
    "{len(self.local_ranks())} processes": "of a launch by processes",
    "{elements} elements": "of a type, without a comma",
}


def slips(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The f-strings that put a number before a plural."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                    continue
                word = str(text.value)[1:].split(" ")[0].rstrip(".,;:)\n")
                if str(text.value).startswith(" ") and word in NOUNS:
                    yield node.lineno, f"{{{ast.unparse(value.value)}}} {word}"


def modules() -> list[Path]:
    folders = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    files = [*folders, *(PACKAGE / name for name in FILES)]
    alone = [PACKAGE / name for name in ALONE]
    return [path for path in files if not any(path.is_relative_to(each) for each in alone)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('f"on {ranks} ranks"', "{ranks} ranks"),
        ('f"{n:,} elements, of"', "{n} elements"),
        ("f\"{count(n, 'rank')} of {name}\"", ""),
        ('f"ranks {a}"', ""),
    ],
)
def test_slips_are_found(text: str, found: str) -> None:
    assert [each for _, each in slips(ast.parse(text))] == [found] * bool(found)


def test_messages_take_their_plurals_from_words() -> None:
    used, wrong = set(), []
    for path in modules():
        for line, text in slips(ast.parse(path.read_text())):
            used.add(text)
            if text not in MEANT:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {text}")
    assert not wrong
    assert used == {*MEANT}  # none is left of a message that is gone


def test_words_of_one_two_and_more() -> None:
    assert [count(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [every(n, "rank") for n in (1, 2, 3)] == ["the rank", "both ranks", "all 3 ranks"]
    assert plural("boy", 2) == "boys" and plural("fly", 2) == "flies"
