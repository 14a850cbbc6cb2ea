"""Live buffers of one device as users read them: by reason, operator and line of their program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unity.pcg.ir.user_lines import line_behind
from unity.search.space.live_buffers import Buffer


@dataclass(frozen=True)
class LiveBuffer:
    """Bytes that are live on one device, the reason, and the operator and user's line that they belong to.

    Bytes are negative where a value reuses memory that is counted as a later gradient's.
    """

    why: str
    operator: str
    line: str
    nbytes: float


def by_line(buffers: Iterable[Buffer]) -> list[LiveBuffer]:
    """Return the sums of buffers by reason, operator and line, the largest first, without those that are zero."""
    return merge_rows(LiveBuffer(h.why, h.node.kind, line_behind(h.node), h.nbytes) for h in buffers)


def merge_rows(rows: Iterable[LiveBuffer]) -> list[LiveBuffer]:
    """Return rows with those of one reason, operator and line added up, in the order of `by_line`."""
    sums: dict[tuple[str, str, str], float] = {}
    for row in rows:
        key = row.why, row.operator, row.line
        sums[key] = sums.get(key, 0) + row.nbytes
    return sorted((LiveBuffer(*key, nbytes) for key, nbytes in sums.items() if nbytes), key=lambda row: -row.nbytes)
