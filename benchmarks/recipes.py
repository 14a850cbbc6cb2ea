"""The sharding recipes of training code, as constraints, against unity's plan: predicted step, memory and planning time.

`python -m benchmarks.recipes`. Llama-3-8B, Mixtral 8x7B and ViT-L, each with a scan over rematerialized layers, on 8, 64 and
256 H100s, and on 256 in two pods. A recipe says what its users write into logical axis rules or wrappers: how weights are stored,
over which axes samples, columns, sequence and experts are split. What it leaves open (how a norm's gain is stored, when weights
are gathered) is chosen by exact search, so it is the best of its kind under our costs.

The plan is what `unity.optimize(..., budget=0)` returns for the device's memory: rewritings of the program, which may make plans
faster, not recipes, are left out. Each recipe is compared with the fastest plan that takes no more memory than the recipe does.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import datetime
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec as P

import unity
from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import BESIDE, asked, by_case, in_order, record, results, show
from unity.base.formatting import duration
from unity.constraints import Constraint, forbid, pin, require
from unity.diff.regions import CostChange
from unity.machine.hardware import Level
from unity.plan.plan import Plan

NEARLY = 1e-6  # a recipe that is faster by less is as fast
SHOWN = 0.01  # a plan that is faster by less is not explained on the terminal
Axes = tuple[str, ...]
Products = tuple[str, ...]  # scopes


@dataclass(frozen=True)
class Layers:
    """The places in a model that recipes speak of. Weights are patterns of paths, operators are pinned by name.

    Args:
        columns: weights that widen, with leading dimensions that no recipe splits.
        rows: weights that narrow again.
        wide: the products with `columns`, and the dimensions of their results.
        narrow: the products with `rows`.
        residual: the sums of the residual stream [samples, sequence, width].
        norms: what stands between these and the products, of the same dimensions.
        sequence: whether the sequence divides.
        head: the product of the logits, and its result's dimensions; none where the classes do not divide.
        table: the embedding table, if there is one; `logits`: the head's weight.
        experts: the products of the experts [expert, samples, ...]; `routed`: their weights that widen, and narrow.
    """

    columns: Sequence[str]
    rows: Sequence[str]
    wide: Products
    narrow: Products
    residual: Products
    norms: Products
    sequence: bool
    table: str = ""
    logits: str = ""
    head: str = ""
    experts: Products = ()
    routed: tuple[Sequence[str], Sequence[str]] = ((), ())


_ATTENTION = tuple(f"params['blocks']['attention']['{name}']['weight']" for name in ("query", "key", "value"))
_OUT = "params['blocks']['attention']['out']['weight']"
_QKV = tuple(f"dot_general at {name}" for name in ("query", "key", "value"))
_TABLE, _LOGITS, _HEAD = "params['token']['table']", "params['head']['weight']", "dot_general at head"


def _mlp(*names: str) -> tuple[str, ...]:
    return tuple(f"params['blocks']['mlp']['{name}']['weight']" for name in names)


def _experts(*names: str) -> tuple[str, ...]:
    return tuple(f"params['blocks']['experts']['{name}']['weight']" for name in names)


LAYERS: Mapping[str, Layers] = {
    "llama3_8b": Layers(
        columns=(*_ATTENTION, *_mlp("gate", "up")),
        rows=(_OUT, *_mlp("down")),
        wide=(*_QKV, "dot_general at gate", "dot_general at up"),
        narrow=("dot_general at out", "dot_general at down"),
        residual=("add at residual",),
        norms=("rms_norm",),
        sequence=True,
        table=_TABLE,
        logits=_LOGITS,
        head=_HEAD,
    ),
    "mixtral_8x7b": Layers(
        columns=_ATTENTION,
        rows=(_OUT,),
        wide=_QKV,
        narrow=("dot_general at out",),
        residual=("add at residual",),
        norms=(),  # one of them has the sequence in groups
        sequence=True,
        experts=tuple(f"dot_general at experts/{name}" for name in ("gate", "up", "down")),
        routed=(_experts("gate", "up"), _experts("down")),
        table=_TABLE,
        logits=_LOGITS,
        head=_HEAD,
    ),
    "vit_large": Layers(
        columns=(*_ATTENTION, *_mlp("up")),
        rows=(_OUT, *_mlp("down")),
        wide=(*_QKV, "dot_general at up"),
        narrow=("dot_general at out", "dot_general at down"),
        residual=("add at out", "add at down"),
        norms=(),
        sequence=False,  # of 197 patches
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A strategy by hand. Axes of the mesh that are in none of these are idle.

    Args:
        copies: axes over which samples are split, and weights whole.
        data: axes over which samples are split, and weights stored in pieces, which are gathered for use.
        tensor: axes over which columns, then rows, and the vocabulary are split.
        sequence: whether between these the sequence is split over the same axes.
        experts: axes over which the samples are split but for the experts, which are themselves split over them.
    """

    name: str
    copies: Axes = ()
    data: Axes = ()
    tensor: Axes = ()
    sequence: bool = False
    experts: Axes = ()

    def constraints(self, layers: Layers) -> tuple[Constraint, ...]:
        """The recipe for a model."""
        return (*self.weights(layers), *self.levels(), *self.activations(layers))

    def weights(self, layers: Layers) -> Iterator[Constraint]:
        """How weights are stored."""
        pieces, tensor = self.data + self.experts, self.tensor
        yield from (pin(path, P(None, pieces, tensor)) for path in layers.columns)
        yield from (pin(path, P(None, tensor, pieces)) for path in layers.rows)
        if layers.table:
            yield pin(layers.table, P(tensor, pieces))
            yield pin(layers.logits, P(pieces, tensor))
        widen, narrow = layers.routed
        yield from (pin(path, P(None, self.experts, self.data, tensor)) for path in widen)
        yield from (pin(path, P(None, self.experts, tensor, self.data)) for path in narrow)

    def levels(self) -> Iterator[Constraint]:
        """What axes split."""
        for axis in self.copies + self.data:
            yield from (require("samples", across=axis), forbid("tensor", across=axis))
        for axis in self.tensor:
            yield forbid("samples", across=axis)

    def activations(self, layers: Layers) -> Iterator[Constraint]:
        """What the levels do not say: columns and sequence, and samples where the experts' axes split these, too."""
        if not self.tensor + self.experts:
            return
        samples = self.copies + self.data + self.experts
        yield from (pin(name, P(samples, None, self.tensor)) for name in (*layers.wide, *([layers.head] if layers.head else [])))
        yield from (pin(name, P(samples)) for name in layers.narrow)
        between = (*layers.residual, *layers.norms) if self.sequence else layers.residual
        yield from (pin(name, P(samples, self.tensor if self.sequence else None)) for name in between)
        for name in layers.experts:
            tensor = () if name.endswith("down") else self.tensor
            yield pin(name, P(self.experts, self.copies + self.data, None, None, tensor))


