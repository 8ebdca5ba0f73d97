"""JAX programs on fake CPU devices: `lax.ragged_all_to_all`, and sums with chosen bits.

The sums are those that a program asks for, such as `lax.psum`, and those that XLA's partitioner
inserts into programs under `jit` with sharded arrays.

`install` puts the collectives into JAX, `installed` for a block, and `uninstall` takes them out.
Programs keep calling `jax.lax`.
"""

from __future__ import annotations

from gpusim.optional import load, tested

_version = load("gpusim.jax needs", "jax").__version__

try:
    from .installation import Installation, install, installed, sums_of_xla, uninstall
    from .sums import ReductionWarning
except (ImportError, AttributeError, KeyError) as error:
    raise ImportError(
        f"gpusim.jax replaces rules of JAX's that are private: it is tested with jax "
        f"{' and '.join(tested('jax'))}, and jax {_version} differs: {error}",
        name="jax",
    ) from error

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
