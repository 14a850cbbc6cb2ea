"""From a request to a plan: the task, which searches the programs, and the ranking of nearly equal plans."""
