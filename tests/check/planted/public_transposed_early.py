# run: --ranks 3 --check=gloo
"""gazingstars123/Anima-Standalone-Trainer#39: the result of an asynchronous gather is transposed
and made contiguous, which copies it, before the handle is waited for."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


@dataclass
class Pending:
    tensor: torch.Tensor
    work: Any
    dim: int = 0

    def wait(self):
        self.work.wait()
        return self.tensor.transpose(0, self.dim).contiguous() if self.dim else self.tensor


def gather_sequence(x, dim):
    """Starts to gather the parts of a sequence along a dimension."""
    part = x.transpose(0, dim).contiguous()
    whole = part.new_empty(part.shape[0] * dist.get_world_size(), *part.shape[1:])
    work = dist.all_gather_into_tensor(whole, part, async_op=True)  # or here
    if FIXED or dim == 0:
        return Pending(whole, work, dim)
    whole = whole.transpose(0, dim).contiguous()  # finds: read-before-wait on all
    return Pending(whole, work)


@torch.no_grad()
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(2, 4, 6)
    pending = gather_sequence(hidden, dim=1)
    query = torch.tanh(hidden)
    key = pending.wait()
    weights = torch.softmax(query @ key.transpose(1, 2), dim=-1)
    print(f"rank {dist.get_rank()}: {(weights @ key).mean().item():.4f}")
    dist.destroy_process_group()


main()
