"""Exact optimization over discrete variables with costs on pairs. It knows no graph."""
