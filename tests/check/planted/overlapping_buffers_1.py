# run: --ranks 3 --check=gloo
"""Ring attention: the block of keys and values is sent on and received into the same tensor."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def rotate(kv, rank, world):
    received = torch.empty_like(kv) if FIXED else kv
    operations = [
        dist.P2POp(dist.isend, kv, (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for request in dist.batch_isend_irecv(operations):  # finds: overlapping-buffers on all
        request.wait()
    return received


def ring_attention(q, k, v, rank, world):
    kv = torch.stack([k, v])
    weighted, normalizer = torch.zeros_like(q), torch.zeros(q.shape[0], 1)
    for step in range(world):
        scores = torch.exp(q @ kv[0].t() / q.shape[1] ** 0.5)
        weighted += scores @ kv[1]
        normalizer += scores.sum(-1, keepdim=True)
        if step + 1 < world:
            kv = rotate(kv, rank, world)
    return weighted / normalizer


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
q, k, v = torch.randn(3, 4, 8)
print("attention", ring_attention(q, k, v, rank, world).sum().item())
dist.destroy_process_group()
