"""The IPU wing is a layer by itself: nothing but commands for IPUs imports it, or has its words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import gpusim
from tests.project.test_layering import FILES, LAYERS, ROOT, imports, top

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


def test_the_wing_is_above_all_but_tools() -> None:
    layers = [line.split() for line in LAYERS.strip().split("\n")]
    first, last = (layers.index([name]) for name in ("standins", "devices"))
    assert [name for line in layers[first : last + 1] for name in line] == WING
    assert layers[:first] == [["__main__", "equal", "study", "testing"], ["tools"]]


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
