"""From a request to a plan: options, the task, and the ranking of near-equal plans."""
