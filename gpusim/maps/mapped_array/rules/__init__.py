"""The batched rules, one family of NumPy functions a file; importing this package registers them
all."""

from . import (
    creation,
    elementwise,
    fft,
    indexing,
    joining,
    linalg,
    ordering,
    products,
    reductions,
    shapes,
    ufuncs,
)

__all__ = [
    "creation",
    "elementwise",
    "fft",
    "indexing",
    "joining",
    "linalg",
    "ordering",
    "products",
    "reductions",
    "shapes",
    "ufuncs",
]
