"""All data types, and all integer types."""

from __future__ import annotations

from .. import dtypes

__all__ = ["get_all_dtypes", "get_all_int_dtypes"]


def get_all_dtypes() -> list[dtypes.dtype]:
    """All data types.

    >>> [dtype.name for dtype in get_all_dtypes()][:3]
    ['bool', 'complex64', 'complex128']
    """
    named = (getattr(dtypes, name) for name in dtypes.__all__)
    return list(dict.fromkeys(each for each in named if isinstance(each, dtypes.dtype)))


def get_all_int_dtypes(
    include_signed: bool = True, include_unsigned: bool = True
) -> list[dtypes.dtype]:
    """All integer types: signed ones, unsigned ones, or both.

    >>> [dtype.name for dtype in get_all_int_dtypes(include_signed=False)]
    ['uint8', 'uint16', 'uint32', 'uint64']
    """
    included = {True: include_signed, False: include_unsigned}
    return [dtype for dtype in get_all_dtypes() if dtype.is_int and included[dtype.is_signed]]
