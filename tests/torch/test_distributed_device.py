"""Programs that ask for GPUs, on ranks whose GPUs the CPU plays."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import DefaultDeviceType, checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpusim import ReplicaError
from gpusim.tools.cli import main
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.accelerator import CASTS, DRAWS, asks_for_gpu
from gpusim.torch.distributed.own.seeds import seeds_of
from tests.oracles.budget import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),
]
cuda: Any = torch.cuda
CALLS: dict[str, Callable[[int], object]] = {}


def call(function: Callable[[int], object]) -> Callable[[int], object]:
    """Give the use of an interface its name."""
    CALLS[function.__name__] = function
    return function


@call
def accelerator(local: int) -> None:
    acc: Any = torch.accelerator
    ranks = dist.get_world_size()
    assert acc.is_available() and acc.device_count() == ranks
    assert acc.current_accelerator() == torch.device("cuda")
    assert acc.current_accelerator(check_available=True).type == "cuda"
    assert acc.current_device_index() == 0
    acc.set_device_index(local)
    assert acc.current_device_index() == acc.current_device_idx() == local
    acc.set_device_index(torch.device("cuda", 0))
    with acc.device_index(local):
        assert acc.current_device_index() == cuda.current_device() == local
    assert acc.current_device_index() == 0
    acc.synchronize()
    acc.current_stream().synchronize()
    acc.empty_cache()
    assert acc.memory_allocated() == acc.max_memory_allocated() == 0
    acc.reset_peak_memory_stats()
    assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda
    assert torch.get_device_module("cpu") is torch.cpu


@call
def devices(local: int) -> None:
    assert cuda.is_available() and cuda.is_initialized()
    assert cuda.device_count() == dist.get_world_size()
    for device in (local, f"cuda:{local}", torch.device("cuda", local), torch.device(local)):
        cuda.set_device(0)
        cuda.set_device(device)
        assert cuda.current_device() == local
    with cuda.device(0):
        assert cuda.current_device() == 0
    cuda.init()
    cuda.synchronize()
    cuda.synchronize(local)
    cuda.empty_cache()
    cuda.ipc_collect()
    assert cuda.get_device_name(local) == f"CPU as cuda:{local} (gpusim)"
    assert cuda.get_device_capability(local) == (0, 0)
    assert cuda.is_bf16_supported()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        assert getattr(cuda, name)() == getattr(cuda, name)(f"cuda:{local}") == 0
    cuda.reset_peak_memory_stats()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.enable_flash_sdp(torch.backends.cuda.flash_sdp_enabled())
    with torch.random.fork_rng(devices=[local]):
        torch.rand(3)
    cuda.nvtx.range_push("step")
    cuda.nvtx.range_pop()


@call
def streams(local: int) -> None:
    stream, begin, end = cuda.Stream(), cuda.Event(enable_timing=True), cuda.Event(True)
    assert isinstance(stream, torch.cuda.Stream) and isinstance(begin, torch.cuda.Event)
    before = cuda.current_stream()
    stream.wait_stream(before)
    begin.record()
    with cuda.stream(stream):
        assert cuda.current_stream() is stream
        x = torch.ones(3).pin_memory().cuda(non_blocking=True)
        x.record_stream(cuda.current_stream())
    end.record()
    before.wait_event(stream.record_event())
    end.synchronize()
    assert cuda.current_stream() is before is cuda.default_stream()
    assert stream.query() and end.query() and begin.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(cuda.Event())


@call
def generators(local: int) -> None:
    """GPUs have generators of their own, which start from the rank's seeds."""
    assert cuda.initial_seed() == seeds_of(0, dist.get_rank()).of_gpu(cuda.current_device())
    torch.manual_seed(local)
    assert cuda.initial_seed() == local
    before = torch.get_rng_state()
    cuda.manual_seed(7)
    assert torch.equal(before, torch.get_rng_state())
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    state = cuda.get_rng_state()
    draws = torch.rand(3, device="cuda")
    assert torch.equal(draws.cpu(), expected)
    assert torch.equal(before, torch.get_rng_state())
    cuda.set_rng_state(state, f"cuda:{cuda.current_device()}")
    assert torch.equal(draws, torch.rand(3, device="cuda"))
    assert len(cuda.get_rng_state_all()) == len(cuda.default_generators) == dist.get_world_size()
    cuda.default_generators[cuda.current_device()].set_state(state)
    assert torch.equal(draws, torch.rand(3, device="cuda"))
    for other in range(dist.get_world_size()):
        if other != cuda.current_device():  # each device has its own
            assert cuda.default_generators[other].initial_seed() == local
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert isinstance(generator, torch.Generator) and generator.device.type == "cpu"
    drawn = torch.rand(3, device="cuda", generator=generator)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


