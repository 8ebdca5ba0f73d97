# run: --ranks 4 --check=gloo
"""Neighbours in a ring exchange sums by batch_isend_irecv; only the last request is awaited."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def exchange(mine, rank, world):
    theirs = torch.empty_like(mine)
    requests = dist.batch_isend_irecv(  # finds: never-waited on all
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % world),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % world),
        ]
    )
    if FIXED:
        for request in requests:
            request.wait()
    else:
        requests[-1].wait()
    return theirs


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    current = torch.full((5,), float(rank), dtype=torch.float64)
    total = current.clone()
    for _ in range(world - 1):
        current = exchange(current, rank, world)
        total += current
    print("sum over the ring", total.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
