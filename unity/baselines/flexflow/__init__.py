"""FlexFlow's search (Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6).

- `mcmc` is the algorithm in FlexFlow's own world, with any degrees on any devices.
- `layers` clusters a captured program into what FlexFlow calls operators.
- `strategy/` turns strategies into task graphs, and `delta/` simulates them again after each change.
- `mesh` restricts the search to what the axes of a mesh express, so that its result can run: `unity.optimize(search="flexflow")`.
"""

from unity.baselines.flexflow.layers import layers
from unity.baselines.flexflow.mcmc import MarkovChain, McmcResult, Stop, explored, initial

__all__ = ["MarkovChain", "McmcResult", "Stop", "explored", "initial", "layers"]
