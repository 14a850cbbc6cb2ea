"""What can be wrong with what the user gave us. Messages say what, where, and the way out, and end in the page that says more."""

import re

LINK = re.compile(r"\s*\(docs: ([\w/-]+(?:#[\w-]+)?)\)")


class UnityError(Exception):
    """The base of every error that unity raises on purpose.

    A message ends in one link into the documentation, as `page#section`: its own, or that of an error that it quotes, or else the
    page of its class, `docs`. `reason` is the message without the link.
    """

    docs = "plan"

    def __init__(self, message: str = "") -> None:
        links = LINK.findall(message)
        self.link: str = links[-1] if links else self.docs
        self.reason: str = LINK.sub("", message).rstrip()
        super().__init__(f"{self.reason} (docs: {self.link})")


class CaptureError(UnityError):
    """A function or its arguments cannot become a graph."""

    docs = "capture"


class ParallelTypeError(UnityError):
    """A graph whose types do not agree with what its operators can do."""

    docs = "types"


class OptionError(UnityError, ValueError):
    """An option that is not known, or does not go with another one."""

    docs = "plan#options"


class PlanError(UnityError):
    """A plan is used with other arguments, devices or files than it was made for."""

    docs = "plan#files"


class PlanFileError(PlanError):
    """A file is damaged, from a newer version, or none that unity wrote."""


class DerivationError(PlanError):
    """A derivation that does not lead from one program to the other: which step, which rule, and what is wrong."""

    docs = "rewriting#derivations"


class InfeasibleError(UnityError):
    """No plan meets the limits. The message says what is needed, what there is, and what comes nearest."""

    docs = "memory#infeasible"


class ConstraintError(UnityError):
    """A constraint that says nothing that is known: a name, a path or a dimension that is not there."""

    docs = "constraints"


class RuleError(UnityError):
    """A rule that cannot be read, or says nothing: its text, its variables, or its sides' types are wrong."""

    docs = "write-rules"


class IllTypedError(RuleError):
    """An operator of a term whose operands it cannot take."""

    docs = "rules#what-a-rules-sides-mean"
