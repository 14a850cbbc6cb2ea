"""Whole training steps: `unity.step` in the place of `jax.jit`, with a plan for every loss that is marked by `unity.loss`."""
