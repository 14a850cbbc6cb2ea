"""The joint search: what it must find, that plans of rewritten programs compute the same, and what it promises of budgets."""

import itertools
import json
import math
import time
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from ci_cases import by_hand

import unity
import unity.planning.request
from unity.base.documents import plain, typed
from unity.base.errors import DerivationError, PlanError, RuleError
from unity.exec.measure.trial import ratio
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.plan.files.plan_file import sealed
from unity.plan.step import step_of
from unity.search.cost.cost import Training
from unity.search.joint.backtracking import backtrack
from unity.search.joint.joint import Budget, improvements
from unity.search.joint.pricing import Prices
from unity.search.joint.segments import LONG, joined, segments
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.derivation import Derivation
from unity.substitutions.language.library import Library
from unity.substitutions.language.text import parse_rule
from unity.substitutions.rewriting.occurrences import Pattern, patterns
from unity.substitutions.rewriting.rewriting import content_key, tidy
from unity.transforms.rewriting import RewritingRecord, budget_of, library_of, rewriting_of
from unity.transforms.transformation import TransformationSource

MACHINE = Machine.grid(1, 8, "v100")
USABLE = patterns(default_library().rules)


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chained(params, x):
    """Two products without anything between: one, of a product of the weights, where samples are many."""
    return jnp.mean((x @ params["a"] @ params["b"]) ** 2)


def layers(params, x):
    for p in params:
        y = jnp.tanh(x @ p["in"] + p["bias"])
        x = x + y @ p["out"] @ p["low"]
    return jnp.mean(x**2)


CHAINED = ({"a": f(16, 64), "b": f(64, 8)}, f(4096, 16))
LAYERS = ([{"in": f(16, 32), "bias": f(32), "out": f(32, 64), "low": f(64, 16)}] * 6, f(512, 16))
ARGUMENTS = {chained: CHAINED, layers: LAYERS}


def plan(fn, args, **options):
    return unity.optimize(fn, *args, machine=options.pop("machine", MACHINE), progress=False, **options)


@cache
def planned(fn, **options):
    """A plan that several tests look at, for arguments of the function's own."""
    return plan(fn, ARGUMENTS[fn], **options)


pytestmark = pytest.mark.usefixtures("own_cache")


def arrays(args, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype) / 4, args)


@pytest.mark.parametrize("fn", [chained, *by_hand(layers)])
def test_a_rewritten_plan_computes_the_same(fn, tmp_path):
    """Values and gradients of the user's own parameters; also after saving and loading."""
    args = ARGUMENTS[fn]
    found = planned(fn)
    assert found.program.rewriting
    assert found.time < planned(fn, search="captured").time
    found.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", fn, *args)
    given = arrays(args)
    expected = jax.jit(jax.value_and_grad(fn))(*given)
    for p in (found, again):
        value, gradient = jax.jit(jax.value_and_grad(p))(*p.shard(*given))
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fn", [chained, *by_hand(layers)])
def test_algebra_first_and_then_parallelization_is_never_faster(fn):
    """The program is that of one device, whatever machine it is parallelized for."""
    found = planned(fn, search="sequential")
    alone = planned(fn, search="sequential", machine=Machine.grid(1, 1, "v100"))
    assert found.program.rewriting
    assert found.program.serial.key == alone.program.serial.key
    assert alone.time < planned(fn, search="captured", machine=Machine.grid(1, 1, "v100")).time
    assert planned(fn).time <= found.time * (1 + 1e-9)
    found.program.check_derivation()


def test_the_compiled_program_has_the_collectives_of_the_plan():
    assert planned(chained).check().agrees()


def test_it_says_what_was_rewritten(capsys):
    found = planned(chained)
    found.explain()
    assert "regroup-products" in capsys.readouterr().out


def test_equal_segments_are_rewritten_alike():
    found = planned(layers, budget=200)
    assert found.program.rewriting
    ((rule, times),) = found.program.rewriting.applied
    assert rule.rule.startswith("regroup-products")
    assert times == 6


def flat(fn, args):
    captured = capture(fn, *args)
    return captured, tidy(captured.body)


def test_segments_put_together_again_are_the_program():
    captured, body = flat(layers, LAYERS)
    for least in (2, 4, 8):
        parts = segments(body, captured.differentiated, least)
        assert len(parts) > 1
        assert content_key(tidy(joined(body, parts, {}))) == content_key(body)


def test_a_repeated_layer_is_one_segment_many_times():
    captured, body = flat(layers, ([LAYERS[0][0]] * 40, LAYERS[1]))
    parts = segments(body, captured.differentiated)
    assert len({p.key for p in parts}) <= 4 < len(parts)


