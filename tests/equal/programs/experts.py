"""A mixture of experts: experts are spread over ranks, the rest of the model is data-parallel.

Tokens go to their two experts and back by all_to_all_single. --ep is how many ranks share a set of
experts (0: all); with fewer than all ranks there are several sets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from small import Attention, Perceptron, cross_entropy, draw
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BUGS = (
    "experts-not-divided",
    "experts-averaged",
    "copies-not-reduced",
    "router-not-reduced",
    "counts-local",
    "balance-scaled",
    "combined-in-sent-order",
    "weights-not-normalised",
    "capacity-local",
)
LENGTH, WIDTH, HEADS, HIDDEN = 7, 20, 4, 36


class Swap(torch.autograd.Function):
    """Send each rank its rows; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        y = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return Swap.apply(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class Mixture(nn.Module):
    """Each token has two experts; also returns the loss that balances them."""

    def __init__(self, experts: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.count, self.group = experts, mesh.get_group("expert")
        self.ranks, rank = mesh.size(1), mesh.get_local_rank("expert")
        self.router = nn.Linear(WIDTH, experts, bias=False)
        mine = range(experts * rank // self.ranks, experts * (rank + 1) // self.ranks)
        self.experts = nn.ModuleDict({str(n): Perceptron(WIDTH, HIDDEN) for n in mine})

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's two experts, their weights, and the loss that balances the experts."""
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        if not wrong("weights-not-normalised"):
            weights = weights / weights.sum(-1, keepdim=True)
        counts = chosen.flatten().bincount(minlength=self.count)
        tokens = torch.tensor(2 * len(x))
        if not wrong("counts-local"):
            dist.all_reduce(counts)
            dist.all_reduce(tokens)
        balance = self.count * (counts / tokens * probabilities.mean(0)).sum()
        if wrong("balance-scaled"):
            balance = balance * dist.get_world_size()
        return chosen, weights, balance

    def exchange(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Rows sorted by expert go to their experts' ranks; what the experts make of them."""
        counts = chosen.bincount(minlength=self.count).unflatten(0, (self.ranks, -1))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = Swap.apply(rows, sent, received, self.group)
        local = torch.arange(len(self.experts)).repeat(self.ranks)
        order = local.repeat_interleave(theirs.flatten()).argsort(stable=True)
        pieces = arrived[order].split(theirs.sum(0).tolist())
        made = torch.cat([f(part) for f, part in zip(self.experts.values(), pieces, strict=True)])
        return Swap.apply(made[order.argsort()], received, sent, self.group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        chosen, weights, balance = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)
        rows = self.exchange(tokens[order // 2], chosen.flatten())
        if wrong("capacity-local"):  # an expert's rows beyond one and a half times the mean
            one_hot = nn.functional.one_hot(chosen.flatten(), self.count)
            turn = (one_hot.cumsum(0) * one_hot).sum(1)
            full = turn > 3 * len(chosen.flatten()) // (2 * self.count)
            weights = weights.masked_fill(full.view_as(weights), 0)
        if not wrong("combined-in-sent-order"):
            rows = rows[order.argsort()]
        y = (rows.unflatten(0, (-1, 2)) * weights[..., None]).sum(1)
        return y.view_as(x), balance


class Layer(nn.Module):
    def __init__(self, experts: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mixture = Attention(WIDTH, HEADS), Mixture(experts, mesh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.mixture(self.norm2(x))
        return x + y, balance


class Decoder(nn.Module):
    def __init__(self, layers: int, experts: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(experts, mesh) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        draw(self, "")

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.tokens(tokens), torch.zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(self.norm(x)), total


def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average over all ranks; an expert has its set's tokens already and lacks other sets'."""
    ranks, local = (
        dist.get_world_size(),
        ".mixture." if wrong("router-not-reduced") else ".experts.",
    )
    for name, parameter in model.named_parameters():
        if local not in name or wrong("experts-averaged"):
            dist.all_reduce(parameter.grad)
        elif mesh.size(0) > 1 and not wrong("copies-not-reduced"):
            dist.all_reduce(parameter.grad, group=mesh.get_group("copy"))
        if local not in name or not wrong("experts-not-divided"):
            parameter.grad /= ranks


def main() -> None:
    chosen = options(BUGS, layers=2, experts=8, batch=16, ep=0)
    rank, ranks = start()
    ep = min(chosen.ep, ranks) or ranks
    mesh = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("copy", "expert"))
    model = Decoder(chosen.layers, chosen.experts, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(chosen.steps):
        inputs, targets = (each.chunk(ranks)[rank] for each in text(step, chosen.batch, LENGTH))
        logits, balance = model(inputs)
        loss = cross_entropy(logits, targets) + 0.1 * balance
        loss.backward()
        reduce_gradients(model, mesh)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        report(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
