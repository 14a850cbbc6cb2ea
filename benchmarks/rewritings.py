"""Whether rewritten programs compute what the function computes: the best one and ten from the search's queue, on eight devices.

`python -m benchmarks.rewritings`. Small versions of the examples, of Unity's models and of others. Each rewritten program is
parallelized for eight virtual CPU devices, and its loss and gradients compared with the function's in float64, as in
`benchmarks.numerics`; the steps that lead to it are replayed by the checker of derivations.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import itertools
import random
from typing import Any

import jax

import unity
from benchmarks.models import concrete, tiny
from benchmarks.numerics import WIDE, cast, distances
from benchmarks.record import asked, record, show
from unity.pcg.capture.capture import capture
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.joint.backtracking import RewrittenProgram, backtrack
from unity.search.joint.pricing import Prices
from unity.search.session import Search
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.derivation import Derivation
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import patterns
from unity.substitutions.rewriting.recording import step_of
from unity.verify.derivations.canonical_form import canonical_forms
from unity.verify.derivations.replay import check

CASES = (
    *("gpt2_padded", "resnet50", "dlrm", "rnnlm"),  # the examples
    *("bert_large", "bert_unity", "candle_uno", "mlp_unity", "xdl", "resnext50_unity", "inception_v3_unity"),
    *("llama3_8b", "lenet5", "vgg16", "nmt"),
)
DEVICES = 8
COMPUTED = ("gpt2_padded", "llama3_8b")  # in a precision of their own
REACHED, SAMPLED, ALPHA = 80, 10, 2.0  # programs that are reached, tried of them, and how much worse one may be


def replayed(before: Any, found: RewrittenProgram, after: Any) -> int:
    """Replays the steps to a program. Returns how many there were."""
    store = canonical_forms(before).store
    steps = [step_of(canonical_forms(way.before, store), way.occurrence) for way in found.path]
    check(before, after, Derivation(tuple(s for s in steps if s is not None)), default_library())
    return len(steps)


def rows_of(name: str) -> list[dict[str, Any]]:
    machine = unity.Machine.grid(1, DEVICES, "a100")
    model = tiny(name, compute="float64") if name in COMPUTED else tiny(name)
    with jax.enable_x64(True):
        params, batch = (cast(tree, "float64") for tree in concrete(model))
        captured = capture(model.loss, params, batch)
        prices = Prices(machine, Training(), bodies=captured.bodies)
        usable = patterns(default_library().rules)
        reached = backtrack(
            search_form(captured.body), usable, lambda b, _: prices.of(planning_form(b), captured.differentiated), ALPHA
        )
        found = list(itertools.islice(reached, REACHED))
        best, others = min(found, key=lambda f: f.price), found[1:]
        chosen = [best, *random.Random(0).sample(others, min(SAMPLED, len(others)))]
        wanted = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        rows = []
        for k, program in enumerate(chosen):
            after = captured.of(planning_form(program.body), prices.bodies)
            steps = replayed(captured.body, program, after.body)
            search = Search(after.graph, after.differentiated, machine, Training(), listed=prices.listed)
            plan = Plan(PlanFamily(model.loss, after, search, 0.0), search.fastest)
            loss, gradients = distances(jax.jit(jax.value_and_grad(plan))(*plan.shard(params, batch)), wanted)
            row = {"model": name, "program": "the best" if k == 0 else f"sampled {k}", "steps": steps, "price": program.price}
            rows.append(row | {"loss": loss, "gradients": gradients, "met": max(loss, gradients) <= WIDE})
        return rows


def main() -> None:
    cases, whole = asked(__doc__, CASES)
    rows = []
    for name in cases:
        found = rows_of(name)
        worst = max(found, key=lambda row: row["gradients"])
        print(f"{name}: {sum(r['met'] for r in found)} of {len(found)}; at most {worst['gradients']:.1e}", flush=True)
        rows += found
    show("beyond what is allowed", [row for row in rows if not row["met"]])
    if whole:
        record("rewritings", rows, devices=DEVICES, allowed=WIDE)


if __name__ == "__main__":
    main()
