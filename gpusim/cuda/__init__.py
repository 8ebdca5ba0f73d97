"""The CUDA kernels: fold, ragged copy, round and scatter for CuPy arrays, with NumPy's bits.
Their sources lie here as package data; CuPy compiles what is launched, when it is launched."""

from __future__ import annotations

from .launch import fold, ragged_copy, round_to, run_fold, update_at
from .scatter import has_update

__all__ = ["fold", "has_update", "ragged_copy", "round_to", "run_fold", "update_at"]
