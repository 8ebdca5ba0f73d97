"""The private interface of torch, as far as gpusim.torch.distributed uses it for calls.

Their way through the dispatcher, draws, works, profiles, and backends that programs register.
"""

from __future__ import annotations

import _thread
import copy
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...errors import GpusimError
from .private import bindings, c10d, core, dist, has_gpu, profiler, replace
from .private_groups import RanksWorld

__all__ = [
    "complete_future",
    "draws_call",
    "enter_event",
    "exit_event",
    "is_observed",
    "is_profiling",
    "is_unusual",
    "kernels_of_groups",
    "key_of_draws",
    "operator_of",
    "ranks_call",
]


@contextmanager
def ranks_call(world: RanksWorld) -> Iterator[None]:
    """A block in which ranks profile, register backends, and hand works to C++ as processes do."""
    _start_autograd()
    with ExitStack() as stack:
        _profile_ranks(stack)
        _Backends(stack, world)
        _hold_works(stack)
        _log_backends(stack)
        yield


@functools.lru_cache(maxsize=1)
def _start_autograd() -> None:
    """Have torch's engine of autograd count the GPUs before there are fake tensors.

    These play eight, where torch is built for CUDA and there is none. The first backward pass would
    start a thread for each, and ranks could not be forked any more.
    """
    if not has_gpu():
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()


# Operators that draw random numbers

#: A key of the dispatcher that no tensor has and no library uses: it was made for torchdistX. A
#: thread that includes it calls `_kernel_that_draws` for each operator that draws; others pass by.
#: It is not a key of autocast: compiled programs run without those.
_DRAWS = "DeferredInit"
_Draw = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_drawing = threading.local()


@contextmanager
def draws_call(draw: _Draw) -> Iterator[None]:
    """A block in which the calling thread's operators that draw are calls of `draw`.

    It gets the operator and its arguments. An operator that is made of others is not one of them,
    but those that it is made of are.
    """
    key = key_of_draws()
    before = getattr(_drawing, "draw", None)
    _drawing.draw = draw
    core._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        yield
    finally:
        _drawing.draw = before
        if before is None:
            core._dispatch_tls_set_dispatch_key_included(key, False)


@functools.lru_cache(maxsize=1)
def key_of_draws() -> Any:
    """The key with its kernels, made once, before ranks run.

    The kernels stay for good: a thread that does not include the key never meets them.
    """
    key = core._parse_dispatch_key(_DRAWS)
    rest = core.DispatchKeySet(key)
    _libraries.append(torch.library.Library("_", "IMPL"))
    _libraries[0].fallback(torch.library.fallthrough_kernel, _DRAWS)
    _libraries.append(torch.library.Library("aten", "IMPL"))
    for name in core._dispatch_get_all_op_names():
        if not name.startswith("aten::") or _is_composite(name):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
            _libraries[1].impl(operator, _kernel_that_draws(operator, rest), _DRAWS)
    return key


_libraries: list[torch.library.Library] = []