def normalized(params, averages, x):
    """Dense layers with batch norm, whose running averages come out beside the loss."""
    new = []
    for p, average in zip(params, averages, strict=True):
        y = x @ p
        mean, variance = jnp.mean(y, 0), jnp.var(y, 0)
        new.append((0.9 * average[0] + 0.1 * mean, 0.9 * average[1] + 0.1 * variance))
        x = jax.nn.relu((y - mean) * jax.lax.rsqrt(variance + 1e-3))
    return jnp.mean(x**2), new


def test_results_that_nothing_reads_do_not_keep_layers_together():
    captured, body = flat(normalized, ([f(16, 16)] * 40, [(f(16), f(16))] * 40, f(512, 16)))
    parts = segments(body, captured.differentiated)
    assert len({p.key for p in parts}) <= 4 < len(parts)
    assert content_key(tidy(joined(body, parts, {}))) == content_key(body)


def dropped(params, keys, x):
    """Layers that differ in nothing but the random key of each; `keys` are those of every sample."""
    for k, p in enumerate(params):
        kept = jax.vmap(lambda key, layer=k: jax.random.bernoulli(jax.random.fold_in(key, layer), 0.9, (16,)))(keys)
        y = jnp.where(kept, jnp.tanh(x @ p), 0.0) / 0.9
        x = x + y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)
    return jnp.mean(x**2)


def test_layers_that_differ_in_their_keys_are_one_segment():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 512))
    captured, body = flat(dropped, ([f(16, 16)] * 40, keys, f(512, 16)))
    parts = segments(body, captured.differentiated)
    assert len({p.key for p in parts}) <= 4 < len(parts)
    assert content_key(tidy(joined(body, parts, {}))) == content_key(body)


def test_layers_that_differ_in_their_pieces_of_stacked_weights_are_one_segment():
    def stacked(ws, x):
        for k in range(40):
            x = x + jnp.tanh(x @ ws["in"][k]) @ ws["out"].astype(x.dtype)[k]
        return jnp.mean(x**2)

    captured, body = flat(stacked, ({"in": f(40, 16, 32), "out": f(40, 32, 16)}, f(512, 16)))
    parts = segments(body, captured.differentiated)
    assert len({p.key for p in parts}) <= 4 < len(parts)
    assert content_key(tidy(joined(body, parts, {}))) == content_key(body)


def test_rewritten_layers_with_keys_of_their_own_compute_the_same():
    def noisy(params, key, x):
        for k, p in enumerate(params):
            y = jnp.tanh(x @ p["in"] + p["bias"]) * jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, (32,))
            x = x + y @ p["out"] @ p["low"]
        return jnp.mean(x**2)

    params, x = jax.tree.map(lambda s: 0.3 * jax.random.normal(jax.random.key(1), s.shape), LAYERS)
    args = (params, jax.random.key(0), x)
    found = plan(noisy, args)
    assert found.program.check_derivation()
    np.testing.assert_allclose(jax.jit(found)(*found.shard(*args)), noisy(*args), rtol=1e-5)


def tabled(params, tables, x):
    """Layers that all read the same computed tables, and after them some that do not."""
    tables = [jnp.exp(table) for table in tables]
    for p in params:
        y = jnp.tanh(x @ p)
        for table in tables:
            y = jnp.sin(y * table)
        x = x + y
    for p in params:
        x = jnp.tanh(x @ p)
    return jnp.mean(x**2)


def test_tables_that_every_layer_reads_do_not_keep_layers_together():
    captured, body = flat(tabled, ([f(16, 16)] * 40, [f(512, 16)] * 5, f(512, 16)))
    parts = segments(body, captured.differentiated)
    assert len({p.key for p in parts}) <= 6 < len(parts)
    assert max(len(p.body.equations) for p in parts) <= LONG
    assert content_key(tidy(joined(body, parts, {}))) == content_key(body)


def prices():
    return Prices(MACHINE, Training())


def test_a_longer_search_finds_what_a_shorter_one_did_and_more():
    captured, body = flat(layers, LAYERS)
    found = {}
    for programs in (0, 1, 2, 5, 30):
        steps = improvements(body, captured.differentiated, prices(), USABLE, Budget(programs))
        found[programs] = [(content_key(i.body), i.price) for i in steps]
        assert [p for _, p in found[programs]] == sorted((p for _, p in found[programs]), reverse=True)
    for few, many in itertools.pairwise(found):
        assert found[few] == found[many][: len(found[few])]
    assert len(found[30]) > len(found[0]) == 1


