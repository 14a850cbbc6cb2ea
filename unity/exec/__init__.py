"""From a PCG to a running JAX program, and what the compiled program really does."""
