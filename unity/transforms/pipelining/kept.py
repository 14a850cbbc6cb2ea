"""Pipelines read from plan files."""

from __future__ import annotations

from collections.abc import Sequence

from unity.base.errors import PlanError
from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.stages import Mixed
from unity.pcg.types.axis import Axis
from unity.transforms.pipelining.chain import chain_of
from unity.transforms.pipelining.pipelining import AlikeRecord, PipelineSource, Pipelining, UnlikeRecord, pipelined
from unity.transforms.pipelining.unlike import unlike


def restored(captured: Captured, record: AlikeRecord | UnlikeRecord, axes: Sequence[Axis]) -> Pipelining:
    """Make the pipeline of a plan file again. Raises PlanError if the program or the machine does not allow it."""
    names, rounds, kind = record.along, record.rounds, record.schedule
    along = [axis for axis in axes if axis.name in names]
    if len(along) != len(names):
        raise PlanError(f"a pipeline along {' '.join(names)} is none of a machine with axes {' '.join(a.name for a in axes)}")
    try:
        if isinstance(record, UnlikeRecord):
            return unlike(chain_of(captured), captured, record.cuts, along, rounds, record.pack, kind, record.whole)
        return pipelined(PipelineSource(captured), record.rolled, record.scan, along, rounds, kind)
    except Mixed as reason:
        raise PlanError(f"the pipeline along {' '.join(names)} cannot be made: {reason}") from None
