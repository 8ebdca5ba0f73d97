"""What a user meets first, where the wheel is installed without extras.

python -I without_extras.py README.md PAGE..., in an empty folder, by the environment's Python.
Nothing of the tests can be imported here: the wheel does not hold them.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: The documented modules that need an extra, and that extra.
EXTRAS = {"jax": "jax", "poptorch_experimental_addons": "torch", "torch": "torch"}
COMMANDS = {
    "gpusim info": "pip install 'gpusim[study]'",
    "gpusim --help": "usage: gpusim ",
    "gc-info --list-devices": "-+- Id: [0]",
    "gc-monitor": "No attached processes",
    "poprun --help": "usage: poprun ",
}
#: These end with exit code 2, as nothing has run, and say which extra they need.
REFUSED = {
    "gpusim torchrun program.py": "torch",
    "gpusim jaxrun program.py": "jax",
    "gpusim demo": "study",
}


def example(readme: str) -> None:
    """The first example gives what it says."""
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert block, "README.md has no example"
    names: dict[str, Any] = {}
    results = []
    for statement in ast.parse(block[1]).body:
        if isinstance(statement, ast.Expr):
            code = compile(ast.Expression(statement.value), "README.md", "eval")
            results.append(repr(eval(code, names)))
        else:
            exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
    assert len(results) == 2 and results[0] == results[1], results
    assert f"# {results[0]}, " in block[1], results


def modules(pages: str) -> None:
    """The documented modules can be imported, or say which extra they need."""
    documented = set(re.findall(r"(?:^::: |`)gpusim\.(\w+)", pages, re.MULTILINE))
    found = sorted(name for name in documented if find_spec(f"gpusim.{name}"))
    assert {"lax", "collectives", "popxl", *EXTRAS} <= {*found}, found
    for name in found:
        if name not in EXTRAS:
            importlib.import_module(f"gpusim.{name}")
            continue
        try:
            importlib.import_module(f"gpusim.{name}")
        except ImportError as error:
            assert names_extra(str(error), EXTRAS[name]), f"gpusim.{name}: {error}"
        else:
            raise AssertionError(f"gpusim.{name} needs no extra: {EXTRAS[name]} is installed?")
    print(f"imported: {', '.join(name for name in found if name not in EXTRAS)}")


def names_extra(said: str, extra: str) -> bool:
    return f"pip install 'gpusim[{extra}]'" in said


def commands() -> None:
    """The commands run, or say which extra they need."""
    Path("program.py").touch()
    for command, expected in COMMANDS.items():
        done = subprocess.run(command.split(), capture_output=True, text=True)
        assert done.returncode == 0 and expected in done.stdout, (command, done)
    for command, extra in REFUSED.items():
        done = subprocess.run(command.split(), capture_output=True, text=True)
        assert done.returncode == 2 and names_extra(done.stderr, extra), (command, done)
        assert "Traceback" not in done.stderr, (command, done)
    print(f"ran: {', '.join([*COMMANDS, *REFUSED])}")


def main(readme: str, *pages: str) -> None:
    import gpusim

    assert gpusim.__file__.startswith(sys.prefix), gpusim.__file__
    example(readme)
    modules("\n".join([readme, *pages]))
    commands()


if __name__ == "__main__":
    main(*(Path(page).read_text(encoding="utf-8") for page in sys.argv[1:]))
