"""The part of JAX's private interface that gpusim uses does what gpusim takes it to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jax import child
from tests.oracles.machine_time import PATIENCE

ROOT = child.ROOT / "gpusim"
PRIVATE = ROOT / "jax" / "private.py"
SOURCES = [path for path in ROOT.rglob("*.py") if path != PRIVATE]
NAMES = Path(__file__).with_name("private_names.py")

MODULES = "jax._src", "jaxlib"
"""Everything in these is private, whatever its name."""

DIALECTS = "compiler", "hlo", "sdy"
"""Modules of private.py of which each name that gpusim uses has a test."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of JAX that a module mentions; jaxlib itself has a version."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name != "jaxlib"]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            names = [text] if text != "jaxlib.__version__" else []
        else:
            continue
        for name in names:
            if name.startswith(tuple(f"{module}." for module in MODULES)) or name in MODULES:
                yield name
            elif re.match(r"jax\.([a-zA-Z.]*\.)?_[a-zA-Z]", name):
                yield name


@pytest.mark.rule
def test_nothing_private_is_used_elsewhere() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := set(private_names(ast.parse(path.read_text()))))
    }
    assert not found, "these belong into gpusim/jax/private.py, each with a test"


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax._src.lax import parallel",
        "from jaxlib import _jax",
        "from jaxlib.mlir import ir",
        "import jaxlib.xla_client",
        "jax._src.core.Tracer",
        "jax.lax._private(3)",
        "jaxlib._jax.Client",
    ],
)
def test_what_is_private_is_found(source: str) -> None:
    assert [*private_names(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "import jax, jaxlib",
        "from jax.extend.mlir import ir",
        "from jax import lax",
        "jax.ffi.register_ffi_target",
        "jaxlib.__version__",
        "jax.__version__",
    ],
)
def test_what_is_public_is_not(source: str) -> None:
    assert not [*private_names(ast.parse(source))]


def public_names() -> set[str]:
    """The names of private.py: those that it defines, and those of JAX's that it passes on."""
    found = set()
    for node in ast.parse(PRIVATE.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for one in targets for each in ast.walk(one) if hasattr(each, "id")}
            if "__all__" in found and node.value is not None:
                found |= set(ast.literal_eval(node.value)) if found & {"__all__"} else set()
                found.discard("__all__")
    return {name for name in found if not name.startswith("_")}


def mentioned(text: str) -> set[str]:
    """The names of private.py in a source, those of its modules with a dot."""
    found = set(re.findall(r"\bprivate\.(\w+)", text))
    dotted = re.findall(rf"\bprivate\.((?:{'|'.join(DIALECTS)})\.\w+)", text)
    return found | set(dotted)


@pytest.mark.rule
def test_every_name_has_a_test() -> None:
    tested = mentioned(NAMES.read_text())
    assert public_names() - tested == set()
    used = set().union(*(mentioned(path.read_text()) for path in (ROOT / "jax").rglob("*.py")))
    assert {name for name in used if "." in name} - tested == set()


def checks() -> list[str]:
    """The functions of private_names.py that take nothing."""
    return [
        node.name
        for node in ast.parse(NAMES.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.args.args
    ]


def test_each_name_does_what_it_is_taken_to_do() -> None:
    assert len(checks()) > 10
    child.run(4, *(f"private_names:{name}" for name in checks()), timeout=PATIENCE)
