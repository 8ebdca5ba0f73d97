"""Where the original keeps what it exports, by the same names of modules."""

from __future__ import annotations
