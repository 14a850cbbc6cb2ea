"""Compiled programs, read and compared with the plan."""
