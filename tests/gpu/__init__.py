"""Tests that need a GPU and CuPy: `python -m pytest tests/gpu` on a machine that has both.
Everything else in tests/ runs on a CPU."""