@call
def moves(local: int) -> None:
    """Tensors that are moved between two devices are copied, others are not."""
    cuda.set_device(local)
    for there in ("cuda", f"cuda:{local}", torch.device("cuda", local), local):
        x = torch.ones(3)
        for moved in (x.to(there), x.to(device=there), x.cuda(), x.cuda(device=local)):
            assert moved.device.type == "cuda" and moved.is_cuda and not moved.is_cpu
            assert moved.get_device() == moved.device.index
            assert moved.type() == "torch.cuda.FloatTensor"
            moved.zero_()
            assert x.sum() == 3
            assert moved.to(there) is moved and moved.cuda() is moved
            back = moved.to("cpu"), moved.cpu(), moved.to(torch.device("cpu"))
            moved += 1
            assert all(copy.sum() == 0 for copy in back)
        assert x.to(there, torch.float64).dtype == torch.float64
        assert x.to(there, non_blocking=True).sum() == 3
        for made in (
            torch.zeros(2, device=there),
            torch.tensor([0.0, 0.0], device=there),
            x.new_zeros(2, device=there),
            torch.zeros_like(x, device=there),
        ):
            assert made.device.type == "cuda" and made.sum() == 0
            assert made.to(there) is made
    kept = torch.zeros(2)
    assert torch.as_tensor(kept, device="cuda").add_(1).sum() == 2 and kept.sum() == 0
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    leaf.cuda().sum().backward()
    assert leaf.grad is not None
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.device.type == "cuda"
        assert torch.get_default_device() == torch.device("cuda", cuda.current_device())
    torch.set_default_device(f"cuda:{local}")
    assert torch.ones(2).device == torch.get_default_device() == torch.device("cuda", local)
    torch.set_default_device(None)
    assert torch.ones(2).device == torch.get_default_device() == torch.device("cpu")
    assert torch.empty(2, pin_memory=True).shape == (2,) and not torch.ones(2).is_pinned()
    model = nn.Linear(2, 2)
    weight = model.weight
    before = weight.data
    assert model.to(local) is model and model.weight is weight
    with torch.no_grad():
        model.cuda(local).to("cuda", torch.float32).weight.add_(1)
    assert not torch.equal(before, weight)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert empty.weight.device.type == "meta" and not empty.weight.is_cuda
    assert empty.to_empty(device="cuda").weight.device.type == "cuda"


