"""A user's objects as a pickle, with their tensors beside it in the safetensors format.

A tensor in the pickle is a reference: to a stored tensor, and how it views that one's memory.
Tensors that share memory, or are the same, do and are so again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from gpusim.poptorch._logging import logger
from gpusim.poptorch.executor.wrapping import original_class
from gpusim.torch.private import storage_key

__all__ = ["DTYPES", "pickled", "read_tensors", "tensors_as_bytes", "unpickled"]

#: Dtypes that every version of the safetensors library stores; others are stored as bytes.
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
)
LENGTH = (
    8  # bytes that say how long the table at the beginning of a file is, in little-endian order
)


class Reference(NamedTuple):
    """A tensor, as a pickle has it.

    - `number`: equal for the same tensor; `name`: of the stored one.
    - `parameter`, `requires_grad`, `dtype`, `device`, `size`, `stride`, `offset`: its properties.
    """

    number: int
    name: str
    parameter: bool
    requires_grad: bool
    dtype: str
    device: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def pickled(value: Any, names: Mapping[int, str]) -> tuple[bytes, dict[str, Tensor]]:
    """The pickle, and the stored tensors by name.

    Tensors of a subclass, with attributes of their own, or that are not dense are in the pickle.

    **Arguments**

    - `names`: the names of tensors, by their id; others are called tensor.0 and so on.

    Raises what pickling raises.
    """
    buffer = io.BytesIO()
    pickler = Pickler(buffer, names)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def unpickled(content: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """The object that was pickled. Unpickling runs code from the pickle.

    Tensors of a GPU that is missing here go to the CPU, with a warning.
    """
    return Unpickler(io.BytesIO(content), tensors).load()


class Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names
        self._memories: dict[int, str] = {}
        self._references: dict[int, Reference] = {}
        self._kept: list[Tensor] = []  # so that ids stay unique
        self.tensors: dict[str, Tensor] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if original_class(value) not in (Tensor, nn.Parameter) or not is_plain(value):
            return None
        if id(value) not in self._references:
            self._kept.append(value)
            self._references[id(value)] = self._reference(value)
        return tuple(self._references[id(value)])

    def _reference(self, value: Tensor) -> Reference:
        plain = value.data
        memory = storage_key(plain.untyped_storage())
        if memory not in self._memories:
            name = self._free(self._names.get(id(value), f"tensor.{len(self.tensors)}"))
            self._memories[memory] = name
            self.tensors[name] = stored(plain)
        return Reference(
            number=len(self._references),
            name=self._memories[memory],
            parameter=issubclass(original_class(value), nn.Parameter),
            requires_grad=value.requires_grad,
            dtype=str(plain.dtype).removeprefix("torch."),
            device=str(plain.device),
            size=tuple(plain.shape),
            stride=plain.stride(),
            offset=int(plain.storage_offset()),
        )

    def _free(self, name: str) -> str:
        while name in self.tensors:
            name += "_"
        return name


class Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._moved: dict[tuple[str, str], Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, found: Any) -> Tensor:
        reference = Reference(*found)
        if reference.number not in self._made:
            self._made[reference.number] = self._tensor(reference)
        return self._made[reference.number]

    def _tensor(self, of: Reference) -> Tensor:
        key = of.name, of.device
        if key not in self._moved:
            self._moved[key] = self._tensors[of.name].to(available(of.device))
        memory = self._moved[key].reshape(-1).view(torch.uint8)
        plain = memory.view(getattr(torch, of.dtype)).as_strided(of.size, of.stride, of.offset)
        if of.parameter:
            return nn.Parameter(plain, of.requires_grad)
        return plain.requires_grad_(of.requires_grad)


def tensors_as_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as a file of the safetensors format.

    >>> read_tensors(tensors_as_bytes({"w": torch.tensor([1.0, 2.0])}))
    {'w': tensor([1., 2.])}
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(own)


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own.

    **Raises**:

    - ValueError: if the file is damaged, or of another format.
    """
    if len(content) < LENGTH + int.from_bytes(content[:LENGTH], "little"):
        raise ValueError(f"tensors: {len(content)} bytes are fewer than their table has")
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: for dtypes that torch lacks
        raise ValueError(f"tensors: {error}") from None


def is_plain(value: Tensor) -> bool:
    """Whether a reference describes a tensor completely."""
    dense = value.layout is torch.strided and not value.is_quantized and not value.is_meta
    looks = not value.is_conj() and not value.is_neg()
    return dense and looks and value.is_leaf and not vars(value) and not value._backward_hooks


def stored(value: Tensor) -> Tensor:
    """A tensor's whole memory: the tensor itself if it covers that, otherwise bytes."""
    memory = value.untyped_storage()
    whole = value.numel() * value.element_size() == memory.nbytes()
    if whole and value.is_contiguous() and value.dtype in DTYPES:
        return value
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(memory)


def available(device: str) -> str:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        logger.warning("There is no %s here: its tensors are loaded to the CPU", device)
        return "cpu"
    return device
