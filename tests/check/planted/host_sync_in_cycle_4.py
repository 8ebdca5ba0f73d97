# run: --ranks 2 --check=nccl --device cpu
"""Token counts are exchanged and read by tolist() for the splits; ranks mix up the two layers."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Router:
    def __init__(self, ranks):
        self.group = dist.new_group(ranks)

    def dispatch(self, tokens, send_counts):
        group = self.group
        counts = torch.tensor(send_counts, device=tokens.device)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)  # finds: host-sync-in-cycle on all
        splits = received.tolist()
        output = tokens.new_empty(sum(splits), tokens.shape[1])
        dist.all_to_all_single(output, tokens, splits, send_counts, group=group)  # or here
        return output


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
routers = [Router([0, 1]), Router([0, 1])]
tokens = torch.full((4, 2), float(local_rank), device="cuda")
micro_batches = [(0, [1, 3]), (1, [2, 2])]
if local_rank == 1 and not FIXED:
    micro_batches = micro_batches[::-1]
for layer, send_counts in micro_batches:
    output = routers[layer].dispatch(tokens, send_counts)
    print("layer", layer, "received", output[:, 0].tolist())
dist.destroy_process_group()