def recipes(machine: unity.Machine, layers: Layers) -> list[Recipe]:
    """The recipes for a model on a machine: tensor parallelism stays in a node, and so do experts."""
    names = tuple(axis.name for axis in machine.axes)
    inner = tuple(name for name in names if name.startswith("d"))
    outer, pods = names[: -len(inner)], tuple(name for name in names if name.startswith("p"))
    data, tensor = (outer, inner) if outer else (inner[:1], inner[1:])
    chosen = [Recipe("data parallel", copies=names), Recipe("FSDP", data=names)]
    if outer:
        chosen.append(Recipe("FSDP in a node, copies", copies=outer, data=inner))
    if pods:
        chosen.append(Recipe("FSDP in a pod, copies", copies=pods, data=names[len(pods) :]))
    chosen.append(Recipe("FSDP x tensor", data=data, tensor=tensor))
    if layers.sequence:
        chosen.append(Recipe("FSDP x tensor, sequence", data=data, tensor=tensor, sequence=True))
        if pods:
            chosen.append(Recipe("copies x FSDP x tensor, sequence", pods, data[len(pods) :], tensor, sequence=True))
        if not outer:
            chosen.append(Recipe("tensor, sequence", tensor=inner, sequence=True))
    if layers.experts:
        chosen.append(Recipe("FSDP x experts", data=outer, experts=inner))
        if pods:
            chosen.append(Recipe("copies x FSDP x experts", copies=pods, data=outer[len(pods) :], experts=inner))
    return chosen


