# run: --ranks 2 --check=nccl
"""pytorch/pytorch#109401: two pipeline stages post the receive of what comes later before the send
that the other side waits for; NCCL runs the calls of a pair in order."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv
SHAPE = (2, 4)


class Stage:
    def __init__(self, rank):
        self.peer = 1 - rank
        self.received = []

    def receive(self):
        buffer = torch.empty(SHAPE)
        self.received.append(buffer)
        return buffer

    def exchange(self, outgoing):
        incoming = self.receive()
        if FIXED:
            ops = [
                dist.P2POp(dist.irecv, incoming, self.peer),
                dist.P2POp(dist.isend, outgoing, self.peer),
            ]
            return dist.batch_isend_irecv(ops)
        return [
            dist.irecv(incoming, src=self.peer),  # finds: send-order on all
            dist.isend(outgoing, dst=self.peer),  # or here
        ]


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    stage = Stage(rank)
    if rank == 0:
        dist.send(torch.randn(SHAPE), dst=1)
    else:
        dist.recv(stage.receive(), src=0)
    for micro_batch in range(2):
        outgoing = torch.full(SHAPE, float(10 * rank + micro_batch))
        for work in stage.exchange(outgoing):
            work.wait()
    print(f"stage {rank}: {[round(t.mean().item(), 2) for t in stage.received]}")
    dist.destroy_process_group()


main()
