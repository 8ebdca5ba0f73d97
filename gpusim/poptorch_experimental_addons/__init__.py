"""poptorch-experimental-addons on simulated replicas. Needs PyTorch.

Collectives, sharded products, block-sparse products, proxies of gradients, and small floating-point
formats, by the names of the original.
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec

if _find_spec("torch") is None:
    raise ImportError(
        "gpusim.poptorch_experimental_addons needs PyTorch: pip install 'gpusim[torch]'"
    )

from . import collectives, sharded, sparse
from ._impl.core import (
    autograd_proxy,
    distance_matrix,
    quantise_fpx,
    quantise_fpx_grad,
    quantise_fpx_ste,
)

__all__ = [
    # between replicas
    "collectives",
    "sharded",
    # block-sparse matrices
    "sparse",
    # the gradient of another tensor
    "autograd_proxy",
    # distances
    "distance_matrix",
    # small formats
    "quantise_fpx",
    "quantise_fpx_ste",
    "quantise_fpx_grad",
]
