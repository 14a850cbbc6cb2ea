"""Compiled programs, read and held against the plan."""
