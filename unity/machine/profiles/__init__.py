"""Measured operators: what was measured on which devices, where it is kept, and what it says of shapes that were not."""
