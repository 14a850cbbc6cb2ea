"""Primitives as source: for each one, how an application of it is written in public JAX."""
