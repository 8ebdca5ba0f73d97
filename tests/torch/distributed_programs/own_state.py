"""Programs that change what a process owns while other ranks wait: modes, contexts, generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.torch.distributed_programs.base import Results, program, start

calls: list[int] = []  # of hooks; of all ranks, where hooks are


def _contexts() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Contexts that set what a process has once, and what shows it inside."""
    import builtins
    import contextlib
    import gc
    import io
    import logging
    import sys
    import warnings

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.modules.module import register_module_forward_hook
    from torch.nn.utils import parametrize
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    private: Any = torch._C
    dispatcher: Any = DTensor._op_dispatcher

    @contextlib.contextmanager
    def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        yield
        setattr(owner, name, before)

    @contextlib.contextmanager
    def hooked(register: Callable[[Any], Any]) -> Iterator[None]:
        handle = register(lambda *given: calls.append(1))
        yield
        handle.remove()

    @contextlib.contextmanager
    def collecting(on: bool) -> Iterator[None]:
        before = gc.isenabled()
        (gc.enable if on else gc.disable)()
        yield
        (gc.enable if before else gc.disable)()

    @contextlib.contextmanager
    def logged() -> Iterator[None]:
        level = root.level
        root.addHandler(quiet)
        root.setLevel(logging.ERROR)
        logging.disable(logging.CRITICAL)
        yield
        logging.disable(logging.NOTSET)
        root.setLevel(level)
        root.removeHandler(quiet)

    @contextlib.contextmanager
    def raising() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            yield

    def warns() -> bool:
        try:
            with open("/dev/null", "w") as nowhere, contextlib.redirect_stderr(nowhere):
                warnings.warn("old", DeprecationWarning, stacklevel=1)
        except DeprecationWarning:
            return True
        return False

    def counted(act: Callable[[], Any]) -> int:
        calls.clear()
        act()
        return len(calls)

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    attention = F.scaled_dot_product_attention
    other = lambda *given, **named: attention(*given, **named)  # noqa: E731
    text = io.StringIO()
    root, quiet = logging.getLogger(), logging.NullHandler()
    return {
        "anomaly": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
        "attention": (
            lambda: sdpa_kernel(SDPBackend.MATH),
            lambda: private._get_flash_sdp_enabled() + 2 * private._get_math_sdp_enabled(),
        ),
        "replaced attention": (
            lambda: replaced(F, "scaled_dot_product_attention", other),
            lambda: F.scaled_dot_product_attention is attention,
        ),
        "mkldnn": (
            lambda: torch.backends.mkldnn.flags(enabled=False),
            lambda: torch.backends.mkldnn.enabled,
        ),
        "cudnn": (
            lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True),
            lambda: private._get_cudnn_benchmark() + 2 * private._get_cudnn_deterministic(),
        ),
        "parametrize": (parametrize.cached, lambda: parametrize._cache_enabled),
        "early stop": (
            lambda: checkpoint.set_checkpoint_early_stop(False),
            lambda: checkpoint._enable_checkpoint_early_stop is None,
        ),
        "loss parallel": (loss_parallel, lambda: len(dispatcher._custom_op_handlers)),
        "implicit replication": (
            implicit_replication,
            lambda: dispatcher._allow_implicit_replication,
        ),
        "module hook": (
            lambda: hooked(register_module_forward_hook),
            lambda: counted(lambda: layer(torch.ones(2))),
        ),
        "optimizer hook": (
            lambda: hooked(register_optimizer_step_pre_hook),
            lambda: counted(optimizer.step),
        ),
        "dispatch mode": (
            lambda: FlopCounterMode(display=False),
            lambda: torch.utils._python_dispatch._is_in_torch_dispatch_mode,
        ),
        "mutation": (
            torch.autograd.graph.allow_mutation_on_saved_tensors,
            lambda: torch.autograd.graph._allow_mutation_on_saved_tensors_enabled,
        ),
        "print": (
            lambda: replaced(builtins, "print", counted),
            lambda: builtins.print is counted,
        ),
        "standard output": (
            lambda: contextlib.redirect_stdout(text),
            lambda: sys.stdout is text,
        ),
        "warnings": (raising, warns),
        "logging": (
            logged,
            lambda: (quiet in root.handlers) + 2 * (root.level == 40) + 4 * root.isEnabledFor(50),
        ),
        "garbage": (lambda: collecting(False), gc.isenabled),
        "default dtype": (
            lambda: _dtype(torch.float64),
            lambda: torch.ones(1).dtype == torch.float64,
        ),
        "grad mode": (torch.no_grad, torch.is_grad_enabled),
        "inference mode": (torch.inference_mode, torch.is_inference_mode_enabled),
        "device": (lambda: torch.device("meta"), lambda: torch.ones(1).is_meta),
        "saved tensors": (
            lambda: torch.autograd.graph.saved_tensors_hooks(
                lambda x: calls.append(1) or x, lambda x: x
            ),
            lambda: counted(lambda: layer(torch.ones(2, 2)).square()),
        ),
        "errstate": (lambda: np.errstate(all="raise"), lambda: np.geterr()["over"] == "raise"),
        "autocast": (
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: layer(torch.ones(2, 2)).dtype == torch.bfloat16,
        ),
    }


def _dtype(dtype: torch.dtype) -> Any:
    import contextlib

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(before)

    return context()


@program
def contexts() -> Results:
    """Contexts in which ranks wait, each from its own step to two steps later."""
    rank, size = start()
    found = {}
    for name, (context, observe) in _contexts().items():
        seen, entered = [], None
        for number in range(size + 3):
            if number == rank:
                entered = context()
                entered.__enter__()
            if number == rank + 2 and entered is not None:
                entered.__exit__(None, None, None)
            seen.append(int(observe()))
            dist.barrier()
        found[name] = torch.tensor(seen)
    return found
