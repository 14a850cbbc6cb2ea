"""Unity's published search: parallelization by substitution alone (sections 4 and 5), for comparison with the exact search."""
