# run: --ranks 4 --check=nccl --device cpu
"""Variable-length predictions are padded and gathered; their lengths are gathered on the host."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def pad_across_processes(tensor):
    world = dist.get_world_size()
    length = torch.tensor([len(tensor)], device=tensor.device if FIXED else "cpu")
    lengths = [torch.zeros_like(length) for _ in range(world)]
    dist.all_gather(lengths, length)  # finds: device-refused on all
    lengths = [int(n) for n in lengths]
    padded = tensor.new_zeros(max(lengths))
    padded[: len(tensor)] = tensor
    return padded, lengths


def gather_predictions(tensor):
    padded, lengths = pad_across_processes(tensor)
    gathered = padded.new_empty(dist.get_world_size(), len(padded))
    dist.all_gather_into_tensor(gathered, padded[None])
    return torch.cat([row[:n] for row, n in zip(gathered, lengths, strict=True)])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    predictions = torch.arange(local_rank + 2, device="cuda") + 10 * local_rank
    print("predictions", gather_predictions(predictions).tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
