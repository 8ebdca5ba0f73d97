"""Planted programs, and what `gpusim torchrun --check` says of each."""
