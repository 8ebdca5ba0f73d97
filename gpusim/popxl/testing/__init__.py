"""Lists of data types for tests of PopXL programs."""

from __future__ import annotations

from ._dtypes import get_all_dtypes, get_all_int_dtypes

__all__ = ["get_all_dtypes", "get_all_int_dtypes"]
