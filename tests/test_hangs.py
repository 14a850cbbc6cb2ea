"""No plan has a collective inside of control flow that not all of its devices reach: graphs, searches, compiled programs, runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_branches
import unlike_models
from jax import lax
from small_models import random_point
from stepped import stepped

import unity
from unity.exec.check import compile_step
from unity.exec.hlo_agreement import argument_labels, disagreements
from unity.made import Made
from unity.pcg.capture import capture
from unity.pcg.check import check
from unity.pcg.errors import InfeasibleError, ParallelTypeError
from unity.pcg.graph import BRANCHES, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value
from unity.pcg.parallelize import parallelize
from unity.pcg.resharding import steps
from unity.pcg.stages import GPIPE, ONE_F_ONE_B, TWO_BW
from unity.pcg.state import PARTIAL, REPLICATED, UNUSED, State, digits, partitioned
from unity.pcg.traffic import traffic
from unity.pipelining import Program, pipelined
from unity.plan import Plan
from unity.search import assemble as assembling
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.session import Search
from unity.search.sites import Site

TREE = Machine.grid(2, 4)
SLOW = unity.Device("slow", {"float32": 1e6}, 10**9, 1e9, 0.5, 0.0)  # so that all that can be is shared
SHARING = replace(TREE, device=SLOW)
INNER = TREE.axes[1:2]  # not the first axis: those before it may take, or leave, the samples
REGIONS = (PIPELINE, TAIL, BRANCHES, STAGES)

pytestmark = pytest.mark.usefixtures("own_cache")


def language(params: Any, tokens: Any, target: Any) -> Any:
    """A language model whose loss ignores an index: the number of what counts is made before the tail."""

    def layer(h: Any, w: Any) -> Any:
        a = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h @ w["q"], h))
        return h + jax.nn.gelu((a @ h) @ w["u"]) @ w["d"], None

    h, counted = lax.scan(jax.checkpoint(layer), params["words"][tokens], params["layers"])[0], target >= 0
    picked = jnp.take_along_axis(jax.nn.log_softmax(h @ params["out"]), jnp.maximum(target, 0)[..., None], -1)[..., 0]
    return -(picked * counted).sum() / counted.sum()


def language_arguments(batch: int = 32, length: int = 4, width: int = 8, words: int = 16) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)

    layers = {"q": normal(4, width, width), "u": normal(4, width, 2 * width), "d": normal(4, 2 * width, width)}
    tokens, target = (rng.integers(-1, words, (batch, length)).astype(np.int32) for _ in range(2))
    return {"layers": layers, "words": normal(words, width), "out": normal(width, words)}, np.maximum(tokens, 0), target


def normal_arguments(make: Callable[[], Any]) -> tuple[Any, ...]:
    """Arguments in single precision."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32), make())


def like_stages(kind: str) -> Plan:
    captured = capture(language, *language_arguments())
    made = pipelined(Program(captured), 0, 0, INNER, 2, kind)
    search = Search(made.after.graph, captured.differentiated, SHARING, Training())
    return Plan(Made(language, made.after, search, 0.0, pipelining=made), search.fastest)


def unlike_stages(model: str, kind: str) -> Plan:
    fn, make = unlike_models.MODELS[model]
    return unlike_models.planned(fn, normal_arguments(make), INNER, machine=SHARING, kind=kind)


def branches(case: str, pack: bool) -> Plan:
    fn, args = test_branches.CASES[case]()
    return test_branches.planned(fn, args, SHARING, INNER, pack=pack)


PLANS: dict[str, Callable[[], Plan]] = {
    **{f"layers by {kind}": lambda kind=kind: like_stages(kind) for kind in (GPIPE, ONE_F_ONE_B, TWO_BW)},
    **{f"{model} by {kind}": lambda model=model, kind=kind: unlike_stages(model, kind)
       for model, kind in (("mlp", GPIPE), ("mlp", ONE_F_ONE_B), ("vgg", GPIPE), ("translated", ONE_F_ONE_B))},
    **{f"branches of {case}": lambda case=case: branches(case, case == "towers") for case in ("towers", "summed", "inception")},
}  # fmt: skip


def regions(graph: PCG) -> Iterator[Node]:
    """The outermost operators of a parallel graph whose inside not all devices run together."""
    for node in graph.nodes:
        if node.kind in REGIONS:
            yield node
        elif node.inside is not None:
            yield from regions(node.inside)


def crossing(graph: PCG) -> list[str]:
    """The collectives inside of such operators, forward or backward, that join devices which are not there together; and changes of
    type along their axes without any."""
    found = []
    for region in regions(graph):
        assert region.inside is not None
        over = {k for k, a in enumerate(graph.axes) if a.name in region.attributes["along"].split()}
        inside = region.inside
        everything = [k for k, n in enumerate(inside.inputs) if n.tensors[0].floating]
        sent = [c for c in traffic(inside, everything) if over & set(c.axes) or c.kind == "collective-permute"]
        found += [f"{region.kind}: {c.kind} of {c.node.kind} along {c.axes}" for c in sent]
        for node, _ in inside.walk():
            if node.kind in PARALLELIZATION:
                (operand,) = node.operands
                places = zip(digits(operand.type, graph.axes), digits(node.types[0], graph.axes), strict=True)
                found += [f"{region.kind}: {node.kind}" for k, (a, b) in enumerate(places) if k in over and a != b]
    return found


@pytest.mark.parametrize("name", PLANS)
def test_whatever_the_search_can_choose_reaches_all_its_devices(name: str) -> None:
    """Of all plans of a frontier, and of plans that are drawn whatever they cost."""
    plan = PLANS[name]()
    graphs = [point.pcg for point in plan.frontier]
    search = plan._made.search
    for seed in range(8):
        found = search.assembled.assignment(random_point(search.assembled, np.random.default_rng(seed)))
        graphs.append(parallelize(plan.serial, found))
    for graph in graphs:
        assert any(regions(graph))
        check(graph)
        assert crossing(graph) == []


def without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was searched, and believed, before there was a rule."""
    monkeypatch.setattr(assembling, "stationary_pairs", lambda before, after, *_: np.ones((len(before), len(after)), bool))
    monkeypatch.setattr("unity.plan.check", lambda graph: None)


@pytest.mark.parametrize("name", [name for name in PLANS if "branches" not in name])
def test_without_the_rule_there_are_plans_that_hang_and_the_checker_refuses_just_these(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_rule(monkeypatch)
    plan = PLANS[name]()
    search, bad = plan._made.search, 0
    for seed in range(12):
        found = search.assembled.assignment(random_point(search.assembled, np.random.default_rng(seed)))
        graph = parallelize(plan.serial, found)
        if crossing(graph):
            bad += 1
            with pytest.raises(ParallelTypeError, match=r"inside of the \w+.*wait for the others for ever"):
                check(graph)
        else:
            check(graph)
    assert bad
