"""From a request to a plan: the programs that are searched for it, and the ranking of nearly equal plans."""
