"""PopART's internal modules. Programs use `ir`: the classes of ops."""

from __future__ import annotations

from . import ir

__all__ = ["ir"]
