"""PopART's rewriting patterns, which have no effect."""

from __future__ import annotations

from gpusim.popxl._popart import Patterns, PatternsLevel

__all__ = ["Patterns", "PatternsLevel"]
