"""MappedArray and the batched rules that compute with it."""

from . import dispatch, rules, updates, writing
from .array import MappedArray
from .updates import at

__all__ = ["MappedArray", "at", "dispatch", "rules"]

dispatch.install(MappedArray)
updates.install(MappedArray)
writing.install(MappedArray)
