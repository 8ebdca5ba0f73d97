"""Faults of ranks that are processes: plans, how ranks die, and how others see it."""