def test_steps_that_make_things_worse_first_are_taken_within_alpha():
    """Unity, figure 5: what pays only after three steps is found if no step on the way costs more than alpha allows."""

    def fn(params, x):
        a, b = x @ params["a"], x @ params["b"]
        return jnp.mean(jnp.concatenate([jnp.exp(a), jnp.exp(b)], -1) ** 2)

    seconds = {"dot_general": 10.0, "concatenate": 6.0, "slice": 6.0}
    _, body = flat(fn, ({"a": f(64, 8), "b": f(64, 8)}, f(4096, 64)))

    def price(b, above=math.inf):
        return sum(seconds.get(e.name, 1.0) for e in b.equations)

    wide = list(itertools.islice(backtrack(body, USABLE, price, 1.5), 300))
    best = min(wide, key=lambda p: p.price)
    on_the_way = [price(w.after) for w in best.path]
    assert best.price < wide[0].price < max(on_the_way)
    assert len(on_the_way) >= 3
    narrow = list(itertools.islice(backtrack(body, USABLE, price, 1.05), 300))
    assert best.price < min(p.price for p in narrow)


def test_budgets_rules_and_searches_are_checked():
    assert budget_of(3) == Budget(programs=3)
    assert budget_of(0.5) == Budget(seconds=0.5)
    assert Budget(9).in_words(0, time.perf_counter()) == "9 programs left"
    assert Budget(9).in_words(4, time.perf_counter() - 40) == "5 programs (about 50 s) left"
    assert Budget(seconds=9.0).in_words(4, time.perf_counter()) == "9 s left"
    for wrong in ("many", -1, True):
        with pytest.raises(ValueError, match="budget="):
            budget_of(wrong)
    with pytest.raises(ValueError, match="rules="):
        library_of([1])
    with pytest.raises(ValueError, match="search='best'"):
        plan(chained, CHAINED, search="best")
    for options in ({"budget": 0}, {"seconds": 0.0}, {"rules": ()}, {"search": "captured"}):
        assert not plan(chained, CHAINED, **options).program.rewriting


def test_a_library_that_was_edited_is_refused(tmp_path):
    path = tmp_path / "library.json"
    default_library().save(path)
    path.write_text(path.read_text().replace("add(x, bias(y, z)) = bias(add(x, y), z)", "add(x, bias(y, z)) = bias(add(x, x), z)"))
    with pytest.raises(RuleError, match="was changed"):
        plan(chained, CHAINED, rules=path)


def test_rules_that_match_for_ever_end(monkeypatch):
    """A rule whose result it applies to again: every program is another one, and the budget ends it."""
    grow = Pattern(parse_rule("it scale(x, y) = add(scale(x, y), sub(x, x))"), False)
    assert not grow.usable
    turn = parse_rule("turn add(x, add(y, z)) = add(y, add(x, z))")
    captured, body = flat(lambda p, x: jnp.sum(x + (x * 2 + (x * 3 + p))), (f(8, 8), f(8, 8)))
    priced, of = [], Prices.of
    monkeypatch.setattr(Prices, "of", lambda self, *given: priced.append(given) or of(self, *given))
    list(improvements(body, captured.differentiated, prices(), patterns([turn]), Budget(50)))
    assert 3 < len(priced) <= 2 * 50


def test_a_search_without_a_budget_ends_where_it_gains_nothing(monkeypatch):
    """Not before every segment had its turns; and a gain that is worth it begins the count anew."""
    monkeypatch.setattr("unity.search.joint.joint.ROUNDS", 1)
    turn = parse_rule("turn add(x, add(y, z)) = add(y, add(x, z))")
    captured, body = flat(lambda p, x: jnp.sum(x + (x * 2 + (x * 3 + (x * 4 + p)))), (f(8, 8), f(8, 8)))
    priced, of = [], Prices.of
    monkeypatch.setattr(Prices, "of", lambda self, *given: priced.append(given) or of(self, *given))
    counts = []
    for patience in (None, 8, 2):
        priced.clear()
        list(improvements(body, captured.differentiated, prices(), patterns([turn]), Budget(50, patience=patience)))
        counts.append(len(priced))
    assert counts[0] > counts[1] > counts[2] > 0
    captured, body = flat(chained, CHAINED)
    patient = [i.price for i in improvements(body, captured.differentiated, prices(), USABLE, Budget(30, patience=8))]
    assert patient == [i.price for i in improvements(body, captured.differentiated, prices(), USABLE, Budget(30))][: len(patient)]
    assert len(patient) > 1


def test_rounds_are_finished_before_a_search_ends():
    is_patient = Budget(patience=64).is_patient
    assert (is_patient(63, 5), is_patient(64, 5)) == (True, False)
    assert (is_patient(64, 40), is_patient(119, 40), is_patient(120, 40)) == (True, True, False)
    assert Budget(200).is_patient(10**6, 1)


