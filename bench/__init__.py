"""Measures gpusim against what its users would take instead, and against the machine's memory.

Run it with `make bench` or `python -m bench --help`; docs/performance.md reads the results.
"""
