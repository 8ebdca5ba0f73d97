"""Twins: orders that reproduce, bit for bit, what a real engine's all-reduce gives.
`TWINS` has them by name; the rest asks the engines themselves, and is imported when needed."""

from .table import TWINS, Twin, nccl_ring

__all__ = ["TWINS", "Twin", "nccl_ring"]
