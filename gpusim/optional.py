"""Optional dependencies: look for one, load one, or say what to install.

A leaf: it imports nothing of gpusim.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["MissingPackageError", "PackageError", "available", "load", "require", "tested"]

# By module: the package's name in messages, and what installs it.
_PACKAGES = {
    "cupy": (
        "CuPy",
        "pip install 'gpusim[cuda13]' (or 'gpusim[cuda12]', for a driver of CUDA 12)",
    ),
    "jax": ("JAX", "pip install 'gpusim[jax]'"),
    "matplotlib": ("matplotlib", "pip install 'gpusim[study]'"),
    "mpi4py": ("mpi4py and an MPI library", "pip install 'gpusim[mpi]'"),
    "xxhash": ("xxhash", "pip install 'gpusim[mpi]'"),
    "rich": ("rich", "pip install 'gpusim[study]'"),
    "sklearn": ("scikit-learn", "pip install 'gpusim[study]'"),
    "torch": ("PyTorch", "pip install 'gpusim[torch]'"),
}

_TESTED = {"jax": ("0.10.2", "0.12.0.1")}


class PackageError(ImportError):
    """An optional package that is needed cannot be imported; commands end with exit code 2."""


class MissingPackageError(PackageError, ModuleNotFoundError):
    """An optional package that is needed is not installed.

    >>> issubclass(MissingPackageError, ModuleNotFoundError)
    True
    """


def tested(module: str) -> tuple[str, ...]:
    """The versions that the tests run with, of a module whose private parts gpusim uses."""
    return _TESTED[module]


def available(module: str) -> bool:
    """Whether `module` is installed. Does not import it.

    >>> available("numpy"), available("no_such_module")
    (True, False)
    """
    return find_spec(module) is not None


def require(user: str, *modules: str) -> None:
    """Check that modules are installed, without importing them.

    **Arguments**:

    - `user`: who needs them, with the verb: the beginning of the error's message.
    - `modules`: the names of the top-level modules.

    **Raises**: MissingPackageError, which names the missing packages and the command that installs
    them.

    >>> require("tables need", "numpy")
    >>> require("tables need", "no_such_module")
    Traceback (most recent call last):
    gpusim.optional.MissingPackageError: tables need no_such_module: pip install no_such_module
    """
    missing = [module for module in modules if not available(module)]
    if missing:
        raise MissingPackageError(_message(user, missing), name=missing[0])


def load(user: str, module: str) -> Any:
    """Import an optional module; a dotted name is a submodule of an optional package.

    **Arguments**: as for `require`.

    **Returns**: the module.

    **Raises**: MissingPackageError as `require`; PackageError with the same message if the package
    is installed and cannot be imported. Its cause says why.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        require(user, package)
        raise PackageError(_message(user, [package]), name=module) from error


def _message(user: str, modules: list[str]) -> str:
    found = [_PACKAGES.get(module, (module, f"pip install {module}")) for module in modules]
    names = ", ".join(name for name, _ in found)
    return f"{user} {names}: {found[0][1]}"
