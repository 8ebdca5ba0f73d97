"""One GPU plays all the GPUs of a script: `launch(device="cuda")`, `gpusim torchrun --device cuda`.

Where there is no GPU the CPU plays the one GPU (`tests.torch.one_gpu`), and refuses other numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gpusim.__main__ import main
from gpusim.errors import ReplicaError
from gpusim.torch.distributed import launch
from tests.torch.one_gpu import machine_with_one_gpu

REAL = torch.cuda.is_available()
EXAMPLES = Path(__file__).parents[2] / "examples" / "torchrun"
R = 3


@pytest.fixture(autouse=True)
def one_gpu() -> Iterator[None]:
    with nullcontext() if REAL else machine_with_one_gpu():
        yield


def on_ranks(body: Callable[[torch.device], Any], ranks: int = R, **options: Any) -> list[Any]:
    """What a function of the rank's GPU returns on each rank."""

    def run(rank: int) -> Any:
        number = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(number)
        dist.init_process_group("nccl")
        return body(torch.device("cuda", number))

    return launch(run, ranks, device="cuda", **options)


def test_tensors_have_the_numbers_that_a_script_gives() -> None:
    def body(mine: torch.device) -> None:
        number, other = mine.index, torch.device("cuda", (mine.index + 1) % R)
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (R, number)
        x = torch.arange(6.0, device=mine)
        assert x.device == mine and x.get_device() == number and x.is_cuda
        for made in (x + 1, x[1:], x.view(2, 3).T, x.clone(), torch.zeros_like(x), x.half()):
            assert made.device == mine
        assert x.to(mine) is x and x.to(mine.type) is x and x.cuda() is x
        y = x.to(other)
        assert y.device == other and y.data_ptr() != x.data_ptr() and torch.equal(y.cpu(), x.cpu())
        assert (y * 2).device == other and torch.empty_like(y).device == other
        assert x.cpu().device == torch.device("cpu") and torch.ones(3).to(other).device == other
        with torch.cuda.device(other):
            assert torch.cuda.current_device() == other.index
            assert torch.ones(2, device="cuda").device == other
        assert torch.cuda.current_device() == number
        with torch.device(mine):
            assert torch.zeros(2).device == mine
        layer = nn.Linear(4, 2).to(mine)
        assert {each.device for each in layer.parameters()} == {mine}
        layer(torch.ones(3, 4, device=mine)).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.device == mine
        name = torch.cuda.get_device_name(other)
        assert name == torch.cuda.get_device_name(mine)
        assert torch.cuda.current_stream(mine) == torch.cuda.current_stream(mine)
        assert not isinstance(mine, torch.cuda.device)
        torch.cuda.synchronize(other)
        stream = torch.cuda.Stream(device=mine if REAL else None)
        with torch.cuda.stream(stream):
            z = x * 2
        stream.synchronize()
        assert z.sum().item() == 30
        assert torch.Generator(device=mine).device.type == ("cuda" if REAL else "cpu")

    on_ranks(body)


def test_a_number_that_no_rank_has_is_not_there() -> None:
    def body(mine: torch.device) -> None:
        for fails in (
            lambda: torch.ones(2, device=f"cuda:{R}"),
            lambda: torch.ones(2).to(f"cuda:{R}"),
            lambda: torch.cuda.set_device(R),
            lambda: torch.ones(2).cuda(R),
        ):
            with pytest.raises(RuntimeError, match=f"invalid device ordinal: cuda:{R}"):
                fails()

    on_ranks(body)


