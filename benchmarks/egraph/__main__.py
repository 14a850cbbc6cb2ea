"""Equality saturation against the backtracking search: the library's rules, one device, small models.

    pip install egglog
    python -m benchmarks.egraph [case ...]

`egglog` is needed by this benchmark alone. A model is captured, and its program is rewritten in two ways with the same rules, for
one H200 (seconds are of the CPU):

- by the search of `unity.optimize`, best first with backtracking, of 200 programs, each of which is priced whole;
- as an e-graph: rules are applied in rounds until nothing is new or a limit is met, and after each round a term of every class is
  chosen (`extraction`) by prices of single operators. Neither extraction nor saturation under limits is exact.

Both results are priced as whole programs by the project's own costs. For a small version of each model, terms that are cheapest
under random prices are run, and their values and gradients in float64 compared with the function's. The e-graph sees one device,
one floating type, and prices of single operators: no parallelization, no fusion with neighbours, no residuals that two operators
share, no memory.
"""

from __future__ import annotations

import importlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.algebra import nas_cell
from benchmarks.egraph.encoding import Encoding, Operation, Writer, apply, program
from benchmarks.egraph.extraction import Classes, classes, greedy, improved, solved
from benchmarks.egraph.rules import UntranslatedError, translated
from benchmarks.models import concrete
from benchmarks.models.bert import attention_stack, bert
from benchmarks.models.layers import concat, conv, image_classifier, image_mean, max_pool, relu, serial
from benchmarks.models.model import Model, Tree, f32
from benchmarks.models.recommenders import dlrm
from benchmarks.models.resnet import resnext50_unity
from benchmarks.models.squeezenet import fire_module
from benchmarks.models.unrolled import rnnlm_unrolled
from benchmarks.record import record_cases
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.program import Body, close
from unity.pcg.local.interpreter import run_body
from unity.search.cost.cost import Training
from unity.search.joint.joint import Budget, improvements
from unity.search.joint.pricing import Prices
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.term import Variable
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import Pattern, patterns
from unity.substitutions.rewriting.writing import unarranged

SECONDS = 60.0  # of saturation
EXTRACTION = 4.0  # seconds of each way to improve a greedy choice
PROGRAMS = 200  # of the backtracking search: its default
NODES = 20_000  # the most operators of an e-graph
ROUNDS = 8
DRAWS = 6  # programs of random prices that are run
LIGHT_PRICES = (0.3, 0.05)  # the parts of the price of a light operator that are tried
LIGHT = frozenset(
    {"Add", "Sub", "Mul", "Map", "Scale", "Bias", "Concat", "Split0", "Split1"}
)  # a captured graph joins them to their users
SPREAD = 2_000  # a rule that adds more operators in a round is not applied in later ones
GROWTH = 8_000  # a rule that adds more operators in a round is undone


