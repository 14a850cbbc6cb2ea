"""The search space: a variable for every site of a graph, and its values."""
