"""FlexFlow's strategies as task graphs, and delta simulation of their changes."""
