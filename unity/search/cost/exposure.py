"""Exposed communication: the part of the seconds of collectives that computing does not hide, as factors of their prices.

The search adds up the seconds of all operators and collectives. Where devices compute while they communicate, a collective whose
result no operator waits for costs less: gathers of weights, and sums of their gradients, can hide behind the rest of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity.machine.resharding_tables import Changes
from unity.search.cost.cost import SiteCost


@dataclass(frozen=True)
class Exposure:
    """Factors of the seconds of communication.

    They are below 1 for communication that may be hidden, and above 1 for communication that would wait behind it, as each link
    carries one collective after the other.

    Args:
        gathers: the factor for changes of type of weights, and of values that depend on weights alone, also where the backward pass
            repeats them.
        gradients: the factor for changes of type of the gradients of these.
        others: the factor for all other communication, including communication inside of operators and with the host.
    """

    gathers: float = 1.0
    gradients: float = 1.0
    others: float = 1.0

    def of_site(self, cost: SiteCost) -> SiteCost:
        """Return the cost of a site with the exposed part of its communication."""
        if self.others == 1:
            return cost
        transfers = None if cost.transfers is None else self.others * cost.transfers
        return replace(cost, reduces=self.others * cost.reduces, transfers=transfers)

    def of_changes(self, changes: Changes, weight: bool) -> Changes:
        """Return the exposed seconds of changes of type: of weights, if `weight` is true, or of other values."""
        forward, backward = (self.gathers, self.gradients) if weight else (self.others, self.others)
        return Changes(
            forward * changes.forward,
            backward * changes.backward,
            backward * changes.merged,
            changes.size,
            changes.gathered,
        )


FULL = Exposure()  # all communication counts, as on devices that do not compute meanwhile