def test_what_a_plan_file_says_of_rewriting_is_not_believed():
    captured, body = flat(chained, CHAINED)
    *_, best = improvements(body, captured.differentiated, prices(), USABLE, Budget(30))
    good = plain(rewriting_of(captured, best, default_library()).record)

    def read(data, library=default_library):
        return typed(data, RewritingRecord).apply(TransformationSource(captured, (), MACHINE, library))

    assert read(good).after.graph.key == good["graph"]
    with pytest.raises(PlanError, match="another graph"):
        read({**good, "graph": "0"})
    with pytest.raises(PlanError, match="another graph"):
        read({**good, "segments": []})
    with pytest.raises(PlanError, match=r"damaged at \$\.segments: expected array, got int"):
        read({**good, "segments": 3})
    with pytest.raises(PlanError, match="does not have"):
        read(good, lambda: Library(()))
    (segment,) = good["segments"]
    (rule,) = segment["rules"]
    with pytest.raises(PlanError, match="does not apply"):
        read({**good, "segments": [{**segment, "rules": [{**rule, "number": 99}]}]})
    with pytest.raises(PlanError, match="does not have"):
        read({**good, "segments": [{**segment, "segment": 99}]})


def test_the_derivation_of_a_plan_replays():
    found = planned(layers, budget=200)
    steps = found.program.check_derivation()
    assert [s.rule for s in steps] == ["regroup-products"] * 6
    assert planned(layers, search="captured").program.check_derivation() == ()
    assert found.program.rewriting
    with pytest.raises(DerivationError, match="does not lead to the derived program"):
        replace(found.program.rewriting, recorded=Derivation(steps[:-1])).check()


@pytest.mark.parametrize("name", ["gpt_scanned", "cnn", *by_hand("lstm", "gpt")])
def test_parallel_graphs_without_their_parallelization_are_what_was_derived(name):
    model = getattr(small_models, name)()
    found = unity.optimize(model.loss, model.params, model.batch, machine=MACHINE, progress=False, budget=20)
    found.program.check_derivation()
    for point in found.frontier[:: max(1, len(found.frontier) // 4)]:
        point.program.check_derivation()


def test_a_file_whose_derivation_does_not_replay_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    planned(chained).files.save(path)
    whole = json.loads(path.read_text())
    (rewriting,) = whole["transformations"]
    (step,) = rewriting["derivation"]["steps"]
    for changed, message in [
        ([], "does not lead"),
        ([{**step, "hash": "0" * 16}], "hash"),
        ([{**step, "backward": True}], "step 1"),
        ([{**step, "tensors": 3}], "damaged"),
        (None, r"damaged at \$\.transformations\[0\]\.derivation\.steps: expected array, got null"),
    ]:
        wrong = {**rewriting, "derivation": {"steps": changed, "inside": {}}}
        path.write_text(json.dumps(sealed({**whole, "transformations": [wrong]})))
        with pytest.raises(PlanError, match=message):
            unity.load(path, chained, *CHAINED)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_rewritten_program_that_measures_slower_is_not_taken(monkeypatch, times):
    """On the devices of this process both programs are run, and what they take decides."""
    asked = []

    def ratio(one, other):
        asked.append((one, other))
        assert one.graph.key != other.graph.key
        return times

    monkeypatch.setattr(unity.Machine, "local", lambda: MACHINE)
    monkeypatch.setattr(unity.planning.request, "ratio", ratio)
    found = unity.optimize(chained, *CHAINED, progress=False)
    assert len(asked) == 1
    assert bool(found.program.rewriting) == (times <= 1)


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_a_rewritten_program_that_the_devices_cannot_run_is_not_taken(monkeypatch, objective):
    monkeypatch.setattr(unity.Machine, "local", lambda: MACHINE)
    monkeypatch.setattr(unity.planning.request, "can_run", lambda plan: not plan.program.rewriting)
    monkeypatch.setattr(unity.planning.request, "ratio", lambda *given: pytest.fail("it is not run"))
    assert not unity.optimize(chained, *CHAINED, objective=objective, progress=False).program.rewriting
    assert unity.optimize(chained, *CHAINED, objective=objective, machine=MACHINE, progress=False).program.rewriting


def test_programs_are_run_in_turns():
    found, same = planned(chained), planned(chained, search="captured")
    for training in (Training(False), Training()):
        assert ratio(step_of(found, training), step_of(same, training)) > 0


def test_a_rewriting_whose_derivation_does_not_replay_is_not_used(monkeypatch):
    def check(*given):
        raise DerivationError("step 1")

    monkeypatch.setattr("unity.transforms.rewriting.check", check)
    with pytest.warns(UserWarning, match=r"not used, because its derivation does not replay: step 1"):
        assert not plan(chained, CHAINED).program.rewriting


def test_a_plan_that_no_rule_rewrote_has_an_empty_rewriting() -> None:
    found = plan(chained, CHAINED, search="captured")
    assert not found.program.rewriting
    assert (found.program.rewriting.applied, found.program.rewriting.uses, found.program.rewriting.derivation.every) == ((), (), ())
    assert found.program.rewriting.before is found.program.rewriting.after
    assert found.program.rewriting.after.graph is found.program.serial
