"""The parallel computation graph."""
