"""Precision studies by their public name; the implementation is `gpusim.tools.study`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("gpusim.tools.study"), name)


def __dir__() -> list[str]:
    return sorted(import_module("gpusim.tools.study").__all__)
