"""The everyday surface of plans and of `unity.optimize` stays small, typed and documented."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import pytest

import unity
import unity.explain
from unity.base import errors
from unity.explain.tables import blocked
from unity.plan.face.former_names import MEMBERS, accepting_former_options
from unity.plan.face.inspection import Inspection
from unity.plan.face.plan_files import PlanFiles
from unity.plan.face.sharder import Sharder
from unity.plan.further_options import Transforms
from unity.plan.planned_program import PlannedProgram
from unity.plan.stream import Flight, Stream

NAMESPACES = (PlannedProgram, Inspection, PlanFiles, Sharder)
EIGHT = unity.Machine.grid(1, 8, "a100")
PIN = unity.pin("w", jax.P())


def planned(progress: Any = False, **options: Any) -> unity.Plan:
    f = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    return unity.optimize(loss, f(8, 8), f(16, 8), machine=EIGHT, search="captured", progress=progress, **options)


def public(cls: type) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(cls, name)) for name in vars(cls) if not name.startswith("_"))


def keywords() -> list[str]:
    return [name for name, p in inspect.signature(unity.optimize).parameters.items() if p.kind == p.KEYWORD_ONLY]


def test_a_plan_has_at_most_fifteen_public_members() -> None:
    names = {name for name in dir(planned()) if not name.startswith("_")}
    assert len(names) <= 15, sorted(names)


@pytest.mark.parametrize("cls", [unity.Plan, *NAMESPACES])
def test_every_public_member_is_documented_and_typed(cls: type) -> None:
    assert cls.__doc__
    for name, member in public(cls):
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        assert inspect.getdoc(function), name
        assert "return" in function.__annotations__, name


def test_namespaces_are_the_same_at_every_access() -> None:
    plan = planned()
    assert all(getattr(plan, name) is getattr(plan, name) for name in ("program", "inspect", "files", "shard"))


def test_optimize_has_at_most_twelve_options_and_documents_each() -> None:
    assert len(keywords()) <= 12, keywords()
    doc = inspect.getdoc(unity.optimize) or ""
    assert all(f"\n    {name}: " in doc for name in keywords())


def test_further_options_are_documented_and_have_one_type_each() -> None:
    types, doc = get_type_hints(unity.FurtherOptions), inspect.getdoc(unity.FurtherOptions) or ""
    assert all(f"\n    {name}: " in doc for name in types)
    assert not set(types) & set(keywords())
    for name, kind in get_type_hints(Transforms).items():
        assert types[name] == kind, name


def test_documented_defaults_of_switches_are_theirs() -> None:
    doc = inspect.getdoc(unity.FurtherOptions) or ""
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc, re.MULTILINE))
    switches = {name: default for name, default in vars(Transforms()).items() if isinstance(default, bool)}
    assert len(switches) == 6
    assert all(f"{default} by default" in " ".join(texts[name].split()) for name, default in switches.items())


@pytest.mark.parametrize(
    "name", ["training", "progress", "pipelines", "branches", "pack", "padding", "recompute", "offload", "measure"]
)
@pytest.mark.parametrize("value", ["yes", 2.0, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(unity.OptionError, match=rf"{name}=.*expected True or False"):
        planned(**{name: value})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(unity.OptionError, match=r"no option shards: expected one of argnums.*(docs: plan#options)"):
        planned(shards=2)
    with pytest.raises(unity.OptionError, match=r"no option pack: expected one of branch_groups.*(docs: training#options)"):
        unity.step(lambda state: state, pack=True)


@pytest.mark.parametrize(
    "options", [{"budget": "2"}, {"budget": True}, {"budget": -1}, {"seconds": -1}, {"budget": 1, "seconds": 1.0}]
)
def test_a_search_is_bounded_by_programs_or_by_seconds(options: dict[str, Any]) -> None:
    with pytest.raises(unity.OptionError, match=r"budget=|seconds="):
        planned(**options)


def test_all_documented_errors_are_exported() -> None:
    """The page of errors lists a module, and single classes."""
    page = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()
    listed = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    defined = [node.name for node in ast.parse(inspect.getsource(errors)).body if isinstance(node, ast.ClassDef)]
    classes = [path.rpartition(".")[2] for path in listed if path != errors.__name__] + defined
    assert len(classes) > 10
    assert [name for name in classes if name not in unity.__all__] == []


def test_completion_offers_what_is_exported() -> None:
    assert {name for name in dir(unity) if not name.startswith("_")} == set(unity.__all__)


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_a_former_member_is_the_present_one(name: str) -> None:
    plan = planned()
    with pytest.warns(DeprecationWarning, match=rf"plan\.{name} is plan\.{MEMBERS[name]} now") as warned:
        former = getattr(plan, name)
    assert type(former) is type(attrgetter(MEMBERS[name])(plan))
    assert warned[0].filename == __file__


def test_a_former_name_of_the_package_or_of_a_step_is_the_present_one() -> None:
    step = unity.step(lambda state: state)
    for owner, name, present, value in (
        (unity, "Flight", "unity.plan.stream.Flight", Flight),
        (unity, "Stream", "unity.plan.stream.Stream", Stream),
        (unity.explain, "blocked", "unity.explain.tables.blocked", blocked),
        (step, "place", "step.shard", step.shard),
    ):
        with pytest.warns(DeprecationWarning, match=rf"\.{name} is {present} now") as warned:
            assert getattr(owner, name) == value
        assert warned[0].filename == __file__


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    for owner in (unity, unity.explain, planned(), unity.step(lambda state: state)):
        with pytest.raises(AttributeError, match="has no attribute 'shards'"):
            getattr(owner, "shards")  # noqa: B009


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ({"pipelines": (2, 4, "gpipe")}, {"pipeline": unity.PipelineShape(2, 4, "gpipe")}),
        ({"branches": 2}, {"branch_groups": 2}),
        ({"budget": 2.0}, {"seconds": 2.0}),
        ({"shardings": "keep"}, {"constraints": (unity.keep_shardings(),)}),
        ({"shardings": "free"}, {"constraints": ()}),
        ({"shardings": "keep", "constraints": PIN}, {"constraints": (PIN, unity.keep_shardings())}),
    ],
)
def test_a_former_option_is_the_present_one(former: dict[str, Any], present: dict[str, Any]) -> None:
    taken = accepting_former_options(lambda **options: options)
    with pytest.warns(DeprecationWarning, match=next(iter(present))) as warned:
        assert taken(**former) == present
    assert warned[0].filename == __file__
    assert taken(**present) == present


@pytest.mark.parametrize("shape", [(), (4,), (4, 16, "gpipe", 2)])
def test_a_former_pipeline_of_another_form_is_refused(shape: tuple[Any, ...]) -> None:
    with pytest.raises(unity.OptionError, match=r"pipelines=\(.*expected True or False, got tuple"):
        planned(pipelines=shape)
