"""PopART's internal modules, of which programs look at `ir`: the classes of ops."""

from __future__ import annotations

from . import ir

__all__ = ["ir"]
