"""Random programs: calls, messages and training steps in an order that a seed draws."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch.distributed_programs.base import (
    Results,
    batches,
    drawn,
    legacy,
    program,
    start,
    weights,
)


@program
def mixture(seed: int) -> Results:
    """Blocks of training in a random order, of models that are sharded in each way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.utils import parametrizations, parametrize
    from torch.utils.checkpoint import checkpoint

    rank, size = start()
    draw = random.Random(seed)  # the same on all ranks
    torch.manual_seed(seed)  # dropout, and rank's own
    random.seed(rank)
    legacy.seed(rank)
    mesh = init_device_mesh("cpu", (size,))
    width = 6 * size

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
            self.again = draw.random() < 0.5
            self.drop = draw.choice([0.0, 0.3])

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(F.gelu(self.into(x)), self.drop)
            if draw_in.random() < 0.3:
                dist.barrier()
            return x + self.out(y)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if block.again else block(x)
            return x

    draw_in = random.Random(seed + 1)

    def replicated() -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            drawn(Stack(), seed),
            bucket_cap_mb=draw.choice([0.002, 25]),
            find_unused_parameters=draw.random() < 0.3,
        )

    def sharded() -> nn.Module:
        low = draw.choice([None, torch.bfloat16])
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        model = drawn(Stack(), seed)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def parallel() -> nn.Module:
        model = drawn(Stack(), seed)
        for block in model.blocks:
            block.drop = 0.0  # each rank has a part of it
            parallelize_module(block, mesh, {"into": ColwiseParallel(), "out": RowwiseParallel()})
        return model

    def bent() -> nn.Module:
        model = drawn(Stack(), seed)
        for block in model.blocks:
            block.again = False  # torch refuses a weight that is cached in one of two passes
            parametrizations.weight_norm(block.into)
        return nn.parallel.DistributedDataParallel(model)

    makers = {"ddp": replicated, "fsdp2": sharded, "tp": parallel, "bent": bent}
    models = {name: makers[name]() for name in draw.sample(sorted(makers), 2)}
    optimizers = {
        name: draw.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=0.01)
        for name, model in models.items()
    }
    data = batches(rank, 100, width, seed)
    common = batches(0, 100, width, seed)
    found: Results = {}
    for number in range(draw.randrange(3, 7)):
        name = draw.choice(sorted(models))
        model, optimizer = models[name], optimizers[name]
        x, y = next(common if name == "tp" else data)
        kind = draw.choice(["plain", "autocast", "cached", "attention", "accumulate", "noise"])
        if name != "ddp" and kind == "autocast":
            kind = "plain"
        if kind == "noise":
            found[f"noise {number}"] = torch.tensor(
                [torch.rand(1).item(), random.random(), legacy.randn()], dtype=torch.float64
            )
            dist.barrier()
        optimizer.zero_grad()
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
        elif kind == "cached":
            with parametrize.cached():
                z = model(x)
                dist.barrier()
                loss = F.mse_loss(model(z).float() if name == "bent" else z.float(), y)
        elif kind == "attention":
            with sdpa_kernel(SDPBackend.MATH):
                z = model(x).float().reshape(1, 2, 3, width)
                loss = F.scaled_dot_product_attention(z, z, z).square().mean()
        else:
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if kind == "accumulate" and name != "tp":
            x, y = next(data)
            F.mse_loss(model(x).float(), y).backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach()
    for name, model in models.items():
        found |= {f"{name} {key}": value for key, value in weights(model).items()}
    return found
