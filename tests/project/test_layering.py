"""Imports point one way, whether at the top of a module, in a function or for type checking."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the top: a module imports modules of its own package, and of lines below.
LAYERS = """
    __main__ equal study testing
    tools
    standins
    aliases
    popart
    popxl
    popdist poptorch_experimental_addons
    poptorch
    devices
    gpusim
    torch jax delayed
    lax random rounding tree
    maps
    collectives
    runtime
    compiled
    cuda
    figures reduction
    revealed twins
    recording wires
    platforms
    bounded_arrays bounded_json errors files formats groups libraries optional startup trees
    version words
    fallback
    module_alias
"""


def _ranked(layers: str) -> dict[str, int]:
    return {name: rank for rank, line in enumerate(layers.split("\n")) for name in line.split()}


RANKS = _ranked(LAYERS)
# The circles among imports that there may be, by the package that holds each. The graphs, tensors
# and operations of PopXL's data model refer to each other: their types alone make the circle. So
# do a rank and what it calls in torch.distributed, and a rank's watch and the parts of its check.
PERMITTED: dict[bool, list[str]] = {
    False: [],  # at run time
    True: [
        "gpusim.popxl",
        "gpusim.torch.distributed",
        "gpusim.torch.distributed.checks",
    ],  # imports for type checking included
}
# The same inside of torch.distributed, at run time.
ROOMS = """
    launching
    faults
    checks
    runners
    calls accelerator
    own
    private_calls private_checks private_files
    private_groups
    private memory tracebacks
"""
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in (ROOT / "gpusim", ROOT / "gpusim" / "fallback")  # rglob follows no link
    for path in folder.rglob("*.py")
}


@functools.cache
def imports(module: str, *, for_types: bool) -> set[str]:
    """The other modules of this project that a module imports anywhere in its text."""
    names = _names(module)[for_types]
    return {name for name in names if name in FILES} - {module}


@functools.cache  # reading and parsing all modules takes seconds
def _names(module: str) -> tuple[list[str], list[str]]:
    """The names that a module imports: when it runs, and with those for type checking."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    at_run_time: list[str] = []
    for_types: list[str] = []
    nodes: list[ast.AST] = [ast.parse(FILES[module].read_text())]
    for node in nodes:  # grows on the way
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            inside = (each for line in node.body for each in ast.walk(line))
            for_types += (name for each in inside for name in _imported(each, package))
            nodes += node.orelse
        else:
            at_run_time += _imported(node, package)
            nodes += ast.iter_child_nodes(node)
    return at_run_time, at_run_time + for_types


def _imported(node: ast.AST, package: str) -> list[str]:
    """The names that one statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = resolve_name("." * node.level + (node.module or ""), package)
        found = [f"{origin}.{alias.name}" for alias in node.names]
        return [name if name in FILES else origin for name in found]
    if isinstance(node, ast.Call) and _name_of(node.func) == "import_module":
        return [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return []


def _name_of(function: ast.expr) -> str:
    """The last name of a called function; ast.unparse of each takes seconds."""
    return getattr(function, "attr", getattr(function, "id", ""))


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


def test_imports_of_simulated_torch_distributed_point_down() -> None:
    package, ranks = "gpusim.torch.distributed.", _ranked(ROOMS)

    def room(module: str) -> str:
        return module.removeprefix(package).partition(".")[0]

    modules = [module for module in FILES if module.startswith(package)]
    upward = {
        f"{module} imports {other}"
        for module in modules
        for other in imports(module, for_types=False)
        if other.startswith(package) and room(module) != room(other)
        if ranks[room(module)] >= ranks[room(other)]
    }
    assert {room(module) for module in modules} == set(ranks)
    assert not upward


def test_a_circle_is_found_with_all_its_modules() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f", "a"}, "f": {"e"}}
    assert circles(graph) == {frozenset("abc"), frozenset("ef")}


@pytest.mark.parametrize("for_types", [False, True], ids=["at run time", "for types too"])
def test_no_module_imports_itself_through_others(for_types: bool) -> None:
    graph = {module: imports(module, for_types=for_types) for module in FILES}
    circular = sorted((package_of(circle), sorted(circle)) for circle in circles(graph))
    assert [package for package, _ in circular] == PERMITTED[for_types], circular


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each imports all others, through any number of modules."""
    below = {module: reached(graph, module) for module in graph}
    return {
        frozenset(other for other in others if module in below[other])
        for module, others in below.items()
        if module in others
    }


def reached(graph: Mapping[str, set[str]], module: str) -> set[str]:
    """All that a module imports, itself or through others."""
    result: set[str] = set()
    left = [*graph[module]]
    while left:
        if (other := left.pop()) not in result:
            result.add(other)
            left += graph[other]
    return result


def package_of(circle: Iterable[str]) -> str:
    """The innermost package that holds all modules of a circle."""
    levels = zip(*(module.split(".") for module in circle), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len({*level}) == 1, levels))
