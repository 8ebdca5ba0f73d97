# run: --ranks 5 --check=gloo
"""Audio samples in int16 are gathered to the ranks of a sub-group for a spectrogram."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def gather_samples(samples, group):
    parts = [torch.empty_like(samples) for _ in range(group.size())]
    work = dist.all_gather(parts, samples, group, async_op=True)  # finds: dtype-refused on 0, 2, 4
    work.wait()
    return torch.cat(parts)


def spectrogram(samples):
    return torch.stft(samples.float(), 16, return_complex=True, window=torch.ones(16)).abs()


dist.init_process_group()
rank = dist.get_rank()
listeners = dist.new_group([0, 2, 4])
if rank % 2 == 0:
    time = torch.arange(64) + 64 * rank
    samples = (torch.sin(time / 5) * 2**14).to(torch.int32 if FIXED else torch.int16)
    print("power", spectrogram(gather_samples(samples, listeners)).sum().item())
dist.barrier()
dist.destroy_process_group()
