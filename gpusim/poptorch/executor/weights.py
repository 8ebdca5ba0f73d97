"""The weights on the device: copied from the model, trained there, and copied back.

Parameters are held once, or once for each group of replicas; buffers once, or once for each
replica where replicas may change their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gpusim.groups import Groups
from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import VariableRetrievalMode
from gpusim.poptorch.executor.grouping import Grouping
from gpusim.poptorch.executor.profile import Profile
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.poptorch.replicas.state import ModelState

__all__ = ["HostWeights", "Weights", "described"]

NOT_BROADCAST = (
    "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers "
    "becoming out of sync between replicas, you can disable buffer broadcasting using "
    "poptorch.Options.broadcastBuffers(False)."
)
# The dtypes of weights on the device instead of those that an IPU lacks; integers are unchanged.
HELD = {torch.float64: torch.float32, torch.bfloat16: torch.float32}


class Downloads:
    """The copies from devices to models: their number, and the last one of each tensor."""

    def __init__(self) -> None:
        self.count = 0
        self._last: Any = WeakTensorKeyDictionary()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count a copy to these tensors of a model."""
        self.count += 1
        for tensor in tensors:
            self._last[tensor] = self.count

    def reached(self, tensors: Iterable[Tensor], since: int) -> bool:
        """Whether a copy after number `since` wrote one of these tensors."""
        return any(self._last.get(tensor, 0) > since for tensor in tensors)


downloads = Downloads()


