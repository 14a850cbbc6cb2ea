"""FlexFlow's strategies as task graphs that change one operator at a time."""
