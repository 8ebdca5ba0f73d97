"""The batched rules, one family of NumPy functions a file; importing this package registers them all."""

from . import ufuncs

__all__ = ["ufuncs"]
