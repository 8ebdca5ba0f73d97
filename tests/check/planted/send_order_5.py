# run: --ranks 5 --check=nccl
"""A heat equation on a line of ranks: halos are sent to both sides, and only then received."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Domain:
    def __init__(self, cells):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.u = torch.zeros(cells + 2, dtype=torch.float64)
        self.u[1:-1] = self.rank + torch.linspace(0, 1, cells, dtype=torch.float64)

    def neighbours(self):
        """The rank on each side, with the cell to send and the halo to fill."""
        if self.rank > 0:
            yield self.rank - 1, self.u[1:2], self.u[:1]
        if self.rank < self.world - 1:
            yield self.rank + 1, self.u[-2:-1], self.u[-1:]

    def exchange(self):
        requests = []
        if FIXED:
            operations = [dist.P2POp(dist.isend, edge, peer) for peer, edge, _ in self.neighbours()]
            operations += [dist.P2POp(dist.irecv, halo, p) for p, _, halo in self.neighbours()]
            requests = dist.batch_isend_irecv(operations)
        else:
            for peer, edge, _ in self.neighbours():
                requests.append(dist.isend(edge, peer))  # finds: send-order on all
            for peer, _, halo in self.neighbours():
                requests.append(dist.irecv(halo, peer))  # or here
        for request in requests:
            request.wait()

    def step(self):
        self.exchange()
        self.u[1:-1] += 0.1 * (self.u[:-2] - 2 * self.u[1:-1] + self.u[2:])


dist.init_process_group("gloo")
domain = Domain(6)
for _ in range(4):
    domain.step()
print("heat", domain.u[1:-1].sum().item())
dist.destroy_process_group()
