"""Readers of what others wrote, given broken input: `python -m tests.fuzz`."""
