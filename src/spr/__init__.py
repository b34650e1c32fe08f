"""SPR: data-efficient reinforcement learning with self-predictive representations, in PyTorch."""

from importlib.metadata import version

__version__ = version("spr")
