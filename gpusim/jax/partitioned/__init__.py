"""Sums that XLA's partitioner inserts, with chosen bits.

- `compiling`: the two compilations of a program.
- `rewriting`: sums in a partitioned program, and calls of gpusim's in their place.
- `moves`: reductions that only move data.
- `meshes`: shardings and groups of devices in terms of a mesh's axes.
- `wrapping`: the partitioned program as a module with the signature of the whole.
"""
