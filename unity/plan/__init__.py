"""Plans: `Plan` and its parts as data, their files, and the shardings of their arguments and results."""
