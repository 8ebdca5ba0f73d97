"""A mixture of experts: tokens travel to the ranks of their experts, and back, by all_to_all.

Each rank has experts of its own and a copy of the rest, whose gradients are averaged.

    torchrun --standalone --nproc-per-node 4 moe.py
    gpusim torchrun --nproc-per-node 64 --reduction nccl-ring moe.py --experts 64
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_to_all_single

WIDTH, CLASSES = 16, 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class MixtureOfExperts(nn.Module):
    """A router, and the experts of this rank. Each token goes to the `top` best experts."""

    def __init__(self, experts: int, top: int) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.here = experts // ranks
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.local = nn.ModuleDict(
            {str(number): Expert() for number in range(rank * self.here, (rank + 1) * self.here)}
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.router(x).softmax(-1)
        gates, chosen = chances.topk(self.top, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        # The router is to use all experts alike.
        share = torch.bincount(chosen, minlength=self.experts) / chosen.numel()
        self.balance = self.experts * (share * chances.mean(0)).sum()

        order = chosen.argsort(stable=True)  # by expert, so by rank
        copies = x.repeat_interleave(self.top, dim=0)[order]
        counts = torch.bincount(chosen, minlength=self.experts).view(-1, self.here)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sent_sizes, received_sizes = counts.sum(1).tolist(), received.sum(1).tolist()
        tokens = all_to_all_single(
            copies.new_empty(sum(received_sizes), WIDTH), copies, received_sizes, sent_sizes
        )
        expert_of = torch.arange(self.here, device=x.device).repeat(len(received))
        expert_of = expert_of.repeat_interleave(received.flatten())
        results = torch.zeros_like(tokens)
        for number, expert in enumerate(self.local.values()):
            places = (expert_of == number).nonzero()[:, 0]
            results = results.index_copy(0, places, expert(tokens[places]))
        returned = all_to_all_single(torch.empty_like(copies), results, sent_sizes, received_sizes)
        back = torch.zeros_like(returned).index_copy(0, order, returned)
        return (back.unflatten(0, (-1, self.top)) * gates[..., None]).sum(1)


class Classifier(nn.Module):
    def __init__(self, experts: int, top: int) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)
        self.mixture = MixtureOfExperts(experts, top)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        return self.out(x + self.mixture(self.norm(x)))


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in four dimensions; a class for each of eight products of signs."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.rand(size, 4, generator=generator) * 2 - 1
    bits = (x > 0).long()
    labels = (bits[:, 0] ^ bits[:, 1]) + 2 * (bits[:, 1] ^ bits[:, 2]) + 4 * (bits[:, 3])
    return x, labels


def main() -> None:
    parser = argparse.ArgumentParser(description="a mixture of experts over all ranks")
    parser.add_argument("--experts", type=int, default=8, help="in all")
    parser.add_argument("--top", type=int, default=2, help="experts of a token")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="of a rank")
    parser.add_argument("--out", help="a file for the final weights")
    options = parser.parse_args()

    accelerated = torch.accelerator.is_available()
    device = torch.device(torch.accelerator.current_accelerator().type if accelerated else "cpu")
    if accelerated:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.experts % ranks:
        parser.error(f"--experts {options.experts} is not a multiple of {ranks} ranks")

    torch.manual_seed(rank)
    model = Classifier(options.experts, options.top).to(device)
    shared = [p for name, p in model.named_parameters() if ".local." not in name]
    own = [p for name, p in model.named_parameters() if ".local." in name]
    for parameter in shared:
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for step in range(options.steps):
        x, y = (t.to(device) for t in batch(step, rank, options.batch_size))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss + 0.01 * model.mixture.balance).backward()
        works = [dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True) for p in shared]
        for parameter in own:  # the sum over all tokens is that of the mean loss times the ranks
            if parameter.grad is not None:
                parameter.grad /= ranks
        for work in works:
            work.wait()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
        if rank == 0 and (step % 20 == 0 or step + 1 == options.steps):
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)

    parts = [None] * ranks if rank == 0 else None
    local = {name: value.cpu() for name, value in model.state_dict().items()}
    dist.gather_object(local, parts)
    if rank == 0 and options.out:
        weights = {name: value for part in parts or [] for name, value in (part or {}).items()}
        torch.save({"model": weights, "losses": losses}, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
