"""Imports point one way, whether at the top of a module, in a function or for type checking."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the top: a module imports modules of its own package, and of lines below.
LAYERS = """
    __main__ study
    tools
    standins
    aliases
    popart
    popxl
    popdist poptorch_experimental_addons
    poptorch
    devices
    gpusim
    torch jax
    lax random rounding tree
    maps
    collectives
    runtime
    compiled
    cuda
    figures reduction
    twins
    recording wires
    errors files formats groups libraries optional startup trees version
    fallback
    module_alias
"""
RANKS = {name: rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in (ROOT / "gpusim", ROOT / "gpusim" / "fallback")  # rglob follows no link
    for path in folder.rglob("*.py")
}


def imports(module: str, *, for_types: bool) -> Iterator[str]:
    """The modules of this project that a module imports anywhere in its text."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    nodes: list[ast.AST] = [ast.parse(FILES[module].read_text())]
    for node in nodes:  # grows on the way
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            found = [f"{origin}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else origin for name in found]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        yield from (name for name in names if name in FILES)


def top(module: str) -> str:
    """The part of `gpusim` that a module belongs to; "gpusim" for `gpusim/__init__.py`."""
    root, _, rest = module.partition(".")
    return rest.partition(".")[0] if rest and root == "gpusim" else root


def test_every_part_has_a_layer() -> None:
    assert {top(module) for module in FILES} == set(RANKS)


def test_imports_point_down() -> None:
    upward = {
        f"{module} imports {other}"
        for module in FILES
        for other in imports(module, for_types=True)
        if top(module) != top(other) and RANKS[top(module)] >= RANKS[top(other)]
    }
    assert sorted(upward) == ["gpusim imports gpusim.devices"]  # for its function


@pytest.mark.parametrize("package", ["gpusim.maps", "gpusim.popxl"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    inside = [module for module in FILES if f"{module}.".startswith(f"{package}.")]
    graph = {
        module: {other for other in imports(module, for_types=False) if other in inside} - {module}
        for module in inside
    }
    list(TopologicalSorter(graph).static_order())  # a CycleError names the circle
