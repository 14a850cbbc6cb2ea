"""From a JAX function to a serial graph."""
