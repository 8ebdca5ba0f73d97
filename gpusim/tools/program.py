"""`gpusim run`: a program as Python itself would run it, after `import gpusim.aliases`.

sys.argv, sys.path, `__main__`, exit codes and tracebacks are those of `python script.py`.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

__all__ = ["CANNOT_OPEN", "run", "split"]

CANNOT_OPEN, FAILED = 2, 1  # Python's exit codes
IMPORTING = ("_bootstrap", "_bootstrap_external", "util")
OURS = tuple(f"<frozen importlib.{part}>" for part in IMPORTING)


@dataclass(frozen=True)
class UserProgram:
    """A program to run: its code, and its names for `sys`."""

    code: CodeType
    name: str  #: the first of sys.argv
    file: str
    folder: str  #: the first of sys.path
    spec: ModuleSpec | None = None  #: None for a script


class NoProgramError(Exception):
    """No program was found; the message says why, and the exit code is Python's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def split(
    arguments: Sequence[str], with_value: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Split the arguments: those of `gpusim run`, up to the program's name, and the program's.

    `with_value` are the options whose value is the next argument.

    >>> split(["-m", "train", "--help"])
    (['-m', 'train'], ['--help'])
    >>> split(["train.py", "-m", "x"])
    (['train.py'], ['-m', 'x'])
    >>> split(["--devices", "4", "train.py"], ["--devices"])
    (['--devices', '4', 'train.py'], [])
    """
    own = list(arguments)
    is_value = False
    for i, argument in enumerate(own):
        if is_value:
            is_value = False
            continue
        is_value = argument in with_value
        if argument in ("-m", "--module"):
            return own[: i + 2], own[i + 2 :]
        if argument.startswith("--module="):
            return own[: i + 1], own[i + 1 :]
        if argument.startswith("-m") or not argument.startswith("-") or argument == "-":
            return own[: i + 1], own[i + 1 :]
    return own, []


def run(script: str | None, module: str | None, arguments: Sequence[str]) -> int:
    """Run a script, or a module, with these arguments; its exit code, or 0.

    A program that ends with SystemExit or KeyboardInterrupt ends this process with it.
    """
    from gpusim import aliases  # not before: importing them gives this process the names

    aliases.install()
    sys.argv = [script or "-m", *arguments]
    try:
        program = found_module(module) if module is not None else found_script(str(script))
    except NoProgramError as error:
        print(f"gpusim run: {error}", file=sys.stderr)
        return error.code
    except SystemExit:
        raise
    except BaseException as error:  # a syntax error, or a package that fails
        return ended(error)
    sys.argv[0] = program.name
    lead_path(program.folder)
    return execute(program)


def execute(program: UserProgram) -> int:
    """Execute the program as `__main__`; its exit code, or 0."""
    try:
        exec(program.code, vars(main_module(program)))
    except SystemExit:
        raise
    except BaseException as error:
        return ended(error)
    return 0


# ---------------------------------------------------------------- finding it


def found_script(script: str) -> UserProgram:
    """A file, or a folder or an archive with a `__main__.py`."""
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        return found_in(script)
    path = os.path.join(os.getcwd(), script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        reason = f"can't open file {path!r}: {error.strerror}"
        raise NoProgramError(reason, CANNOT_OPEN) from None
    code = compile(source, path, "exec", dont_inherit=True)
    return UserProgram(code, script, path, os.path.dirname(os.path.realpath(script)))


def found_in(place: str) -> UserProgram:
    folder = os.path.abspath(place)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [folder])
    code = code_of(spec, "__main__")
    if spec is None or code is None:
        reason = f"can't find '__main__' module in {place!r}"
        raise NoProgramError(reason, FAILED)
    return UserProgram(code, place, str(spec.origin), folder, spec)


def found_module(name: str) -> UserProgram:
    """A module by its name, or a package's `__main__`."""
    lead_path(os.getcwd())
    if name.startswith("."):
        raise NoProgramError("Relative module names not supported", FAILED)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something itself
        spec = None
    if spec is None:
        raise NoProgramError(f"No module named {name}", FAILED)
    code = code_of(spec, name)
    if code is None:
        raise NoProgramError(f"No code object available for {name}", FAILED)
    return UserProgram(code, str(spec.origin), str(spec.origin), os.getcwd(), spec)


def code_of(spec: ModuleSpec | None, name: str) -> CodeType | None:
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code: CodeType | None = get_code(name) if get_code is not None else None
    return code


# ---------------------------------------------------------------- being it


def lead_path(folder: str) -> None:
    """Put the folder where Python puts a program's: in the place of gpusim's own."""
    if not sys.flags.safe_path:  # -P: no folder is added
        sys.path[0] = folder


def main_module(program: UserProgram) -> ModuleType:
    """A new `__main__`, as Python makes it."""
    main = ModuleType("__main__")
    spec = program.spec
    loader = importlib.machinery.SourceFileLoader("__main__", program.file)
    main.__file__ = program.file
    main.__spec__ = spec
    main.__loader__ = loader if spec is None else spec.loader
    main.__package__ = None if spec is None else spec.parent
    vars(main).update(__builtins__=builtins, __cached__=None if spec is None else spec.cached)
    sys.modules["__main__"] = main
    return main


# ---------------------------------------------------------------- ending


def ended(error: BaseException) -> int:
    """Show what the program raised, from its own first frame on, as Python does at the end."""
    sys.stdout.flush()
    error.__traceback__ = without_ours(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *shown: None
        raise error  # the process ends as one that was interrupted
    return FAILED


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither a tool's nor the import system's."""
    while traceback is not None and (
        traceback.tb_frame.f_code.co_filename in OURS
        or traceback.tb_frame.f_globals.get("__name__", "").startswith("gpusim.tools.")
    ):
        traceback = traceback.tb_next
    return traceback
