"""torch's own modules on simulated GPUs: FSDP's offloads, attention of DTensors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from gpusim import ReplicaError
from gpusim.torch.distributed import launch
from tests.oracles.budget import slow

cuda: Any = torch.cuda
F: Any = functional
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*state_dict_type.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),
]


def begin() -> int:
    local = int(os.environ["LOCAL_RANK"])
    cuda.set_device(local)
    dist.init_process_group("nccl")
    return local


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def loss_of(model: Any, rank: int, device: str) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    loss: Tensor = model(x.to(device)).square().mean()
    return loss


def weights_of_one_device(ranks: int, steps: int = 3) -> dict[str, Tensor]:
    """The same training on the CPU, of all ranks' data together."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, rank, "cpu") / ranks).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def check_weights(results: list[dict[str, Tensor]]) -> None:
    expected = weights_of_one_device(len(results))
    for weights in results:
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name])


def first_fsdp(rank: int, offload: bool, original: bool, strategy: Any) -> dict[str, Tensor]:
    local = begin()
    model = FullyShardedDataParallel(
        make().cuda(),
        cpu_offload=CPUOffload(offload_params=offload),
        use_orig_params=original,
        sharding_strategy=strategy,
        device_id=local,
    )
    where = "cpu" if offload else "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    assert {p.device.type for p in model.parameters()} == {where}
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, "cuda").backward()
        optimizer.step()
    kind = StateDictType.FULL_STATE_DICT
    configs = (
        FullStateDictConfig(offload_to_cpu=True),
        FullOptimStateDictConfig(offload_to_cpu=True),
    )
    with FullyShardedDataParallel.state_dict_type(model, kind, *configs):
        full = model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        copy = {name: value.clone() for name, value in full.items()}
        assert {value.device.type for value in full.values()} == {"cpu"}
        assert {v.device.type for s in states.values() for v in s.values()} == {"cpu"}
        loss_of(model, rank, "cuda").backward()
        optimizer.step()
        assert all(torch.equal(copy[name], full[name]) for name in full)  # they are copies
        model.load_state_dict(full)
        again = model.state_dict()
        assert all(torch.equal(again[name], full[name]) for name in full)
    return copy


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, *slow("SHARD_GRAD_OP")], ids=str)
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_first_fsdp_offloads_to_the_cpu(offload: bool, original: bool, strategy: Any) -> None:
    strategy = ShardingStrategy[strategy] if isinstance(strategy, str) else strategy
    arguments = (offload, original, strategy)
    check_weights(launch(first_fsdp, 3, arguments, device="cpu", processes=True))


def second_fsdp(rank: int, offload: bool) -> dict[str, Tensor]:
    begin()
    model: Any = make()
    policy: Any = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for module in (model[0], model[2], model):
        fully_shard(module, **policy)
    where = {"cpu" if offload else "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    assert {p.device.type for p in model.parameters()} == where
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, "cuda").backward()
        optimizer.step()
    assert {p.grad.device.type for p in model.parameters()} == where
    assert {optimizer.state[p]["exp_avg"].device.type for p in model.parameters()} == where
    optimizer.load_state_dict(optimizer.state_dict())
    assert {optimizer.state[p]["exp_avg"].device.type for p in model.parameters()} == where
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: Any = state_dict.get_model_state_dict(model, options=options)
    assert all(not value.is_cuda for value in full.values())
    return dict(full)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("processes", [False, True])
def test_second_fsdp_offloads_to_the_cpu(offload: bool, processes: bool) -> None:
    results = launch(second_fsdp, 3, (offload,), device="cpu", processes=processes)
    check_weights([results[0]] * 3)


def test_fsdp_refuses_modules_that_stay_on_the_cpu() -> None:
    """As on a machine with GPUs."""

    def run(rank: int) -> None:
        begin()
        model = FullyShardedDataParallel(make())
        loss_of(model, rank, "cuda").backward()

    with pytest.raises(ReplicaError, match="unexpectedly has parameters on cpu"):
        launch(run, 2, device="cpu", processes=True)


# Attention


def heads(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 6, 12, 8, generator=generator, dtype=torch.float64) for _ in "qkv"]
    return [each.to(dtype) for each in made]


def attention_of_one_device(dtype: torch.dtype, causal: bool, bias: bool = False) -> list[Tensor]:
    q, k, v = (each.requires_grad_() for each in heads(dtype))
    mask = bias_of(dtype) if bias else None
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in (q, k, v) if each.grad is not None)]


def bias_of(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, 144).view(1, 1, 12, 12).expand(2, 6, 12, 12).to(dtype)


def sharded_heads(rank: int, dtype: torch.dtype, causal: bool, bias: bool) -> list[Tensor]:
    begin()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    parts: list[Any] = [
        distribute_tensor(each.cuda(), mesh, [Shard(1)]).requires_grad_() for each in heads(dtype)
    ]
    mask = distribute_tensor(bias_of(dtype).cuda(), mesh, [Replicate()]) if bias else None
    y: Any = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal)
    assert y.placements == (Shard(1),)
    y.square().sum().backward()
    return [each.full_tensor().detach().cpu() for each in (y, *(part.grad for part in parts))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("causal, bias", [(False, False), (True, False), (False, True)])
def test_attention_of_dtensors(dtype: torch.dtype, causal: bool, bias: bool) -> None:
    if dtype == torch.float64 and causal:
        pytest.skip("torch's math attention mixes a mask of its own with DTensors")
    if dtype == torch.bfloat16 and bias:
        pytest.skip("as float32")
    expected = attention_of_one_device(dtype, causal, bias)
    for found in launch(sharded_heads, 3, (dtype, causal, bias), device="cpu"):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def parallel_context(rank: int, dtype: torch.dtype, causal: bool) -> list[Tensor]:
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental import _attention as internals

    begin()
    internals._cp_options.enable_load_balance = causal
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    whole = [each.cuda() for each in heads(dtype)]
    with experimental.context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 3):
        parts = [each.detach().requires_grad_() for each in whole]
        y = F.scaled_dot_product_attention(*parts, is_causal=causal)
        y.square().sum().backward()
        results: list[Any] = [y.detach(), *(part.grad for part in parts)]
        results = [each.to_local() if hasattr(each, "to_local") else each for each in results]
        joined = internals.context_parallel_unshard(mesh, results, [2] * 4)
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).cpu() for each in joined]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_context_parallelism(dtype: torch.dtype, causal: bool) -> None:
    expected = attention_of_one_device(dtype, causal)
    close: Any = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for found in launch(parallel_context, 3, (dtype, causal), device="cpu", processes=True):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **close)


def test_the_kernels_of_attention_go_with_the_launch() -> None:
    launch(lambda rank: None, 1, device="cpu")
    q, k, v = heads(torch.bfloat16)
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
    with pytest.raises(NotImplementedError, match="flash_attention"):
        flash(q, k, v)
