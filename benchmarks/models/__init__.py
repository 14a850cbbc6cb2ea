"""The models that the papers measured, and today's, in plain JAX at published sizes: `models.get("vgg16", batch=64)`.

Arguments are abstract (`jax.ShapeDtypeStruct`), so the largest costs nothing. `tiny` gives the same model small enough
to run, and `concrete` real arrays for it.
"""

from .model import Model, concrete
from .registry import get, names, tiny

__all__ = ["Model", "concrete", "get", "names", "tiny"]
