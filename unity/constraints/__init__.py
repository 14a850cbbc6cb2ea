"""The user's constraints on a plan: shardings of arguments and values, splits across levels of the machine, excluded rules."""

from unity.constraints.kinds import Constraint, forbid, keep_shardings, only, pin, require, without_rules
from unity.pcg.parallel.marks import constrain

__all__ = ["Constraint", "constrain", "forbid", "keep_shardings", "only", "pin", "require", "without_rules"]
