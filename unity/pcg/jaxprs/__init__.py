"""JAX programs as they are read: equations, nested programs, primitives of other packages, source lines."""