@pytest.mark.parametrize("reduction", ["linear", "ring", "nccl-ring", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_collectives_have_the_bits_of_the_host(dtype: torch.dtype, reduction: str) -> None:
    def values(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return (torch.randn(1001, generator=generator) * 100).to(dtype)

    def calls(x: Tensor) -> list[Tensor]:
        total = x.clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(x) for _ in range(R)]
        dist.all_gather(parts, x)
        block = torch.empty(333, dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(block, x[:999].contiguous())
        assert {each.device for each in (total, *parts, block)} == {x.device}
        return [each.cpu() for each in (total, *parts, block)]

    def on_host(rank: int) -> list[Tensor]:
        dist.init_process_group("nccl")
        return calls(values(rank))

    played = on_ranks(lambda mine: calls(values(mine.index).to(mine)), reduction=reduction)
    expected = launch(on_host, R, reduction=reduction)
    for one, other in zip(played, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(device: torch.device | None, wrap: str) -> list[Tensor]:
    """The parameters of a model after three steps on the calling rank, on the host."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if device is not None:
        model = model.to(device)
    if wrap == "ddp":
        ids = None if device is None else [device.index]
        model = DistributedDataParallel(model, device_ids=ids)
    else:
        mesh = init_device_mesh("cpu" if device is None else "cuda", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(5, 8, generator=generator)
        x = x if device is None else x.to(device)
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        assert device is None or loss.device == device
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().cpu() for p in whole]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_models_train_as_on_the_host(wrap: str) -> None:
    def on_host(rank: int) -> list[Tensor]:
        dist.init_process_group("gloo")
        return trained(None, wrap)

    expected = launch(on_host, R)
    for found in on_ranks(lambda mine: trained(mine, wrap)):
        for one, other in zip(found, expected[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4 if REAL else 0, atol=1e-5 * REAL)


def test_checkpoints_say_which_gpu(tmp_path: Path) -> None:
    def body(mine: torch.device) -> None:
        x = torch.arange(4.0, device=mine)
        path = tmp_path / f"{mine.index}.pt"
        torch.save({"x": x}, path)
        dist.barrier()
        left = torch.device("cuda", (mine.index - 1) % R)
        theirs = torch.load(tmp_path / f"{left.index}.pt")["x"]
        assert theirs.device == left
        assert torch.load(path, map_location=left)["x"].device == left
        assert torch.load(path, map_location="cpu")["x"].device.type == "cpu"
        where = {f"cuda:{mine.index}": str(left)}
        assert torch.load(path, map_location=where)["x"].device == left

    if REAL:  # the CPU that plays one GPU writes that tensors are on the CPU
        on_ranks(body)


def test_random_numbers_are_those_of_the_ranks_own_gpu() -> None:
    def body(mine: torch.device) -> list[list[float]]:
        torch.cuda.manual_seed(mine.index)
        first = torch.rand(4, device=mine)
        dist.barrier()
        state = torch.cuda.get_rng_state(mine)
        second = torch.rand(4, device=mine)
        torch.cuda.set_rng_state(state, mine)
        assert torch.equal(torch.rand(4, device=mine), second)
        return [first.tolist(), second.tolist()]

    found = on_ranks(body)
    assert found == on_ranks(body)
    assert len({str(each) for each in found}) == R


def losses(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss (\d+\.\d+)", text)]


SHORT = {
    "ddp": "--epochs 2",
    "fsdp2": "--steps 11",
    "moe": "--steps 21",
    "tensor_parallel": "--steps 11",
    "char_gpt": "--steps 21 --sample 3",
    "multigpu_resume": "2",
}


@pytest.mark.parametrize("name", SHORT)
def test_examples_run_unmodified(
    name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for device in ("cuda", "cpu"):
        (tmp_path / device).mkdir()
        monkeypatch.chdir(tmp_path / device)
        command = ["torchrun", "--nproc-per-node", "4", "--threads", "--device", device]
        code = main([*command, str(EXAMPLES / f"{name}.py"), *SHORT[name].split()])
        out = capfd.readouterr()
        assert code == 0, out.err
        found[device] = losses(out.out)
    assert found["cuda"]
    if REAL and name == "fsdp2":  # draws its weights on the GPU, whose generator is another
        assert found["cuda"][-1] < found["cuda"][0]
        return
    head = 3 if REAL else None  # later steps drift apart: other roundings
    assert found["cuda"][:head] == pytest.approx(found["cpu"][:head], rel=0.01 * REAL)


def test_what_one_gpu_cannot_play_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="ranks that share a GPU are threads"):
        launch(print, 2, device="cuda", processes=True)
    with pytest.raises(ValueError, match="expected None, 'cpu' or 'cuda'"):
        launch(print, 2, device="tpu")
    code = main(["torchrun", "--device", "cuda", "--processes", str(EXAMPLES / "ddp.py")])
    assert code == 2
    assert "leave out --processes" in capsys.readouterr().err


@pytest.mark.skipif(not REAL, reason="needs a GPU's memory")
def test_an_error_of_memory_names_the_ranks() -> None:
    with pytest.raises(ReplicaError, match=r"rank \d.*the 3 ranks of this launch share"):
        on_ranks(lambda mine: torch.empty(1 << 45, device=mine))


@pytest.mark.skipif(not REAL, reason="needs a GPU")
def test_a_number_without_the_option_names_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, torch\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n")
    assert main(["torchrun", "--nproc-per-node", "64", str(script)]) == 1
    assert "--device cuda" in capfd.readouterr().err


def test_the_callers_torch_is_as_before() -> None:
    before = dict(vars(torch.cuda))
    on_ranks(lambda mine: None)
    changed = [name for name, value in before.items() if vars(torch.cuda).get(name) is not value]
    assert set(changed) <= {"_cached_device_count", "_queued_calls", "_lazy_seed_tracker"}