@call
def precision(local: int) -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 4, device="cuda")
    for scaler in (torch.amp.GradScaler("cuda"), cuda.amp.GradScaler()):
        assert scaler.is_enabled()
        with torch.amp.autocast("cuda", dtype=torch.float16):
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled("cpu")
            loss = model(x)
            with torch.autocast("cuda", enabled=False):
                assert model(x).dtype == torch.float32
        assert loss.dtype == torch.float16
        scaler.scale(loss.float().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    with cuda.amp.autocast():  # CUDA's default dtype
        assert model(x).dtype == torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        assert checkpoint(model, x, use_reentrant=False).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")

    class Cast(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    with torch.autocast("cuda"):
        assert Cast.apply(x.requires_grad_()).dtype == torch.float16


@call
def groups(local: int) -> None:
    dist.barrier(device_ids=[local])
    ranks = dist.get_world_size()
    x = torch.full((3,), float(local), device="cuda")
    dist.all_reduce(x)
    assert x[0] == sum(range(ranks))
    listed = [None] * ranks
    dist.all_gather_object(listed, local)
    assert listed == list(range(ranks))
    shared = ["a"] if local == 0 else [None]
    dist.broadcast_object_list(shared, src=0, device=torch.device("cuda", local))
    assert shared == ["a"]
    whole, _ = dist.new_subgroups()
    assert whole.size() == ranks
    mine: Any = dist.split_group(split_ranks=[list(range(0, ranks, 2))])
    if local % 2:
        assert mine in (None, dist.GroupMember.NON_GROUP_MEMBER)
    else:
        assert dist.get_process_group_ranks(mine) == list(range(0, ranks, 2))
        assert dist.get_backend(mine) == "nccl"
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one, group=mine)
        assert one == len(range(0, ranks, 2))
    with pytest.raises(ValueError, match=r"split_ranks=\[\[99\]\]: expected"):
        dist.split_group(split_ranks=[[99]])
    dist.barrier()


@call
def meshes(local: int) -> None:
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if ranks > 1 else (1, 1)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicas", "shards"))
    assert mesh.device_type == mesh["shards"].device_type == "cuda"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(local)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = state_dict.get_model_state_dict(model, options=options)
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)


@call
def first_fsdp(local: int) -> None:
    for made in (
        FullyShardedDataParallel(nn.Linear(4, 4), device_id=cuda.current_device()),
        FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cuda", local)),
        FullyShardedDataParallel(nn.Linear(4, 4).cuda()),
    ):
        made(torch.ones(2, 4, device="cuda")).sum().backward()


@call
def loaders(local: int) -> None:
    data = TensorDataset(torch.arange(8.0))
    total = 0.0
    for (x,) in DataLoader(data, batch_size=2, pin_memory=True):
        total += x.to("cuda", non_blocking=True).sum().item()
    assert total == 28


