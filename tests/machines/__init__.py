"""Machines unlike those of gpusim's developers: `make test-machines`."""
