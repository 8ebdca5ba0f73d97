"""Imports point one way, whether at the top of a module, in a function or for type checking."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import gpusim

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
#: The wing of IPU interfaces. Only commands for IPUs import it, and `gpusim`, whose public names
#: include the function `gpusim.devices`.
WING = """
    standins aliases popart popxl popdist poptorch_experimental_addons poptorch devices
""".split()
MAY_IMPORT_THE_WING = {
    "gpusim": {"gpusim.devices"},
    "gpusim.tools.launch.command": {"gpusim.devices.command", "gpusim.devices.table"},  # poprun
    "gpusim.tools.program": {"gpusim.aliases"},  # gpusim run
    "gpusim.tools.schedule": {
        "gpusim.poptorch.schedule.picture",
        "gpusim.poptorch.schedule.tasks",
    },
}
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
    assert sorted(upward) == ["gpusim imports gpusim.devices"]


def test_the_wing_is_above_all_but_tools() -> None:
    layers = [line.split() for line in LAYERS.strip().split("\n")]
    first, last = (layers.index([name]) for name in ("standins", "devices"))
    assert [name for line in layers[first : last + 1] for name in line] == WING
    assert layers[:first] == [["__main__", "study"], ["tools"]]


def test_only_commands_for_ipus_import_the_wing() -> None:
    imported = {
        module: {other for other in imports(module, for_types=True) if top(other) in WING}
        for module in FILES
        if top(module) not in WING
    }
    assert {module: names for module, names in imported.items() if names} == MAY_IMPORT_THE_WING


#: IPU interfaces' names in other code: public names that stay where they are, and a launcher's
#: variables.
IPU_WORDS = re.compile(
    r"(?i:poptorch|popxl|popdist|popart|poprun|comm_?group|fpx)|(?<![a-z])ipu|I(?i:pu)"
)
KNOWN_WORDS = {
    "gpusim": {"CommGroupType", "quantise_fpx"},  # neither is in dir(gpusim)
    "gpusim.groups": {"CommGroupType", "from_comm_group"},
    "gpusim.rounding": {"quantise_fpx"},
    "gpusim.runtime.environment": {"IPUS", "PopDist", "ipus_per_replica", "popdist"},
}
IPU_COMMANDS = ("gpusim.tools.launch.", "gpusim.tools.schedule")


def words(module: str) -> set[str]:
    """The names of IPU interfaces that a module's code defines, imports or uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        for field in ("name", "asname", "id", "attr", "arg"):
            names.add(str(getattr(node, field, "")))
    return {name for name in names if IPU_WORDS.search(name) and name.isidentifier()}


def test_names_of_ipu_interfaces_stay_in_the_wing() -> None:
    others = [
        module
        for module in FILES
        if top(module) not in WING and not f"{module}.".startswith(IPU_COMMANDS)
    ]
    found = {module: words(module) for module in others}
    assert {module: names for module, names in found.items() if names} == KNOWN_WORDS
    listed = {name for name in dir(gpusim) if IPU_WORDS.search(name)}
    assert listed <= set(WING)  # modules that another test has imported


PROGRAM = """
import sys
import gpusim.jax, gpusim.lax, gpusim.recording, gpusim.study, gpusim.torch.distributed
import gpusim.tools.cli, gpusim.tools.compare.command, gpusim.tools.demo.training
import gpusim.tools.hub, gpusim.tools.info, gpusim.tools.jaxrun, gpusim.tools.records
import gpusim.tools.testing.mark, gpusim.tools.torchrun, gpusim.tools.twins.command
gpusim.lax.psum  # of the modules that are imported late
names = [name.split(".") for name in sys.modules]
print(*(name[0] for name in names if name[0] in {wing}))
print(*(name[1] for name in names if name[0] == "gpusim" and name[1:2] and name[1] in {wing}))
"""


def test_nothing_else_loads_the_wing() -> None:
    """The function `gpusim.devices` is there, and of the wing nothing but its package."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(wing=WING)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    outside, inside = done.stdout.split("\n")[:2]
    assert outside == ""
    assert set(inside.split()) == {"devices"}


@pytest.mark.parametrize("package", ["gpusim.maps", "gpusim.popxl"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    inside = [module for module in FILES if f"{module}.".startswith(f"{package}.")]
    graph = {
        module: {other for other in imports(module, for_types=False) if other in inside} - {module}
        for module in inside
    }
    list(TopologicalSorter(graph).static_order())  # a CycleError names the circle
