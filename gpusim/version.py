"""The version of gpusim: the one place that has it, for the package and its distributions."""

__all__ = ["__version__"]

__version__ = "0.2.0"
