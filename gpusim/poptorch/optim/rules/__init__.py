"""How optimizers update weights: one rule each, on lists of float32 tensors, in place."""

from __future__ import annotations

from .adam import Adam
from .batch import Batch, Rule, Slot
from .lamb import LAMB
from .rmsprop import RMSprop
from .sgd import CombinedSGD, SeparateSGD

__all__ = ["LAMB", "Adam", "Batch", "CombinedSGD", "RMSprop", "Rule", "SeparateSGD", "Slot"]