class Weights:
    """A model's parameters and buffers on the device.

    **Arguments**

    - `model`: only `download` changes it.
    - `replicas`: their number on all instances; `first`, `local`: those of this instance.
    - `groupings`: of parameters by name; poptorch.Error for invalid ones.
    - `shared_buffers`: whether all replicas have the same buffers.

    **Attributes**: `parameters` and `buffers` by name, each (copies, *shape); `groups` of grouped
    parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int,
        first: int,
        local: int,
        groupings: Mapping[str, Grouping],
        shared_buffers: bool,
    ) -> None:
        self._state = ModelState(model)
        self._local, self._shared_buffers = local, shared_buffers and replicas > 1
        self._groupings = groupings
        self.groups: dict[str, Groups] = {
            name: grouping.groups(name, self._state.parameters[name], replicas)
            for name, grouping in groupings.items()
            if name in self._state.parameters
        }
        self._index = {
            name: torch.tensor(groups.assignment[first : first + local])
            for name, groups in self.groups.items()
        }
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.upload()

    @property
    def device(self) -> torch.device | None:
        """Their device; None for a model without weights."""
        return next((x.device for x in (*self.parameters.values(), *self.buffers.values())), None)

    # ---------------------------------------------------------------- host and device

    @torch.inference_mode(False)
    @torch.no_grad()
    def upload(self) -> None:
        """Copy the model's parameters and buffers to the device."""
        self.parameters = {
            name: self._leaders(name, held(parameter))
            for name, parameter in self._state.parameters.items()
        }
        self.upload_buffers(self._state.buffers)
        self._synchronized_at = downloads.count

    @property
    def tensors(self) -> list[Tensor]:
        """The model's parameters and buffers."""
        return [*self._state.parameters.values(), *self._state.buffers.values()]

    def is_behind(self) -> bool:
        """Whether another executor's weights were copied to the model since this one's were."""
        if downloads.count == self._synchronized_at:
            return False
        if downloads.reached(self.tensors, self._synchronized_at):
            return True
        self._synchronized_at = downloads.count  # those copies were to other models
        return False

    @torch.inference_mode(False)
    @torch.no_grad()
    def upload_buffers(self, names: Iterable[str]) -> None:
        """Copy these buffers of the model to the device, for all replicas."""
        copies = 1 if self._shared_buffers else self._local
        for name in names:
            value = held(self._state.buffers[name])
            self.buffers[name] = value.expand(copies, *value.shape).clone()

    @torch.no_grad()
    def download(self) -> None:
        """Copy the device's parameters, and the first replica's buffers, into the model's own."""
        for name, parameter in self._state.parameters.items():
            value = self._host_form(name, self.parameters[name])
            if parameter.shape == value.shape:
                parameter.data.copy_(value)
            else:  # one of each group has become one of each replica
                parameter.data = value.to(parameter.dtype)
        for name, buffer in self._state.buffers.items():
            buffer.data.copy_(self.buffers[name][0])
        downloads.add(self.tensors)
        self._synchronized_at = downloads.count

    @torch.no_grad()
    def beyond_host(self) -> dict[str, Tensor]:
        """The device's values that `download` does not keep in full, by name.

        Those are values that the model's dtype rounds, and buffers of other replicas than the
        first. Weights that were changed in the model since are left out: the model's value counts.
        """
        return {
            name: value.cpu().clone()
            for name, value in {**self.parameters, **self.buffers}.items()
            if self._is_downloaded(name, value) and not torch.equal(value, self._uploaded(name))
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Restore values of `beyond_host` whose rounded values the model still has.

        Values of other shapes, for other numbers of replicas, are ignored.
        """
        for own in (self.parameters, self.buffers):
            for name in own.keys() & values.keys():
                value = values[name].to(own[name])
                if value.shape == own[name].shape and self._is_downloaded(name, value):
                    own[name] = value.clone()

    def _is_downloaded(self, name: str, value: Tensor) -> bool:
        """Whether the model has the value that `download` would copy."""
        of_host, back = self._state.buffers.get(name), value[0]
        if of_host is None:
            of_host, back = self._state.parameters[name], self._host_form(name, value)
        return torch.equal(of_host.data, back.to(of_host.dtype))

    def _uploaded(self, name: str) -> Tensor:
        """The value that `upload` would copy."""
        if name in self.buffers:
            return held(self._state.buffers[name]).expand_as(self.buffers[name])
        return self._leaders(name, held(self._state.parameters[name]))

    def _leaders(self, name: str, value: Tensor) -> Tensor:
        """The host's value as (groups, *shape)."""
        groups = self.groups.get(name)
        if groups is None:
            return value[None].clone()
        if len(value) == groups.group_count:
            return value.clone()
        return value[[members[0] for members in groups.members]]

    def _host_form(self, name: str, value: Tensor) -> Tensor:
        """A parameter's value on the device in the host's shape."""
        groups = self.groups.get(name)
        if groups is None:
            return value[0]
        if self._groupings[name].mode is VariableRetrievalMode.AllReplicas:
            return value[list(groups.assignment)]
        return value

    # ---------------------------------------------------------------- in the model

    @contextmanager
    def traced_form(self) -> Iterator[None]:
        """A block in which the model holds one replica's weights, with their shapes and dtypes."""
        own = {**self._state.parameters, **self._state.buffers}
        for name, parameter in self._state.parameters.items():
            value = self.parameters[name][0]
            if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
                own[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for name, buffer in self._state.buffers.items():
            if self.buffers[name].dtype != buffer.dtype:
                own[name] = self.buffers[name][0]
        with self.model_kept():
            self._state.assign(own)
            yield

    def model_kept(self) -> AbstractContextManager[None]:
        """A block after which the model holds its own parameters and buffers, whatever it does."""
        return self._state.preserved()

    # ---------------------------------------------------------------- for the replicas

    def stacked_parameters(self) -> dict[str, Tensor]:
        """All local replicas' parameters, (replicas, *shape); shared ones are expanded."""
        return {
            name: value[self._index[name]]
            if name in self.groups
            else value.expand(self._local, *value.shape[1:])
            for name, value in self.parameters.items()
        }

    def stacked_buffers(self) -> dict[str, Tensor]:
        """All local replicas' buffers, (replicas, *shape)."""
        return {
            name: value.expand(self._local, *value.shape[1:])
            for name, value in self.buffers.items()
        }

    def check_buffers(self, changed: Iterable[str]) -> None:
        """Raise poptorch.Error if the model changes buffers that replicas share."""
        if self._shared_buffers and any(True for _ in changed):
            raise createPoptorchError(NOT_BROADCAST)

    def set_buffers(self, changed: Mapping[str, Tensor]) -> None:
        """Take the buffers that a step has changed, (replicas, *shape)."""
        self.buffers.update(changed)


class HostWeights:
    """Copies weights from the device to the model when they are out of date there.

    A wrapped model keeps this alive, so that nothing is lost when its executor is collected.

    - `weights`, `profile`: None until a model is compiled.
    - `outdated`: whether the weights were trained since the last copy.

    **Arguments**

    - `executor`: its executor, or None after garbage collection. Implicit copies go
      through the executor's `copyWeightsToHost`, which the user may replace.
    """

    def __init__(self, executor: Callable[[], Any]) -> None:
        self._executor = executor
        self.weights: Weights | None = None
        self.profile: Profile | None = None
        self.outdated = False

    def fetch(self) -> bool:
        """Copy them if they are out of date, and return whether they were."""
        if not self.outdated:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self.outdated = False  # first: access to the model's tensors fetches
        executor = self._executor()
        (self.copy if executor is None else executor.copyWeightsToHost)()
        return True

    def copy(self) -> None:
        """Copy them to the model."""
        self.outdated = False
        if self.weights is not None:
            logger.info("Writing weights from IPU to host.")
            with (
                self.profile.span("download weights", "download") if self.profile else nullcontext()
            ):
                self.weights.download()


def held(tensor: Tensor) -> Tensor:
    """A host's tensor in the dtype that the device holds it in."""
    plain = tensor.detach()
    return plain.to(HELD.get(plain.dtype, plain.dtype))


def described(model: nn.Module, groupings: Mapping[str, Grouping]) -> dict[str, list[Any]]:
    """Dtype and shape of what one replica has of each parameter and buffer, by name."""
    state = ModelState(model)
    found: dict[str, list[Any]] = {}
    for name, value in {**state.parameters, **state.buffers}.items():
        shape = [*value.shape[1:]] if name in groupings else [*value.shape]
        dtype = HELD.get(value.dtype, value.dtype)
        found[name] = [str(dtype).removeprefix("torch."), shape]
    return found
