"""Errors for users. A message names the cause, the place and the way out, and ends in a link into the documentation."""

import re
from traceback import extract_tb

from unity.base.formatting import short

LINK = re.compile(r"\s*\(docs: ([\w/-]+(?:#[\w-]+)?)\)")


class UnityError(Exception):
    """The base of every error that unity raises on purpose.

    Attributes:
        link: the page that explains the error, as `page#section`. It is the last link in the message, which may quote another
            error, or else the page of the class, `docs`.
        reason: the message without the link.
    """

    docs = "plan"

    def __init__(self, message: str = "") -> None:
        links = LINK.findall(message)
        self.link: str = links[-1] if links else self.docs
        self.reason: str = LINK.sub("", message).rstrip()
        super().__init__(f"{self.reason} (docs: {self.link})")


def reason_of(error: BaseException) -> str:
    """Return the message of an exception; of one without a message, its type and the place that raised it."""
    if str(error).strip():
        return str(error)
    frames = extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({short(f'{frames[-1].filename}:{frames[-1].lineno}')})" if frames else ""
    return f"{type(error).__name__} without a message{place}"


def file_fault(error: Exception) -> str:
    """Return why a file cannot be read or written, without its path, which the message around it names."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


class CaptureError(UnityError):
    """A function or its arguments cannot become a graph."""

    docs = "capture"


class ParallelTypeError(UnityError):
    """The types of a graph contradict its operators."""

    docs = "types"


class OptionError(UnityError, ValueError):
    """An option is unknown, or excludes another one."""

    docs = "plan#options"


class PlanError(UnityError):
    """A plan meets other arguments, devices or files than those it was made for."""

    docs = "plan#files"


class ExportError(PlanError):
    """A plan that has no counterpart in plain JAX: the operator, the source line, and the reason."""

    def __init__(self, source: str, operator: str, why: str) -> None:
        self.operator, self.why = operator, why
        place = f"{short(source)}: " if source else ""
        super().__init__(f"{place}{operator} cannot be exported: {why}. Nothing was written. (docs: export#what-is-refused)")


class PlanFileError(PlanError):
    """A file is damaged, comes from a newer version, or was not written by unity."""


class DerivationError(PlanError):
    """A derivation does not lead from one program to the other. The message names the step, the rule and the fault."""

    docs = "rewriting#derivations"


class InfeasibleError(UnityError):
    """No plan meets the limits. The message names the need, the limit, and the plan that comes nearest."""

    docs = "memory#infeasible"


class ConstraintError(UnityError):
    """A constraint names an argument, a path or a dimension that does not exist."""

    docs = "constraints"


class RuleError(UnityError):
    """A rule cannot be read, or its variables or the types of its sides are wrong."""

    docs = "write-rules"


class IllTypedError(RuleError):
    """An operator of a term cannot take its operands."""

    docs = "rules#what-a-rules-sides-mean"
