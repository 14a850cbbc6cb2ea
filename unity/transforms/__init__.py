"""Transformations of captured programs: rewriting, pipelining, branches, packing."""
