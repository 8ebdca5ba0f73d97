"""The CUDA kernels: fold, ragged copy and round for CuPy arrays, with the bits of `fallback`.
Their sources lie here as package data; CuPy compiles what is launched, when it is launched."""

from __future__ import annotations

from .launch import fold, ragged_copy, round_to, run_fold

__all__ = ["fold", "ragged_copy", "round_to", "run_fold"]
