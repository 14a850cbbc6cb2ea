"""Foundations that know nothing of graphs: errors, files, text, caches."""