def machine_of(nodes: int, pods: int = 1) -> unity.Machine:
    """H100s in nodes of 8, in pods between which each device has an eighth of the bandwidth that it has in one."""
    machine = unity.Machine.grid(nodes // pods, 8, "h100")
    if pods == 1:
        return machine
    (node, device) = machine.levels
    between = Level("pod", pods, node.bandwidth / 8, 2 * node.latency)
    return replace(machine, name=f"h100-{pods}x{nodes // pods}x8", levels=(between, node, device))


MACHINES: Mapping[str, Callable[[], unity.Machine]] = {
    "8": lambda: machine_of(1),
    "64": lambda: machine_of(8),
    "256": lambda: machine_of(32),
    "256, two pods": lambda: machine_of(32, 2),
}
SAMPLES = {"llama3_8b": 1, "mixtral_8x7b": 2, "vit_large": 64}  # for each device
CASES = {f"{model}, {devices}": (model, devices) for devices in MACHINES for model in LAYERS}


def model_of(name: str, machine: unity.Machine) -> Model:
    return get(name, scan=True, remat=True, batch=SAMPLES[name] * machine.devices)


ROOMY = 1e15  # bytes
LINES = 3  # of a difference


def planned(model: Model, machine: unity.Machine, **options: Any) -> unity.Plan:
    return unity.optimize(model.loss, model.params, model.batch, machine=machine, progress=False, **options)


def by_hand(recipe: Recipe, model: Model, layers: Layers, machine: unity.Machine) -> unity.Plan:
    """The best plan that follows a recipe, whatever memory it takes; the program stays as it is written."""
    constraints = recipe.constraints(layers)
    return planned(model, machine, memory_limit=ROOMY, search="captured", constraints=constraints)


def within(plan: unity.Plan, memory: float) -> unity.Plan | None:
    """The plan, or if it takes more memory than that the fastest of its program that does not."""
    if plan.memory <= memory:
        return plan
    candidate = plan.program.family.search.under(memory)
    return None if candidate is None else Plan(plan.program.family, candidate)


def difference(before: unity.Plan, after: unity.Plan) -> dict[str, Any]:
    """Where the time goes in one plan and not in the other: kind by kind, and the lines of the model that differ most."""
    found = before.inspect.diff(after)
    lines = sorted(found.regions, key=lambda r: -abs(_change(r.computing) + _change(r.communicating)))
    sides = [side.talk for side in (found.before, found.after)]
    kinds = dict.fromkeys(talk.kind for side in sides for talk in side)
    return {
        "computing ms": [sum(w.seconds for w in side.work) * 1e3 for side in (found.before, found.after)],
        **{f"{kind} ms": [sum(t.seconds for t in side if t.kind == kind) * 1e3 for side in sides] for kind in kinds},
        "lines": [
            f"{r.line}: computing {duration(r.computing.before)} → {duration(r.computing.after)}, "
            f"communicating {duration(r.communicating.before)} → {duration(r.communicating.after)}; "
            + "; ".join(f"{edit.kind}: {edit.what}" for edit, _ in r.edits[:2])
            for r in lines[:LINES]
        ],
    }


def _change(cost: CostChange) -> float:
    return cost.after - cost.before


def compare(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plan of a case, and each recipe beside it."""
    kind, devices = CASES[name]
    machine = MACHINES[devices]()
    model, layers = model_of(kind, machine), LAYERS[kind]
    clock = time.process_time()
    try:
        plan, fits = planned(model, machine, budget=0), True
    except unity.InfeasibleError:
        plan, fits = planned(model, machine, budget=0, memory_limit=ROOMY), False
    day = datetime.date.today().isoformat()
    case = {
        "case": name,
        "date": day,
        "ms": plan.time * 1e3,
        "GB": plan.memory / 1e9,
        "fits": fits,
        "planned s": time.process_time() - clock,
    }
    return case, [{"case": name, **row} for row in (beside(plan, recipe, model, layers) for recipe in recipes(machine, layers))]


def beside(plan: unity.Plan, recipe: Recipe, model: Model, layers: Layers) -> dict[str, Any]:
    """A recipe, and the fastest plan that takes no more memory."""
    clock = time.process_time()
    strategy = by_hand(recipe, model, layers, plan.inspect.machine)
    seconds = time.process_time() - clock
    equal = within(plan, strategy.memory)
    return {
        "recipe": recipe.name,
        "ms": strategy.time * 1e3,
        "GB": strategy.memory / 1e9,
        "plan ms": equal.time * 1e3 if equal else None,
        "plan GB": equal.memory / 1e9 if equal else None,
        "gain": strategy.time / equal.time - 1 if equal else -math.inf,
        "planned s": seconds,
        "why": difference(strategy, equal) if equal else None,
    }


def slower_than_recipes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['case']}, {row['recipe']}" for row in rows if row["gain"] < -NEARLY]


def recorded() -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The plans and the rows on record, by case."""
    content = results("recipes")
    return {plan["case"]: plan for plan in content.get("plans", ())}, by_case(content["rows"], "case")


def keep(plans: Mapping[str, dict[str, Any]], rows: Mapping[str, list[dict[str, Any]]]) -> None:
    """Records the results of all cases so far, in the order of the cases."""
    every = in_order(rows, CASES)
    notes = {"samples_per_device": SAMPLES, "slower": slower_than_recipes(every)}
    record("recipes", every, plans=[plans[name] for name in CASES if name in plans], **notes)


def main() -> None:
    chosen, every = asked(__doc__, CASES, BESIDE)
    plans, rows = ({}, {}) if every else recorded()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # this version's own plans
        for name in chosen:
            plans[name], rows[name] = compare(name)
            print(f"{name}: {plans[name]['ms']:.4g} ms;", *(f"{r['recipe']} {r['gain']:+.1%};" for r in rows[name]), flush=True)
            keep(plans, rows)  # this takes minutes: what there is stays if it is interrupted
    plans, rows = [plans[name] for name in chosen], [row for name in chosen for row in rows[name]]
    show("unity.optimize, seconds of the process", plans)
    show("recipes, and plans of no more memory", [{k: v for k, v in row.items() if k != "why"} for row in rows])
    for row in rows:
        if row["gain"] > SHOWN:
            print(f"{row['case']}, {row['recipe']}:", *row["why"]["lines"], sep="\n    ")
    print(f"{len(rows)} compared; slower than a recipe: {', '.join(slower_than_recipes(rows)) or 'none'}")


if __name__ == "__main__":
    main()