def attention(*, seq: int = 512, hidden: int = 1024, heads: int = 16, batch: int = 8) -> Model:
    """Attention with projections by heads and without an output projection."""

    def loss(params: Tree, data: Tree) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", data["x"], params[n]["weight"]) for n in "qkv")
        s = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        return jnp.mean(jnp.einsum("bhqs,bshk->bqhk", s, v) ** 2)

    params = {n: {"weight": f32(hidden, heads, hidden // heads)} for n in "qkv"}
    return Model("attention", loss, params, {"x": f32(batch, seq, hidden)}, {"x": 0})


def nasnet_cell(*, batch: int = 32, channels: int = 128, image: int = 28) -> Model:
    """Three sums of two convolutions each, of two inputs, joined: separable ones, as depthwise and pointwise kernels."""

    def separable(x: jax.Array, depthwise: Tree, pointwise: Tree) -> jax.Array:
        x = jax.lax.conv_general_dilated(x, depthwise["kernel"], (1, 1), "SAME", feature_group_count=channels)
        return jax.lax.conv_general_dilated(x, pointwise["kernel"], (1, 1), "SAME")

    def loss(params: Tree, data: Tree) -> jax.Array:
        h, g = data["h"], data["g"]
        sums = [
            separable(a, p["a"], p["b"]) + separable(b, p["c"], p["d"])
            for (a, b), p in zip(((h, g), (h, h), (g, g)), params, strict=True)
        ]
        return jnp.mean(jnp.concatenate(sums, 1) ** 2)

    def kernels(*windows: int) -> Tree:
        shapes = [s for w in windows for s in ((channels, 1, w, w), (channels, channels, 1, 1))]
        return {name: {"kernel": f32(*shape)} for name, shape in zip("abcd", shapes, strict=True)}

    params = [kernels(3, 3), kernels(5, 3), kernels(5, 5)]
    images = f32(batch, channels, image, image)
    return Model("nasnet cell", loss, params, {"h": images, "g": images}, {"h": 0, "g": 0})


def fire(*, batch: int = 64, channels: int = 64, image: int = 55) -> Model:
    """One fire module of SqueezeNet, and a mean."""
    network = serial(fire_module(16, 64), image_mean)
    return image_classifier(network, batch, (channels, image, image), 128)


def inception_block(*, batch: int = 32, channels: int = 192, image: int = 35) -> Model:
    """Four branches of one image, joined: three begin with a window of 1."""
    branches = (
        conv(64, 1), serial(conv(48, 1), relu, conv(64, 3, padding=1)),
        serial(conv(64, 1), relu, conv(96, 3, padding=1)), serial(max_pool(3, 1, 1), conv(32, 1)),
    )  # fmt: skip
    return image_classifier(serial(concat(*branches), relu, image_mean), batch, (channels, image, image), 256)


CASES: dict[str, tuple[Callable[[], Model], Callable[[], Model]]] = {
    "nas cell": (lambda: nas_cell(steps=1), lambda: nas_cell(steps=1, width=8, batch=4)),
    "lstm cell, 2 steps": (
        lambda: rnnlm_unrolled(layers=1, steps=2, hidden=1024, vocab=1024, batch=128),
        lambda: rnnlm_unrolled(layers=1, steps=2, hidden=8, vocab=12, batch=4),
    ),
    "attention": (attention, lambda: attention(seq=4, hidden=8, heads=2, batch=3)),
    "attention and dense layers": (
        lambda: attention_stack(layers=1),
        lambda: attention_stack(layers=1, hidden=8, heads=2, seq=4, batch=3),
    ),
    "bert layer": (
        lambda: bert(layers=1, vocab=1024),
        lambda: bert(layers=1, hidden=8, heads=2, seq=4, batch=3, vocab=16),
    ),
    "squeezenet fire": (fire, lambda: fire(batch=2, channels=4, image=5)),
    "inception block": (inception_block, lambda: inception_block(batch=2, channels=4, image=5)),
    "resnext block": (
        lambda: resnext50_unity(blocks=(1,)),
        lambda: resnext50_unity(blocks=(1,), base=8, groups=4, batch=2, image=16),
    ),
    "nasnet cell": (nasnet_cell, lambda: nasnet_cell(batch=2, channels=3, image=5)),
    "dlrm": (
        lambda: dlrm(tables=(1_000_000,) * 4, width=64, bottom=(16, 512, 64), top=(512, 8), batch=2048),
        lambda: dlrm(tables=(7, 5, 9, 4), width=4, bottom=(3, 6, 4), top=(8, 2), batch=6),
    ),
}
"""Models to price, and the same models in a size that runs."""


@dataclass(frozen=True)
class Saturated:
    """An e-graph after each round of its rules, the CPU seconds of all, and the limit that ended them."""

    encoding: Encoding
    rounds: list[Classes]
    seconds: float
    ended: str
    rules: int


def saturate(body: Body, rules: Collection[Pattern]) -> Saturated:
    """Apply rules to a program's e-graph, rule by rule, until nothing is new or a limit is met."""
    graph: Any = importlib.import_module("egglog.bindings").EGraph()
    started = time.process_time()
    encoding = Encoding(body)

    def run(text: str) -> list[Any]:
        return graph.run_program(*graph.parse_program(text))

    def count() -> int:
        (sizes,) = run("(print-size)")
        return sum(n for name, n in sizes.sizes if name[0].isupper())

    run(encoding.text)
    convolutions = encoding.convolutions | {(g, p) for _, p in encoding.convolutions for g in (1, 2)}
    names, count_of_rules = list[str](), 0
    for k, pattern in enumerate(rules):
        shrinks = all(isinstance(t, Variable) for t in pattern.right)
        try:
            texts = translated(pattern, sorted(convolutions), "views" if shrinks else f"r{k}")
        except UntranslatedError:
            continue
        run(f"(ruleset r{k})\n" + "\n".join(texts))
        names += [] if shrinks else [f"r{k}"]
        count_of_rules += 1
    settle = "(saturate types) (repeat 3 (seq (run views) (saturate types)))"
    run(f"(run-schedule {settle})")
    size, ended, snapshots, exploded = count(), "rounds", list[Classes](), set[str]()
    for _ in range(ROUNDS):
        before = size
        for name in [n for n in names if n not in exploded]:
            run("(push)")
            run(f"(run-schedule (run {name}) {settle})")
            grown = count() - size
            if grown > GROWTH or size + grown > NODES:
                run("(pop)")
            else:
                size += grown
            if grown > SPREAD or size + grown > NODES:
                exploded.add(name)
            if time.process_time() - started > SECONDS:
                ended = "seconds"
                break
        if size == before and snapshots and ended == "rounds":
            ended = "nodes" if exploded else "saturated"
            break
        serialized = graph.serialize([], max_functions=None, max_calls_per_function=None, include_temporary_functions=False)
        snapshots.append(classes(serialized.to_json()))
        if ended == "seconds":
            break
    return Saturated(encoding, snapshots, time.process_time() - started, ended, count_of_rules)


class OperatorPrices:
    """The price of an operator of an e-graph alone, on one device, forward and backward."""

    def __init__(self, encoding: Encoding, graph: Classes, prices: Prices, differentiated: Collection[int], light: float) -> None:
        self.encoding, self.graph, self.prices, self.light = encoding, graph, prices, light
        self.flowing = self._flowing(differentiated)
        self.dtypes = self._dtypes()
        self.known: dict[tuple, float] = {}

    def __call__(self, o: Operation) -> float:
        if o.constructor in ("Input", "Const", "Get") or o.constructor.startswith("Opaque"):
            return 0.0
        if o.constructor in ("Perm", "Reshape"):
            return 1e-9
        shapes = [self.graph.shapes[x] for x in o.operands]
        flows = tuple(k for k, x in enumerate(o.operands) if x in self.flowing)
        key = (o.constructor, o.attributes, tuple(shapes), flows)
        if key not in self.known:
            structs = [jax.ShapeDtypeStruct(s, self.dtypes[x]) for s, x in zip(shapes, o.operands, strict=True)]

            def run(*arrays: jax.Array) -> jax.Array:
                return apply(Writer(self.encoding, (), {}, {}), o, [unarranged(x) for x in arrays], shapes).value

            price = self.prices.of(close(jax.make_jaxpr(run)(*structs)), flows)
            cheap = o.constructor in LIGHT
            self.known[key] = price * (self.light if cheap else 1.0)
        return self.known[key]

    def _flowing(self, differentiated: Collection[int]) -> set[str]:
        """Return the classes that depend on a weight."""
        flowing: set[str] = set()
        while True:
            more = {
                key
                for key, operations in self.graph.operations.items()
                for o in operations
                if key not in flowing
                and (any(x in flowing for x in o.operands) or (o.constructor == "Input" and o.attributes[0] in differentiated))
            }
            if not more:
                return flowing
            flowing |= more

    def _dtypes(self) -> Mapping[str, Any]:
        """Return the element type of every class."""
        body, dtypes = self.encoding.body, dict[str, Any]()
        constants = {number: literal for number, literal in self.encoding.constants.values()}
        from_operand = {"Within": 1, "Behind": 1}
        while True:
            size = len(dtypes)
            for key, operations in self.graph.operations.items():
                for o in operations if key not in dtypes else ():
                    if o.constructor == "Input":
                        dtypes[key] = body.tensors[body.inputs[o.attributes[0]]].dtype
                    elif o.constructor == "Const":
                        dtypes[key] = constants[o.attributes[0]].tensor.dtype
                    elif o.constructor == "Get":
                        (opaque,) = self.graph.operations[o.operands[0]]
                        dtypes[key] = body.tensors[self.encoding.opaque[opaque.attributes[0]].results[o.attributes[0]]].dtype
                    elif o.operands and o.operands[from_operand.get(o.constructor, 0)] in dtypes:
                        dtypes[key] = dtypes[o.operands[from_operand.get(o.constructor, 0)]]
            if len(dtypes) == size:
                return dtypes


def extracted(saturated: Saturated, captured: Captured, prices: Prices) -> tuple[float, float, int]:
    """Return the price of the best extracted program, that of the best greedy choice, and the operators of the best round."""
    best, plain, size = math.inf, math.inf, 0
    for graph in saturated.rounds:
        for light in LIGHT_PRICES:
            cost = OperatorPrices(saturated.encoding, graph, prices, captured.differentiated, light)
            chosen = greedy(graph, cost)
            for choice in (chosen, improved(graph, chosen, cost, EXTRACTION), solved(graph, cost, EXTRACTION)):
                if choice is None:
                    continue
                body = planning_form(program(saturated.encoding, choice, graph.shapes, graph.roots))
                price = prices.whole(body, captured.differentiated)
                plain = min(plain, price) if choice is chosen else plain
                if price < best:
                    best, size = price, graph.count
    return best, plain, size


def new_prices() -> Prices:
    return Prices(Machine.grid(1, 1, "h200"), Training())


def case(name: str) -> list[dict[str, Any]]:
    """Return the row of a model."""
    model, small = (build() for build in CASES[name])
    usable = patterns(default_library().rules)
    captured = capture(model.loss, model.params, model.batch)
    price = new_prices().whole(captured.body, captured.differentiated)
    started, best, reached, programs = time.process_time(), math.inf, 0.0, list[str]()
    budget = Budget(programs=PROGRAMS)
    for better in improvements(captured.body, captured.differentiated, new_prices(), usable, budget, say=programs.append):
        best, reached = better.price, time.process_time() - started
    searched = time.process_time() - started
    saturated = saturate(search_form(captured.body), usable)
    started = time.process_time()
    least, plain, size = extracted(saturated, captured, new_prices())
    row = {
        "case": name,
        "captured ms": price * 1e3,
        "backtracking ms": best * 1e3,
        "programs": len(programs),
        "backtracking s": searched,
        "best after s": reached,
        "e-graph ms": least * 1e3,
        "greedy alone ms": plain * 1e3,
        "saturation s": saturated.seconds,
        "extraction s": time.process_time() - started,
        "rounds": len(saturated.rounds),
        "operators": [graph.count for graph in saturated.rounds],
        "classes": [len(graph.operations) for graph in saturated.rounds],
        "best with operators": size,
        "ended by": saturated.ended,
        "rules": saturated.rules,
        "of rules": len(usable),
        "largest difference": checked(small, usable),
    }
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return [row]


def checked(model: Model, rules: Collection[Pattern]) -> float:
    """Return the largest relative difference, of value and gradients, of programs of a small model from its function."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(_double, concrete(model))
        captured = capture(model.loss, params, batch)
        saturated = saturate(search_form(captured.body), rules)
        expected, largest = jax.tree.leaves(jax.value_and_grad(model.loss)(params, batch)), 0.0
        for seed in range(DRAWS):
            body = planning_form(drawn(saturated, seed))

            def rewritten(params: Tree, batch: Tree, body: Body = body) -> jax.Array:
                arrays = [*jax.tree.leaves((params, batch)), *captured.consts]
                (value,) = run_body(body, arrays, [()] * len(arrays), [()], ())
                return value

            values = jax.tree.leaves(jax.value_and_grad(rewritten)(params, batch))
            differences = (jnp.max(jnp.abs(x - y)) / (jnp.max(jnp.abs(x)) + 1e-9) for x, y in zip(expected, values, strict=True))
            largest = max(largest, *map(float, differences))
        return largest


def drawn(saturated: Saturated, seed: int) -> Body:
    """Return the program that is cheapest under random prices."""
    rng = np.random.default_rng(seed)
    prices: dict[Operation, float] = defaultdict(lambda: float(10 ** rng.uniform(-3, 3)))
    graph = saturated.rounds[-1]
    return program(saturated.encoding, greedy(graph, prices.__getitem__), graph.shapes, graph.roots)


def _double(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x)


def main() -> None:
    record_cases(
        "egraph",
        __doc__,
        CASES,
        "case",
        case,
        limits={"programs": PROGRAMS, "operators": NODES, "rounds": ROUNDS, "seconds": SECONDS, "extraction seconds": EXTRACTION},
    )


if __name__ == "__main__":
    main()
