"""The version of PopTorch whose interface this is."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "3.3.0+gpusim"
