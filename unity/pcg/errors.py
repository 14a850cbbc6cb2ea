"""What can be wrong with what the user gave us. Messages say what, where, and the way out."""


class UnityError(Exception):
    """The base of every error that unity raises on purpose."""


class CaptureError(UnityError):
    """A function or its arguments cannot become a graph."""


class ParallelTypeError(UnityError):
    """A graph whose types do not agree with what its operators can do."""


class PlanError(UnityError):
    """A plan is used with other arguments, devices or files than it was made for."""


class PlanFileError(PlanError):
    """A file is damaged, from a newer version, or none that unity wrote."""


class DerivationError(PlanError):
    """A derivation that does not lead from one program to the other: which step, which rule, and what is wrong."""


class InfeasibleError(UnityError):
    """No plan meets the limits. The message says what is needed, what there is, and what comes nearest."""


class ConstraintError(UnityError):
    """A constraint that says nothing that is known: a name, a path or a dimension that is not there."""


class RuleError(UnityError):
    """A rule that cannot be read, or says nothing: its text, its variables, or its sides' types are wrong."""


class IllTypedError(RuleError):
    """An operator of a term whose operands it cannot take."""
