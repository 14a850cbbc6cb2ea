"""Check that any lane of a batched loop's step is the step of a loop."""

from __future__ import annotations

from unity.base.errors import DerivationError
from unity.pcg.ir.program import Body
from unity.verify.derivations.evaluation import Evaluation, Scan, Steps, Values
from unity.verify.derivations.nodes import NodeStore


def check_lane_step(batched: Scan, old: Scan) -> None:
    """Check that any lane of a batched step is the step of a loop. Raises DerivationError."""
    if len(batched.step.outputs) != len(old.step.outputs):
        raise DerivationError("a batched scan has another number of results than its loops")
    store = batched.around.store
    types = [batched.step.tensors[v] for v in batched.step.inputs]
    inputs = [store.unarranged("input", ("lanes", k), (), t) for k, t in enumerate(types)]
    shared = [len(t.shape) == len(old.step.tensors[v].shape) for t, v in zip(types, old.step.inputs, strict=True)]
    lanes = _evaluated(store, batched.step, inputs)
    same, separate = ({x for x, one in zip(inputs, shared, strict=True) if one == kind} for kind in (True, False))
    steps = Steps(store, lanes, same, separate)
    arguments = [steps.constant(x) if s else steps.slice(x) for x, s in zip(inputs, shared, strict=True)]
    step = _evaluated(store, old.step, arguments)
    for a, b in zip(batched.step.outputs, old.step.outputs, strict=True):
        if steps.at(a, 0) != step.of(b):
            raise DerivationError("a lane of a batched scan takes other steps than its loop")


def _evaluated(store: NodeStore, step: Body, arguments: Values) -> Evaluation:
    evaluation = Evaluation(store, step, arguments)
    if evaluation.until_nested() is not None:
        raise DerivationError("no lemma is about lanes of a loop or a checkpoint in a step")
    return evaluation
