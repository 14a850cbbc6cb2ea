"""The namespaces of a plan, and the former names of their members."""
