"""Mesh axes, parallel types, and the factors from which legal types follow."""
