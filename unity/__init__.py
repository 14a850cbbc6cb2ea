"""unity: finds, proves and runs the best way to train a JAX model on many devices."""

import sys
from typing import TYPE_CHECKING, Any

from unity.base.errors import (
    CaptureError,
    ConstraintError,
    DerivationError,
    ExportError,
    IllTypedError,
    InfeasibleError,
    OptionError,
    ParallelTypeError,
    PlanError,
    PlanFileError,
    RuleError,
    UnityError,
)
from unity.base.installation import VERSION
from unity.constraints import Constraint, constrain, forbid, keep_shardings, only, pin, require, without_rules
from unity.kernel import Kernel, kernel
from unity.machine.machine import Device, HostLink, Level, Machine, MachineError, Protocol
from unity.optimize import optimize
from unity.pcg.operators.kernel_primitive import KernelError
from unity.plan.face.former_names import former_member
from unity.plan.files.plan_file import load
from unity.plan.frontier import Frontier
from unity.plan.further_options import FurtherOptions, PipelineShape
from unity.plan.plan import Plan
from unity.plan.shardings.optimizer_state import OptimizerState
from unity.training.marked_loss import loss
from unity.training.step import TrainingStep, step

__version__ = VERSION
__all__ = [
    "CaptureError",
    "Constraint",
    "ConstraintError",
    "DerivationError",
    "Device",
    "ExportError",
    "Frontier",
    "FurtherOptions",
    "HostLink",
    "IllTypedError",
    "InfeasibleError",
    "Kernel",
    "KernelError",
    "Level",
    "Machine",
    "MachineError",
    "OptimizerState",
    "OptionError",
    "ParallelTypeError",
    "PipelineShape",
    "Plan",
    "PlanError",
    "PlanFileError",
    "Protocol",
    "RuleError",
    "TrainingStep",
    "UnityError",
    "constrain",
    "forbid",
    "keep_shardings",
    "kernel",
    "load",
    "loss",
    "only",
    "optimize",
    "pin",
    "require",
    "step",
    "without_rules",
]


def __dir__() -> list[str]:
    return sorted((*__all__, "__doc__", "__version__"))


if not TYPE_CHECKING:  # former names are no attributes to a type checker

    def __getattr__(name: str) -> Any:
        return former_member(sys.modules[__name__], "unity", name)
