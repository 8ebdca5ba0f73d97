"""trainingModel, inferenceModel and load: what makes executors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpusim.poptorch._version import VERSION
from gpusim.poptorch.enums import ConnectionType
from gpusim.poptorch.executor.executor import PoplarExecutor
from gpusim.poptorch.executor.saving import Invalid, read
from gpusim.poptorch.options import Options

__all__ = ["inferenceModel", "load", "trainingModel"]

Model = nn.Module | PoplarExecutor


def trainingModel(
    model: Model,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """A model that trains when it is called.

    The model, its parameters and its buffers change their classes in place: whenever they are
    looked at, they have the trained values. `destroy()` gives them their classes back. Attributes
    of the model itself, as `training`, are those that it has now.

    **Arguments**

    - `model`: its forward computes a loss: one of torch.nn.functional's, or `identity_loss`.
    - `options`: None for those that `Options()` has. They are frozen from here on.
    - `optimizer`: one of `poptorch.optim` or torch.optim; None is torch's SGD with lr 0.01.

    poptorch.Error for other options, and what an unsupported optimizer is; RuntimeError for a model
    that is in a training model already.

    >>> import torch
    >>> class Squares(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = torch.nn.Parameter(torch.tensor([3.0]))
    ...
    ...     def forward(self, x, y):
    ...         return torch.nn.functional.mse_loss(self.w * x, y)
    >>> model = Squares()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> train = trainingModel(model, Options().replicationFactor(2), sgd)
    >>> train(torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [3.0]]))
    tensor([4., 0.])
    >>> model.w.tolist()
    [2.0]
    >>> train.destroy()
    """
    user_model = unwrapped(model)
    return PoplarExecutor(
        copy.copy(user_model), options, True, VERSION, optimizer, user_model=user_model
    )


def inferenceModel(model: Model, options: Options | None = None) -> PoplarExecutor:
    """A model that infers when it is called.

    It copies the weights when it is first called, when it attaches to its device, and when a
    training model has copied newer ones to the host since; one that trains these weights does so
    first. Weights that you change yourself need `copyWeightsToDevice()` or `load_state_dict()`.
    Arguments as for `trainingModel`.

    >>> import torch
    >>> double = inferenceModel(torch.nn.Identity(), Options().replicationFactor(2))
    >>> double(torch.tensor([1, 2]))
    tensor([1, 2], dtype=torch.int32)
    >>> double.destroy()
    """
    return PoplarExecutor(copy.copy(unwrapped(model)), options, False, VERSION)


def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """The executor that `save` or `compileAndExport` wrote with its model.

    It is compiled again, with its weights, its optimizer's state and its random numbers where they
    were.

    **Warning**: the file holds the model as a pickle, and unpickling runs whatever the file says.
    Load only files that you have made, or whose maker you trust as you trust your own code. (That a
    file is whole is checked before; that says nothing of who made it.)

    **Arguments**

    - `edit_opts_fn`: given the options before the executor is made, to change them. Those of a
      model that was compiled for an offline target say ConnectionType.Always here.

    AssertionError for a file that is damaged, of another version, none of PopTorch's, or without a
    model; OSError; what unpickling raises, as where the model's class is not found.
    """
    try:
        saved = read(filename, VERSION, model=True)
    except Invalid as error:
        raise AssertionError(f"Invalid file {filename}: {error}") from None
    assert saved.exported is not None, (
        f"{filename} is a valid PopTorch file but was created with 'export_model=False' which "
        "means you need to re-create the PopTorch model using poptorch.inferenceModel or "
        f'poptorch.trainingModel then call poptorch_model.loadExecutable("{filename}").'
    )
    exported = saved.exported
    options = exported.options.clone()
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    if saved.training:
        executor = trainingModel(exported.model, options, exported.optimizer)
    else:
        executor = inferenceModel(exported.model, options)
    executor._restore(saved)
    return executor


def unwrapped(model: Any) -> nn.Module:
    """The user's model: a function's is a module with it as forward."""
    if isinstance(model, PoplarExecutor):
        return model.model
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise TypeError("Expected a torch.nn.Module or a callable")
    module = nn.Module()
    module.forward = model
    return module
