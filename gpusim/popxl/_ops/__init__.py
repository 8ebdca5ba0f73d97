"""What ops are made of: their definitions, the ops of a graph, and how one is added to it."""

from __future__ import annotations
