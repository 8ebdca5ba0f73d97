"""What the extra `study` brings, loaded when it is needed."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["need"]

PACKAGES = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}


def need(module: str, what: str) -> None:
    """ModuleNotFoundError, with the command that installs it, where `module` is missing."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(
            f"{what} need {PACKAGES[module]}: pip install 'gpusim[study]'", name=module
        )
