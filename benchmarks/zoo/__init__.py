"""Training losses of packages on PyPI, taken as they ship: `python -m benchmarks.zoo`."""

from benchmarks.zoo import language, probability, reinforcement, science, vision  # each registers its entries
from benchmarks.zoo.entry import ENTRIES, Entry

__all__ = ["ENTRIES", "Entry", "language", "probability", "reinforcement", "science", "vision"]