def run(
    use: Callable[[int], object], ranks: int, schedule: str = "turns", device_id: bool = True
) -> list[Any]:
    def body(rank: int) -> object:
        local = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local) if device_id else None
        dist.init_process_group("nccl", device_id=device)
        found = use(local)
        dist.destroy_process_group()
        return found

    return launch(body, ranks, schedule=schedule, device="cpu")


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize("name", CALLS)
def test_what_scripts_say_runs(name: str, schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for ranks in (1, 4):
            run(CALLS[name], ranks, schedule)


def test_files_load_on_a_device_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "saved.pt"
    torch.save({"x": torch.arange(3.0)}, file)

    def load(local: int) -> bool:
        where: list[Any] = [f"cuda:{local}", torch.device("cuda", local), {"cpu": f"cuda:{local}"}]
        found = [torch.load(file, map_location=each)["x"] for each in where]
        state = {"x": torch.zeros(3, device="cuda")}
        dcp.save({"x": found[0]}, checkpoint_id=tmp_path / "dcp")
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
        return all(torch.equal(x, torch.arange(3.0)) for x in (*found, state["x"]))

    assert run(load, 2) == [True, True]


@pytest.mark.parametrize("given", [0, torch.device("cuda", 0), None], ids=str)
def test_device_id_of_a_group(given: Any) -> None:
    def use(rank: int) -> object:
        dist.init_process_group(device_id=given)
        bound = dist.group.WORLD.bound_device_id
        return bound, dist.get_backend()

    bound = None if given is None else torch.device("cuda", 0)
    backend = "undefined" if given is None else "nccl"
    assert launch(use, 2, device="cpu") == [(bound, backend)] * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def train(where: Any, low: torch.dtype | None, sharded: bool) -> list[Tensor]:
    """Train on a device that is named, or on the CPU."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(where, local) if where == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if where == "cuda" else "gloo")
    torch.manual_seed(3)
    model: Any = Model().to(device)
    if sharded:
        fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    elif where == "cuda":
        model = DistributedDataParallel(model, device_ids=[local], output_device=local)
    else:
        model = DistributedDataParallel(model)
    torch.manual_seed(local)  # of dropout, which draws from the device's generator
    data = torch.Generator().manual_seed(local)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(device.type, enabled=low == torch.float16)
    for _ in range(3):
        x = torch.randn(4, 6, generator=data).to(device)
        with torch.autocast(device.type, low, enabled=low is not None):
            loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.full_tensor() if sharded else p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:torch.autocast:RuntimeWarning")
@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_bits_are_those_of_the_same_program_on_the_cpu(sharded: bool, low: Any) -> None:
    played = launch(lambda rank: train("cuda", low, sharded), 3, device="cpu")
    plain = launch(lambda rank: train("cpu", low, sharded), 3)
    for one, other in zip(played, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


#: What cannot be played, and what its error names.
REFUSED = {
    "CUDAGraph": (lambda: cuda.CUDAGraph(), "torch.cuda.CUDAGraph is not simulated"),
    "graph": (lambda: cuda.graph(None), "torch.cuda.graph is not simulated"),
    "make_graphed_callables": (
        lambda: cuda.make_graphed_callables(nn.Linear(1, 1), ()),
        "torch.cuda.graphs?.make_graphed_callables|torch.cuda.make_graphed_callables is not",
    ),
    "nccl": (lambda: cuda.nccl.version(), "torch.cuda.nccl.version is not simulated"),
    "properties": (
        lambda: cuda.get_device_properties(0).warp_size,
        r"torch.cuda.get_device_properties\(\).warp_size is not",
    ),
    "cudart": (lambda: cuda.cudart().cudaHostRegister, r"cudart\(\).cudaHostRegister is not"),
    "interprocess": (lambda: cuda.Event(interprocess=True), "interprocess=True"),
    "capability": (
        lambda: torch.accelerator.get_device_capability(),
        "torch.accelerator.get_device_capability is not simulated",
    ),
    "ordinal": (lambda: cuda.set_device(2), "invalid device ordinal: cuda:2, .* has 2"),
    "tensor": (lambda: torch.ones(1, device="cuda:7"), "invalid device ordinal: cuda:7"),
    "move": (lambda: torch.ones(1).to(5), "invalid device ordinal: cuda:5"),
    "several": (
        lambda: DistributedDataParallel(nn.Linear(1, 1).cuda(), device_ids=[0, 1]),
        "device_ids can only be None or contain a single element",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_gpu_is_refused_by_name(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(ReplicaError) as caught:
        run(lambda rank: function(), 2)
    with pytest.raises(type(caught.value.__cause__), match=words):
        raise caught.value.__cause__


@torch.library.custom_op("gpusim_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """A function that draws, which gpusim cannot know."""
    return x + torch.rand(x.shape)


@pytest.mark.filterwarnings("error::RuntimeWarning:gpusim")
def test_what_differs_from_a_gpu_warns_once() -> None:
    def cast(rank: int) -> None:
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pass

    def draw(rank: int) -> None:
        for _ in range(3):
            torch.ops.aten.normal_(torch.ones(3, device="cuda"))  # known by its tag
            torch.ops.gpusim_tests.noisy(torch.ones(3, device="cuda"))

    for use, words in ((cast, CASTS), (draw, DRAWS.format(name="noisy"))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(use, 2)
        said = [each for each in caught if issubclass(each.category, RuntimeWarning)]
        assert [str(each.message) for each in said] == [words]
        assert said[0].filename == __file__


def test_all_is_restored_and_other_threads_see_the_truth() -> None:
    modules: list[Any] = [torch, torch.cuda, torch.accelerator, cuda.nvtx, cuda.nccl]
    modules += [torch.autocast, DistributedDataParallel, FullyShardedDataParallel, torch.Tensor]
    modules += [torch.serialization, torch.amp.autocast_mode, dist.DeviceMesh, torch._C, dist]
    modules += [dist.distributed_c10d, dist.c10d_logger, DefaultDeviceType]
    run(lambda rank: None, 2)  # a process's first launch imports modules of torch.cuda
    before = [dict(vars(module)) for module in modules]
    seen: list[bool] = []

    def use(rank: int) -> None:
        torch.get_device_module()
        DefaultDeviceType.get_device_type()
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.is_available()))
        thread.start()
        thread.join()
        raise KeyError("ends the launch")

    real, module = torch.cuda.is_available(), torch.get_device_module()
    with pytest.raises(ReplicaError):
        run(use, 2)
    assert seen[0] == real == torch.cuda.is_available()
    assert torch.get_device_module() is module
    for module, names in zip(modules, before, strict=True):
        after = dict(vars(module))
        for name in {*names, *after} - {"_default_pg_init_method", "_backend"}:
            assert names.get(name) is after.get(name), (module, name)
    with pytest.raises(ValueError, match=r"device='gpu': expected None, 'cpu' or 'cuda'"):
        launch(use, 1, device="gpu")


SCRIPT = """
import os
import torch
import torch.distributed as dist

local = int(os.environ["LOCAL_RANK"])
{line}
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
x = torch.ones(2, device="cuda")
dist.all_reduce(x)
print(x.tolist())
"""

LINES = [
    "torch.cuda.set_device(local)",
    "assert torch.cuda.is_available()",
    "torch.ones(1).to(torch.accelerator.current_accelerator().type)",
    "if not torch.cuda.is_available(): raise SystemExit('this needs a GPU')",
    "torch.ones(1).to('cuda')",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the scripts find a GPU")
@pytest.mark.parametrize("line", LINES)
def test_torchrun_names_the_cure(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(line=line))
    assert main(["torchrun", "--nproc-per-node", "2", str(path)]) == 1
    assert "--device cpu lets the CPU play it" in capsys.readouterr().err
    arguments = ["torchrun", "--nproc-per-node", "2", "--device", "cpu", str(path)]
    assert main(arguments) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank0]: [2.0, 2.0]",
        "[rank1]: [2.0, 2.0]",
    ]


TRAINER = """
import argparse, os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.cuda import is_available, set_device
from torch.cuda.amp import GradScaler
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Trainer:
    def __init__(self, model, data, optimizer, path):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu_id)
        self.data, self.optimizer, self.path, self.epoch = data, optimizer, path, 0
        if os.path.exists(path):
            saved = torch.load(path, map_location=f"cuda:{self.gpu_id}")
            self.model.load_state_dict(saved["model"])
            self.epoch = saved["epoch"]
        self.model = DDP(self.model, device_ids=[self.gpu_id])
        self.scaler = GradScaler()

    def run(self, epochs):
        for epoch in range(self.epoch, epochs):
            self.data.sampler.set_epoch(epoch)
            for x, y in self.data:
                x = x.to(self.gpu_id, non_blocking=True)
                y = y.to(self.gpu_id, non_blocking=True)
                self.optimizer.zero_grad(set_to_none=True)
                with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(self.model(x), y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if self.gpu_id == 0:
                state = {"model": self.model.module.state_dict(), "epoch": epoch + 1}
                torch.save(state, self.path)
                print(epoch, loss.item().hex(), torch.cuda.max_memory_allocated())
            dist.barrier()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--path")
    options = parser.parse_args()
    assert is_available()
    set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl")
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 5, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, pin_memory=True, shuffle=False, sampler=sampler)
    Trainer(model, loader, optimizer, options.path).run(options.epochs)
    destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("ranks", [4, *slow(64)])
def test_a_script_for_gpus_trains_and_resumes(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_text(TRAINER)

    def lines(epochs: int, file: str) -> list[str]:
        saved = ["--epochs", str(epochs), "--path", str(tmp_path / file)]
        options = ["--nproc-per-node", str(ranks), "--device", "cpu", "--only-rank", "0"]
        assert main(["torchrun", *options, str(path), *saved]) == 0
        return capsys.readouterr().out.splitlines()

    whole = lines(3, "whole.pt")
    assert [line.split()[0] for line in whole] == ["0", "1", "2"]
    assert lines(2, "parts.pt") + lines(3, "parts.pt") == whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is found")
def test_other_errors_name_no_cure() -> None:
    assert not asks_for_gpu(None)
    hook = "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL"
    assert not asks_for_gpu(TypeError(hook))  # --device cpu does not help
    try:
        raise ValueError("nccl-ring")
    except ValueError as error:
        assert not asks_for_gpu(error)
