"""Generation of rules: enumerates graphs, pairs those that compute the same, and keeps the pairs that are new and proved."""
