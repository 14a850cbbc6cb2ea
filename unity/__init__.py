"""Finds and runs the best way to train a JAX model on many devices."""
