"""The optimum of small executions in the simulator (FlexFlow, section 8.3): bounds, and two ways to look at all that may be better.

- `bound`: what is certain of a step before all operators' configurations are known.
- `layers`: networks that are chains, operator by operator, all strategies so far at once.
- `depth_first`: any network, by depth-first search with A* pruning, as the paper has it.
"""
