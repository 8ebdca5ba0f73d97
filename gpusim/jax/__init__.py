"""JAX programs on fake CPU devices: `lax.ragged_all_to_all`, and sums with chosen bits.

`install` puts the collectives into JAX, `installed` for a block, and `uninstall` takes them out.
Programs keep calling `jax.lax`.
"""

from __future__ import annotations

from gpusim.optional import load

load("gpusim.jax needs", "jax")

from .installation import Installation, install, installed, sums_of_xla, uninstall  # noqa: E402
from .sums import ReductionWarning  # noqa: E402

__all__ = [
    "Installation",
    "ReductionWarning",
    "install",
    "installed",
    "sums_of_xla",
    "uninstall",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
