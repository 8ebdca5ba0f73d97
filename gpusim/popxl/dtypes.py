"""PopXL's data types: constants such as `float32`, each with its NumPy dtype.

The 8-bit floats are ml_dtypes' float8_e4m3fnuz and float8_e5m2fnuz, which have the IPU's bits.
"""

from __future__ import annotations

import builtins
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "bool",
    "complex64",
    "complex128",
    "double",
    "dtype",
    "float",
    "float8_143",
    "float8_152",
    "float16",
    "float32",
    "float64",
    "half",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


class dtype:
    """One of PopXL's data types; this module has all of them.

    >>> dtype.as_dtype(np.float16), float32.is_floating_point, uint32.as_numpy()
    (popxl.dtypes.float16, True, dtype('uint32'))
    """

    _name: str
    _numpy: np.dtype[Any]
    _kind: str

    def __init__(self) -> None:
        raise TypeError("Cannot create popxl.dtypes.dtype instances.")

    @property
    def name(self) -> str:
        """Its name, such as "float32"."""
        return self._name

    @property
    def is_complex(self) -> builtins.bool:
        """Whether its values are complex."""
        return self._kind == "c"

    @property
    def is_int(self) -> builtins.bool:
        """Whether its values are integers. bool is not an integer type."""
        return self._kind in "iu"

    @property
    def is_floating_point(self) -> builtins.bool:
        """Whether its values are floating-point numbers, including 8-bit floats."""
        return self._kind == "f"

    @property
    def is_signed(self) -> builtins.bool:
        """Whether it has negative values."""
        return self._kind in "ifc"

    @classmethod
    def from_name(cls, name: str) -> dtype:
        """The data type with a name; ValueError if there is none."""
        try:
            return _BY_NAME[name]
        except (KeyError, TypeError):
            raise ValueError(f"There is not a `popxl.dtype` that has a name: {name}.") from None

    @classmethod
    def as_dtype(cls, type_value: Any) -> dtype:
        """The data type for a NumPy dtype, a name, a Python type, an array or a tensor.

        **Raises**: ValueError: if there is none.
        """
        if isinstance(type_value, dtype):
            return type_value
        if isinstance(type_value, str) and type_value in _BY_NAME:
            return _BY_NAME[type_value]
        if isinstance(type_value, type) and type_value in _BY_PYTHON:
            return _BY_PYTHON[type_value]
        name = str(type_value).removeprefix("torch.")
        if type(type_value).__module__ == "torch" and name in _BY_NAME:
            return _BY_NAME[name]
        try:
            source = (
                type_value if isinstance(type_value, type) else getattr(type_value, "dtype", None)
            )
            return _BY_NUMPY[np.dtype(type_value if source is None else source)]
        except (TypeError, KeyError):
            raise ValueError(
                f"There is not a `popxl.dtype` that is compatible with value: {type_value}, "
                f"type: {type(type_value)}."
            ) from None

    def as_numpy(self) -> np.dtype[Any]:
        """The NumPy dtype with the same values."""
        return self._numpy

    def as_torch(self) -> Any:
        """The torch dtype with the same values.

        **Raises**

        - ModuleNotFoundError: without torch.
        - TypeError: if torch has none.
        """
        try:
            import torch
        except ModuleNotFoundError:
            raise ModuleNotFoundError("PyTorch is not installed.") from None
        result = getattr(torch, _TORCH_NAMES.get(self._name, self._name), None)
        if not isinstance(result, torch.dtype):
            raise TypeError(f"`popxl.{self._name}` does not have a corresponding PyTorch dtype.")
        return result

    def __repr__(self) -> str:
        return f"popxl.dtypes.{self._name}"

    def __copy__(self) -> dtype:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dtype:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return dtype.from_name, (self._name,)


_BY_NAME: dict[str, dtype] = {}
_BY_NUMPY: dict[np.dtype[Any], dtype] = {}
_TORCH_NAMES = {"float8_143": "float8_e4m3fnuz", "float8_152": "float8_e5m2fnuz"}


def _new(name: str, numpy_type: Any, kind: str) -> dtype:
    new = object.__new__(dtype)
    new._name, new._numpy, new._kind = name, np.dtype(numpy_type), kind
    _BY_NAME[name] = _BY_NUMPY[new._numpy] = new
    return new


np_dtype_float8_143 = np.dtype(ml_dtypes.float8_e4m3fnuz)
np_dtype_float8_152 = np.dtype(ml_dtypes.float8_e5m2fnuz)
int8 = _new("int8", np.int8, "i")
int16 = _new("int16", np.int16, "i")
int32 = _new("int32", np.int32, "i")
int64 = _new("int64", np.int64, "i")
uint8 = _new("uint8", np.uint8, "u")
uint16 = _new("uint16", np.uint16, "u")
uint32 = _new("uint32", np.uint32, "u")
uint64 = _new("uint64", np.uint64, "u")
float8_143 = _new("float8_143", np_dtype_float8_143, "f")
float8_152 = _new("float8_152", np_dtype_float8_152, "f")
float16 = _new("float16", np.float16, "f")
float32 = _new("float32", np.float32, "f")
float64 = _new("float64", np.float64, "f")
complex64 = _new("complex64", np.complex64, "c")
complex128 = _new("complex128", np.complex128, "c")
half, double = float16, float64
_BY_PYTHON: dict[Any, dtype] = {
    builtins.bool: _new("bool", np.bool_, "b"),
    builtins.int: int64,
    builtins.float: float32,  # as on an IPU
}
_BY_NAME |= {"half": float16, "float": float32, "double": float64}
float = float32
bool = _BY_NAME["bool"]

# PopXL's own tables, which programs import.
_NP_TO_POPXL = _BY_NUMPY


def __getattr__(name: str) -> dict[Any, dtype]:
    """_PT_TO_POPXL, the table of torch's dtypes, which needs torch."""
    if name != "_PT_TO_POPXL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: dict[Any, dtype] = {}
    for each in _BY_NUMPY.values():
        try:
            found[each.as_torch()] = each
        except TypeError:  # a dtype that torch lacks
            continue
    return found
