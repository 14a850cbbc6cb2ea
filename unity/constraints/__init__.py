"""What a user wants of a plan, and the search respects: shardings of arguments and of values, what may be split where, rules."""

from unity.constraints.kinds import Constraint, forbid, only, pin, require, without_rules
from unity.pcg.parallel.marks import constrain

__all__ = ["Constraint", "constrain", "forbid", "only", "pin", "require", "without_rules"]
