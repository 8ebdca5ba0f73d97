"""What the package exports at its top."""

from __future__ import annotations

from .distances import distance_matrix
from .proxy import autograd_proxy
from .quantise import quantise_fpx, quantise_fpx_grad, quantise_fpx_ste

__all__ = [
    "autograd_proxy",
    "distance_matrix",
    "quantise_fpx",
    "quantise_fpx_ste",
    "quantise_fpx_grad",
]
