"""Peak memory of a parallel graph on one device."""
