"""The difference of two graphs, as a value: found by `diff`, and put into the first graph by `apply`."""

from unity.pcg.diff.applying import apply
from unity.pcg.diff.comparing import diff
from unity.pcg.diff.difference import Added, Changed, Diff, Frame, Reference, Removed

__all__ = ["Added", "Changed", "Diff", "Frame", "Reference", "Removed", "apply", "diff"]
