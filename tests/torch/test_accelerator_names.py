"""Each public name of torch.cuda and torch.accelerator does what its table says."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.accelerator.names import ACCELERATOR, CLASSES, CUDA, LEFT, REFUSED

cuda: Any = torch.cuda
TABLES = {*CUDA, *CLASSES, *REFUSED, *LEFT}


def submodules() -> list[Any]:
    names = [each.name for each in pkgutil.iter_modules(cuda.__path__)]
    return [importlib.import_module(f"torch.cuda.{n}") for n in names if not n.startswith("_")]


def public(module: ModuleType) -> set[str]:
    """The names of a module's own, by its list or by where they are defined."""
    names = set(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        defined = getattr(value, "__module__", None) or ""
        if not name.startswith("_") and defined.startswith("torch.cuda"):
            if inspect.isroutine(value) or inspect.isclass(value):
                names.add(name)
    return names


def unclassified() -> list[str]:
    known = {id(getattr(cuda, name, None)) for name in TABLES if "." not in name}
    missing = [name for name in public(cuda) if name not in TABLES]
    for module in submodules():
        path = module.__name__.removeprefix("torch.cuda.")
        for name in public(module):
            value = getattr(module, name)
            if f"{path}.{name}" not in TABLES and id(value) not in known:
                missing.append(f"{path}.{name}")
    accelerator: Any = torch.accelerator
    classified = {*ACCELERATOR, "device_index"} | {
        name.removeprefix("accelerator.") for name in REFUSED
    }
    missing += [f"torch.accelerator.{n}" for n in accelerator.__all__ if n not in classified]
    return missing


def test_each_name_is_in_a_table() -> None:
    assert unclassified() == []


def test_a_new_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "__all__", [*cuda.__all__, "of_a_newer_torch"])
    monkeypatch.setattr(cuda.memory, "newer", lambda: None, raising=False)
    monkeypatch.setattr(cuda.memory.newer, "__module__", "torch.cuda.memory")
    assert set(unclassified()) == {"of_a_newer_torch", "memory.newer"}


def test_no_name_is_in_two_tables() -> None:
    tables = [set(CUDA), set(CLASSES), set(REFUSED), set(LEFT)]
    assert sum(map(len, tables)) == len(set().union(*tables))


def test_what_is_refused_names_itself() -> None:
    def use(rank: int) -> list[str]:
        silent = []
        for name in sorted(REFUSED):
            path, _, last = name.rpartition(".")
            module = torch.accelerator if path == "accelerator" else sys.modules[_module(path)]
            value = getattr(module, last, None)
            if value is None:
                continue
            try:
                value()
            except NotImplementedError as error:
                if f"{module.__name__}.{last} is not simulated" in str(error):
                    continue
            silent.append(name)
        return silent

    assert launch(use, 1, device="cpu") == [[]]


def _module(path: str) -> str:
    return f"torch.cuda.{path}" if path else "torch.cuda"


#: Calls that need arguments.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_device_index": (0,),
    "_exchange_device": (0,),
    "_get_device_index": (0,),
    "_get_generator": (torch.device("cuda", 0),),
    "_lazy_call": (lambda: None,),
    "_maybe_exchange_device": (0,),
    "_set_allocator_settings": ("",),
    "_sleep": (1,),
    "can_device_access_peer": (0, 0),
    "check_error": (0,),
    "get_stream_from_external": (0,),
    "is_available": (),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "mark": ("a",),
    "nccl.is_available": ([],),
    "range": ("a",),
    "range_end": (0,),
    "range_push": ("a",),
    "range_start": ("a",),
    "set_device": (0,),
    "set_device_idx": (0,),
    "set_device_index": (0,),
    "set_per_process_memory_fraction": (0.5,),
    "set_rng_state": (torch.get_rng_state(),),
    "set_rng_state_all": ([],),
    "set_stream": (None,),
    "set_sync_debug_mode": (0,),
    "stream": (None,),
}


def test_each_played_function_takes_a_call(tmp_path: Path) -> None:
    def use(rank: int) -> int:
        calls = 0
        for name in [*CUDA, *(f"accelerator.{name}" for name in ACCELERATOR)]:
            path, _, last = name.rpartition(".")
            module = torch.accelerator if path == "accelerator" else sys.modules[_module(path)]
            function = getattr(module, last, None)
            if function is None:
                continue
            arguments = ARGUMENTS.get(name, ARGUMENTS.get(last, ()))
            if last == "_dump_snapshot":
                arguments = (str(tmp_path / "snapshot"),)
            function(*arguments)
            calls += 1
        return calls

    assert launch(use, 1, device="cpu")[0] > 80
    assert pickle.loads((tmp_path / "snapshot").read_bytes())["segments"] == []


