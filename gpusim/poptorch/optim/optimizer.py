"""PopTorch's additions to torch's optimizers: settings of their own, and their state.

The accumulators belong to the executor's Updater; an optimizer copies them when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .._logging import logger

__all__ = ["ACCUMULATION_TYPES", "Optimizer", "VariableAttributes"]

ACCUMULATION_TYPES = (torch.float16, torch.float32)

TORCHS: Any = torch.optim.Optimizer  # its methods are called on an Optimizer, not a subclass of it

#: The defaults of the attributes beyond torch's.
DEFAULTS: dict[str, Any] = {
    "loss_scaling": 1.0,
    "use_combined_accum": False,
    "accum_type": torch.float32,
    "velocity_accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
    "max_grad_norm": math.inf,
    "bias_correction": True,
    "use_tf_variant": False,
}


class VariableAttributes:
    """The attributes of an optimizer that may change after compilation: `optimizer.variable_attrs`.

    All others are constant.

    **Arguments**

    - `variable_attributes`: the names of those that may change.
    - `allowed_attributes`: the names of all that can be marked.

    >>> attributes = VariableAttributes(["lr"], ["lr", "momentum"])
    >>> attributes.isConstant("momentum")
    True
    >>> attributes.markAsVariable("momentum")
    >>> attributes.isConstant("momentum")
    False
    """

    def __init__(self, variable_attributes: list[str], allowed_attributes: list[str]) -> None:
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Whether the attribute keeps the value that it is compiled with."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Make it constant. AssertionError for a name that is not allowed."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Make it variable. AssertionError for a name that is not allowed."""
        self._check(attr)
        self._variable_attributes.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed_attributes, (
            f"Unknown attribute {attr}, allowed values: {self._allowed_attributes}"
        )


class Optimizer:
    """The base class of PopTorch's five optimizers, beside the class of torch that each has.

    An optimizer's `state_dict()` is torch's, with `ipu_state`, the accumulators, and `ipu_param`,
    the variable attributes, as tensors by name. Both are None until a model is compiled with it.

    - `ipu_state_is_dirty`: this state was loaded, and the model has not used it yet.
    - `host_state_is_dirty`: the model's state is newer than the one here.
    """

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    def __init__(self) -> None:
        self._state_dict: dict[str, Any] = {"ipu_state": None, "ipu_param": None}
        self._read_state: Callable[[], dict[str, Any]] | None = None
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False
        self._numbers_are_loaded = False  # ipu_param is a user's, and no model has taken it over

    def _set_up(
        self, initialise: Callable[..., None], arguments: dict[str, Any], *other: str
    ) -> None:
        """Initialise torch's part and PopTorch's.

        **Arguments**

        - `initialise`: the `__init__` of torch's class.
        - `arguments`: the `locals()` of the caller's `__init__`. None stands for an argument that
          the user has not given.
        - `other`: the names of those that the caller handles.

        **Raises**: AssertionError for accumulation types other than float16 and float32.
        """
        Optimizer.__init__(self)
        skipped = {"self", "params", *other}
        settings = {name: value for name, value in arguments.items() if name not in skipped}
        passed = [name for name, value in settings.items() if value is not None]
        torchs = {name: settings[name] for name in passed if name not in DEFAULTS}
        initialise(self, arguments["params"], **torchs)
        for name in [name for name in settings if name in DEFAULTS]:
            chosen = DEFAULTS[name] if settings[name] is None else settings[name]
            assert not name.endswith("accum_type") or chosen in ACCUMULATION_TYPES, (
                "Accumulation types must be either torch.float32 or torch.float16"
            )
            setattr(self, name, chosen)
        self._allow(passed)  # attributes that the user gives may change, defaults stay constant

    def _allow(self, variable: list[str]) -> None:
        allowed = [*self.defaults, "loss_scaling"]
        self.variable_attrs = VariableAttributes(variable, allowed)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """torch's dictionary, `ipu_state` and `ipu_param`."""
        return self.get_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; the model uses it from its next run on.

        RuntimeError for an empty dictionary, and for the state of an optimizer that is not
        PopTorch's.
        """
        check_state(state)
        TORCHS.load_state_dict(self, state)
        self.set_state_dict(state)

    def get_state_dict(self) -> dict[str, Any]:
        """The same as `state_dict`. The model's state is copied here if it is newer."""
        if self.host_state_is_dirty and self._read_state is not None:
            self._state_dict = self._read_state()
            self.host_state_is_dirty = self._numbers_are_loaded = False
        else:
            logger.debug("Using cached optimiser state dict")
        return {**self._state_dict, **TORCHS.state_dict(self)}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """`load_state_dict` without torch's part. RuntimeError as there."""
        check_state(state)
        self._state_dict = {name: state[name] for name in ("ipu_state", "ipu_param")}
        self.ipu_state_is_dirty = self._numbers_are_loaded = True
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        """Whether there is a state here, from a model or loaded."""
        return None not in (self._state_dict["ipu_state"], self._state_dict["ipu_param"])

    def __getstate__(self) -> dict[str, Any]:
        state = TORCHS.__getstate__(self)
        names = [*DEFAULTS, "variable_attrs"]
        state.update({name: self.__dict__[name] for name in names if name in self.__dict__})
        if self.host_state_is_dirty:
            self.get_state_dict()  # a copy is connected to no model
        return {
            **state,
            "_state_dict": self._state_dict,
            "_read_state": None,
            "_numbers_are_loaded": self._numbers_are_loaded,
            "ipu_state_is_dirty": self.has_state(),
            "host_state_is_dirty": False,
        }


def check_state(state: dict[str, Any]) -> None:
    """Raise RuntimeError unless it is the state of a PopTorch optimizer."""
    if not state:
        raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
    if not {"ipu_state", "ipu_param"} <= state.keys():
        raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
