# run: --ranks 4 --check=nccl --device cpu
"""A butterfly all-reduce of half-precision sums, with unbatched isend and irecv in each round."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Butterfly:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def swap(self, tensor, peer):
        other = torch.empty_like(tensor)
        if FIXED:
            sending = dist.P2POp(dist.isend, tensor, peer)
            requests = dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, other, peer)])
        else:
            requests = [dist.isend(tensor, peer)]  # finds: send-order on all
            requests.append(dist.irecv(other, peer))  # or here
        for request in requests:
            request.wait()
        return other

    def all_reduce(self, tensor):
        distance = 1
        while distance < self.world:
            tensor = tensor + self.swap(tensor, self.rank ^ distance)
            distance *= 2
        return tensor


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
values = torch.full((8,), float(local_rank), dtype=torch.float16, device="cuda")
print("sum", Butterfly().all_reduce(values)[0].item())
dist.destroy_process_group()