def _is_composite(name: str) -> bool:
    return bool(core._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def _kernel_that_draws(operator: Any, keys: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dropout_p") if "dropout_p" in names else -1

    def kernel(*args: Any, **named: Any) -> Any:
        draw: _Draw = _drawing.draw
        with core._ExcludeDispatchKeyGuard(keys):
            if position >= 0:  # an attention, which draws for its dropout alone
                if not (args[position] if position < len(args) else named.get("dropout_p", 0.0)):
                    return operator(*args, **named)
            if named.get("generator") not in (None, torch.default_generator):
                return operator(*args, **named)
            return draw(operator, args, named)

    return kernel


# The dispatcher


def _bits(name: str) -> int:
    key: Any = getattr(core.DispatchKey, name)
    return int(core.DispatchKeySet(key).raw_repr())


_PLAIN = 0
for _name in (
    "CPU",
    "CUDA",
    "AutogradCPU",
    "AutogradCUDA",
    "ADInplaceOrView",
    "AutocastCPU",
    "AutocastCUDA",
    "Conjugate",
    "Negative",
):
    _PLAIN |= _bits(_name)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_profiling() -> bool:
    """Whether a profiler records what the calling thread does."""
    return bool(torch.autograd._profiler_enabled())


def is_observed() -> bool:
    """Whether a dispatch mode, a transform of torch.func or a profiler sees the thread's calls."""
    return (
        core._len_torch_dispatch_stack() > 0
        or core._functorch.maybe_current_level() is not None
        or torch.autograd._profiler_enabled()
    )


def is_unusual(tensor: torch.Tensor) -> bool:
    """Whether an operator of the tensor does more than to call the kernel of its device.

    Subclasses dispatch, meta tensors do nothing, and autograd warns of operators that it does not
    know. The memory that such a tensor names may be anything.
    """
    if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and tensor.is_cpu:
        return tensor.requires_grad and torch.is_grad_enabled()
    keys = core._dispatch_keys(tensor).raw_repr()
    return bool(keys & ~_PLAIN) or (tensor.requires_grad and torch.is_grad_enabled())


def operator_of(boxed: Any) -> Any:
    """The operator of an operator's argument, without a factor."""
    return dist.ReduceOp.RedOpType(int(boxed.op()))


@contextmanager
def kernels_of_groups(
    group_type: type,
    kernels: dict[str, tuple[int, Callable[..., Any]]],
    post: Callable[..., Any],
) -> Iterator[None]:
    """A block in which operators of torch.ops.c10d call `post` for groups of a type.

    **Arguments**:

    - `kernels`: by the operator's name the index of its argument that is the group, and a kernel.
    - `post`: called with the kernel, the index, the group and the operator's arguments.
    """
    with ExitStack() as stack:
        library = torch.library.Library("c10d", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*operators may also be overridden.*")
            for name, (index, kernel) in kernels.items():
                for key in ("CPU", "CUDA", "SparseCPU", "SparseCUDA"):
                    if core._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
                        own = _kernel(group_type, f"c10d::{name}", key, index, kernel, post)
                        library.impl(name, own, key, with_keyset=True)
        yield


def _kernel(
    group_type: type, name: str, key: str, index: int, kernel: Any, post: Callable[..., Any]
) -> Callable[..., Any]:
    get_kernel: Any = getattr(torch.library, "get_kernel", None)  # from torch 2.9 on
    torchs = None if get_kernel is None else get_kernel(name, key)

    def dispatched(keys: Any, *args: Any) -> Any:
        group = bindings.ProcessGroup.unbox(args[index])
        if isinstance(group, group_type):
            return post(kernel, index, group, args)
        if torchs is None:
            raise GpusimError(
                f"{name} of a group that is not of the launch: needs a torch that has "
                "torch.library.get_kernel"
            )
        return torchs.call_boxed(keys, *args)

    return dispatched


# Works


def complete_future(value: Any, devices: list[Any]) -> Any:
    """A future that has a value. Its type is the value's own, which C++ asks for.

    torch's constructor makes futures of Python objects: hooks in C++ take no such list of tensors.
    """
    if devices or value == []:
        future: Any = torch.futures.Future(devices=devices)
        future.set_result(value)
        return future
    return core.fork(lambda: value)


def _hold_works(stack: ExitStack) -> None:
    """Let a reducer hold the works of Python that it is given.

    DDP gives it the all-reduce of its join. C++ finds no methods of a work whose Python object is
    gone, and would wait for ever.
    """
    works: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    set_handle = bindings.Reducer._set_forward_pass_work_handle

    def hold(reducer: Any, work: Any, *given: Any, **named: Any) -> None:
        works[reducer] = work
        set_handle(reducer, work, *given, **named)

    replace(stack, bindings.Reducer, "_set_forward_pass_work_handle", hold)


# Profiles


class _Profiles:
    """The profiles of ranks that are threads: each records its own thread.

    C++ keeps the events of a profile by thread, but the process has one trace, of libkineto, which
    the end of a profile closes: to close it twice ends the process. So the end of a profile whose
    trace another rank has closed opens one before.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards the fields below, and all calls of libkineto
        self.trace = "closed"  # or "prepared", "open"
        self.threads: set[int] = set()  # those that profile
        self.prepare = profiler._prepare_profiler
        self.enable = profiler._enable_profiler
        self.disable = profiler._disable_profiler
        #: Whether the thread that launches profiles, whose trace ranks must not close.
        self.is_outside = is_profiling()

    def _check(self, activities: Any) -> None:
        others = self.threads - {threading.get_ident()}
        if self.is_outside or (others and has_gpu()):
            who = "the thread that launches the ranks" if self.is_outside else "another rank"
            raise GpusimError(
                f"torch's profiler: {who} profiles now, and a process has one profiler for GPUs "
                "and for its launch; profile on one rank, or run the ranks as processes "
                "(--processes)"
            )

    def begin(self, config: Any, activities: Any, **named: Any) -> Any:
        with self.lock:
            self._check(activities)
            if self.trace == "closed":
                self.prepare(config, activities, **named)
                self.trace = "prepared"

    def start(self, config: Any, activities: Any, *rest: Any, **named: Any) -> Any:
        with self.lock:
            self._check(activities)
            if self.trace == "closed":
                self.prepare(config, activities)
            result = self.enable(config, activities, *rest, **named)
            self.trace = "open"
            self.threads.add(threading.get_ident())
            return result

    def end(self, *given: Any, **named: Any) -> Any:
        with self.lock:
            if self.trace != "open" and threading.get_ident() in self.threads:
                _in_thread(self._open)
            self.threads.discard(threading.get_ident())
            self.trace = "closed"
            return self.disable(*given, **named)

    def _open(self) -> None:
        """Open a trace, in a thread that has no profile and ends at once."""
        none = profiler._ExperimentalConfig()
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.KINETO, False, False, False, False, False, none
        )
        self.prepare(config, {profiler.ProfilerActivity.CPU})
        # With activities of the CPU it would record this thread, and warn at the thread's end.
        self.enable(config, {profiler.ProfilerActivity.MTIA})


def _in_thread(function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a new thread that belongs to no rank, and wait for its end."""
    ended = _thread.allocate_lock()
    ended.acquire()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    _thread.start_new_thread(run, ())
    ended.acquire()
    if errors:
        raise errors[0]


def _profile_ranks(stack: ExitStack) -> None:
    """Let ranks that are threads profile at the same time."""
    profiles = _Profiles()
    replace(stack, profiler, "_prepare_profiler", profiles.begin)
    replace(stack, profiler, "_enable_profiler", profiles.start)
    replace(stack, profiler, "_disable_profiler", profiles.end)


def enter_event(name: str, *inputs: torch.Tensor) -> Any:
    """Begin an event of the profiler that has the shapes of these tensors."""
    return torch.autograd._record_function_with_args_enter(name, *inputs)


def exit_event(handle: Any) -> None:
    """End an event in another thread, which makes it an asynchronous one."""
    _in_thread(torch.autograd._record_function_with_args_exit, handle)


# Backends


class _Backends:
    """The backends that ranks register, each for itself under the names that it chooses.

    torch has one table for the process. The creator that it holds calls that of the calling rank.
    """

    tables = (
        "backend_list",
        "backend_type_map",
        "backend_capability",
        "default_device_backend_map",
    )

    def __init__(self, stack: ExitStack, world: RanksWorld) -> None:
        self.world = world
        self.creators: dict[str, dict[int, Any]] = {}  # by the name, and by the rank's world
        self.register_backend = c10d.Backend.register_backend
        before = {name: copy.copy(getattr(c10d.Backend, name)) for name in self.tables}
        before["_plugins"] = dict(c10d.Backend._plugins)
        stack.callback(self._restore, before)
        replace(stack, c10d.Backend, "register_backend", self.register)

    def _restore(self, before: dict[str, Any]) -> None:
        for name, value in before.items():
            setattr(c10d.Backend, name, value)
        for name in self.creators:
            if hasattr(c10d.Backend, name.upper()):
                delattr(c10d.Backend, name.upper())

    def register(
        self,
        name: str,
        func: Any,
        extended_api: bool = False,
        devices: Any = None,
        **private: Any,
    ) -> None:
        """torch 2.14 registers its own backends on first use, and says their type (`private`)."""
        if private or not self.world.is_rank():
            self.register_backend(name, func, extended_api, devices, **private)
            return
        if name.lower() not in self.creators:
            self.register_backend(name, self._creator(name.lower()), extended_api, devices)
        self.creators.setdefault(name.lower(), {})[self.world.rank] = func

    def _creator(self, name: str) -> Callable[..., Any]:
        def create(*given: Any, **named: Any) -> Any:
            creators = self.creators[name]
            # A module that registers a backend does so in the rank that imports it first.
            chosen = creators.get(self.world.rank, next(iter(creators.values())))
            return chosen(*given, **named)

        return create


LOGGED = {
    "gloo": ("GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
"""The variables that DDP logs, by the backend."""


def _log_backends(stack: ExitStack) -> None:
    """Have DDP log the backend that the program asked for, as C++ does for its own."""
    logged = DistributedDataParallel._get_ddp_logging_data

    def get(module: Any) -> dict[str, Any]:
        data: dict[str, Any] = logged(module)
        if data.get("backend_name") == "gpusim":
            name = data["backend_name"] = module.process_group.name()
            for variable in LOGGED.get(name, ()):
                key = variable.removeprefix("TORCH_").lower()
                data[key] = os.environ.get(variable, "N/A")
            if name == "gloo":
                data["gloo_num_threads"] = 2
        return data

    replace(stack, DistributedDataParallel, "_get_ddp_logging_data", get)
