"""Pipelines read from plan files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unity.base.errors import PlanError
from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.stages import GPIPE, Mixed
from unity.pcg.types.axis import Axis
from unity.transforms.pipelining.balance import Cuts
from unity.transforms.pipelining.chain import chain_of
from unity.transforms.pipelining.pipelining import PipelineSource, Pipelining, pipelined
from unity.transforms.pipelining.unlike import unlike


def from_json(captured: Captured, data: dict[str, Any], axes: Sequence[Axis]) -> Pipelining:
    """Make the pipeline of a plan file again. Raises PlanError if the program or the machine does not allow it."""
    names, rounds = list(data["along"]), int(data["rounds"])
    along = [axis for axis in axes if axis.name in names]
    if len(along) != len(names):
        raise PlanError(f"a pipeline along {' '.join(names)} is none of a machine with axes {' '.join(a.name for a in axes)}")
    kind = str(data.get("schedule", GPIPE))
    try:
        if "cuts" in data:
            cuts = Cuts(tuple(map(int, data["cuts"])), float(data["weight"]))
            whole = [int(k) for k in data.get("whole", ())]
            return unlike(chain_of(captured), captured, cuts, along, rounds, bool(data["pack"]), kind, whole)
        return pipelined(PipelineSource(captured), int(data["rolled"]), int(data["scan"]), along, rounds, kind)
    except Mixed as reason:
        raise PlanError(f"the pipeline along {' '.join(names)} cannot be made: {reason}") from None
