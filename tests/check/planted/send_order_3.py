# run: --ranks 3 --check=nccl --device cpu
"""Ring attention passes its blocks on with isend, then recv, on a group that is set up eagerly."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def pass_on(block, rank, world):
    received = torch.empty_like(block)
    after, before = (rank + 1) % world, (rank - 1) % world
    if FIXED:
        operations = [
            dist.P2POp(dist.isend, block, after),
            dist.P2POp(dist.irecv, received, before),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    else:
        request = dist.isend(block, after)  # finds: send-order on all
        dist.recv(received, before)  # or here
        request.wait()
    return received


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    query = torch.randn(4, 8).to(device)
    block = torch.randn(4, 8).to(device)
    scores = []
    for _ in range(world):
        scores.append(query @ block.t())
        block = pass_on(block, rank, world)
    print("attention", torch.cat(scores, -1).softmax(-1).amax().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
