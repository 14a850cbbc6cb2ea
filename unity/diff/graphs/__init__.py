"""The difference of two graphs, as a value: found by `diff`, and put into the first graph by `apply`."""

from unity.diff.graphs.applying import apply
from unity.diff.graphs.comparing import diff
from unity.diff.graphs.difference import Added, Changed, Diff, Frame, Reference, Removed

__all__ = ["Added", "Changed", "Diff", "Frame", "Reference", "Removed", "apply", "diff"]
