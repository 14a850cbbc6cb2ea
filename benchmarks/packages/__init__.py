"""Models as their own packages build them, at published sizes and on abstract arguments: what capture has to cope with.

Each builder gives a loss and its arguments. Packages are imported when a model of theirs is asked for.
"""

from benchmarks.packages import equinox, flax, haiku, hugging_face, keras, scientific  # each registers its models
from benchmarks.packages.package import MODELS, Packaged

__all__ = ["MODELS", "Packaged", "equinox", "flax", "haiku", "hugging_face", "keras", "scientific"]
