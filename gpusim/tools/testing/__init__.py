"""Tests on simulated ranks: what the pytest plugin `pytest_gpusim` does with a test that is marked.

- `mark`: the arguments of the mark, and the tests that it cannot be on.
- `ranks`: ranks of one process, by gpusim.torch.distributed.launch or gpusim.pmap.
- `failures`: what a failed test says of its ranks.
- `processes`: ranks that are processes, by poprun.
"""
