"""FlexFlow's search (Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6).

`mcmc` is the algorithm in FlexFlow's own world: any degrees, any devices; `layers` is what has a configuration there. `mesh` keeps
to what a mesh's axes can express, so that what it finds can be run: `unity.optimize(search="flexflow")`.
"""

from unity.baselines.flexflow.layers import layers
from unity.baselines.flexflow.mcmc import Chain, Found, Stop, explored, initial

__all__ = ["Chain", "Found", "Stop", "explored", "initial", "layers"]