def test_answers() -> None:
    def use(rank: int) -> None:
        assert cuda.get_device_properties(rank).name == cuda.get_device_name(rank)
        assert cuda.get_device_properties(rank).total_memory == cuda.mem_get_info(rank)[1] > 0
        assert cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert cuda.memory.memory_stats_as_nested_dict()["segment"]["all"]["current"] == 0
        assert "0 bytes" in cuda.memory_summary(rank)
        assert cuda.nvtx.range_push("a") == 0 and cuda.nvtx.range_push("b") == 1
        assert cuda.nvtx.range_pop() == 1 and cuda.nvtx.range_pop() == 0
        with cuda.nvtx.range("a"), cuda.profiler.profile():
            assert cuda.cudart().cudaProfilerStart() == 0
        done: list[int] = []
        cuda._lazy_call(lambda: done.append(1))
        assert done == [1] and cuda._initialized
        with cuda.device_of(torch.ones(1, device="cuda:1")):
            assert cuda.current_device() == 1
        with cuda.device_of(torch.ones(1)):
            assert cuda.current_device() == 0
        assert cuda.random.get_rng_state is cuda.get_rng_state
        assert cuda.random.get_rng_state().shape == torch.get_rng_state().shape
        assert cuda.default_generators[0].initial_seed() == cuda.initial_seed()

    launch(use, 2, device="cpu")


def test_streams_of_every_kind() -> None:
    def use(rank: int) -> None:
        for kind in (torch.Stream, cuda.Stream):
            stream = kind(device="cuda")
            assert isinstance(stream, torch.Stream) and stream.device == torch.device("cuda", 0)
            with cuda.stream(stream):
                assert cuda.current_stream() is stream
            with stream:
                assert torch.accelerator.current_stream() is stream
            event = stream.record_event()
            assert isinstance(event, torch.Event) and event.query()
            stream.wait_event(event)
            event.wait(stream)
        outside = cuda.ExternalStream(7)
        assert outside.cuda_stream == 7 and isinstance(outside, cuda.Stream)
        assert cuda.Stream.priority_range() == (0, -5)

    before = torch.Stream, cuda.ExternalStream
    launch(use, 1, device="cpu")
    assert (torch.Stream, cuda.ExternalStream) == before


def test_tensor_types() -> None:
    def use(rank: int) -> None:
        made = cuda.FloatTensor([1.0, 2.0])
        assert made.is_cuda and made.type() == "torch.cuda.FloatTensor"
        assert isinstance(made, cuda.FloatTensor) and not isinstance(made, cuda.LongTensor)
        assert not isinstance(torch.ones(1), cuda.FloatTensor)
        assert cuda.LongTensor(3).shape == (3,)
        x = torch.ones(2, dtype=torch.float64)
        for wanted in ("torch.cuda.FloatTensor", cuda.FloatTensor):
            moved = x.type(wanted)
            assert moved.is_cuda and moved.dtype == torch.float32
        assert moved.type(torch.int64).is_cuda
        assert not moved.type("torch.FloatTensor").is_cuda
        assert made.type("torch.cuda.FloatTensor") is made

    launch(use, 1, device="cpu")


def test_names_that_a_module_imported_before_the_launch(tmp_path: Path) -> None:
    (tmp_path / "early_gpu_user.py").write_text(
        "from torch.cuda import is_available, current_device, Stream, _lazy_call\n"
        "from torch.cuda.random import get_rng_state\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        early: Any = importlib.import_module("early_gpu_user")
    finally:
        sys.path.remove(str(tmp_path))
    before = dict(vars(early))

    def use(rank: int) -> Tensor:
        assert early.is_available() and early.current_device() == 0
        assert isinstance(early.Stream(), cuda.Stream)
        state: Tensor = early.get_rng_state()
        return state

    try:
        launch(use, 2, device="cpu")
        assert {name: vars(early)[name] for name in before} == before
    finally:
        del sys.modules["early_gpu_user"]
