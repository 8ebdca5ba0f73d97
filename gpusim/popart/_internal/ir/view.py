"""Parts of tensors."""

from __future__ import annotations

from gpusim.popxl._popart import Region

__all__ = ["Region"]
