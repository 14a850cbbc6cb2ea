"""unity: finds, proves and runs the best way to train a JAX model on many devices."""

from unity.constraints import Constraint, constrain, forbid, only, pin, require, without_rules
from unity.frontier import Frontier
from unity.kernel import Kernel, kernel
from unity.optimize import optimize
from unity.pcg.errors import CaptureError, ConstraintError, InfeasibleError, ParallelTypeError, PlanError, UnityError
from unity.pcg.kernels import KernelError
from unity.plan import Plan
from unity.planfile import load
from unity.search.machine import Device, Level, Machine, MachineError
from unity.stream import Flight, Stream

__version__ = "0.1.0"
__all__ = [
    "CaptureError",
    "Constraint",
    "ConstraintError",
    "Device",
    "Flight",
    "Frontier",
    "InfeasibleError",
    "Kernel",
    "KernelError",
    "Level",
    "Machine",
    "MachineError",
    "ParallelTypeError",
    "Plan",
    "PlanError",
    "Stream",
    "UnityError",
    "constrain",
    "forbid",
    "kernel",
    "load",
    "only",
    "optimize",
    "pin",
    "require",
    "without_rules",
]
