"""Plans: `Plan` and its parts as data, plan files, the cache, and the placement of arguments."""
