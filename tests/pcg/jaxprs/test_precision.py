"""Programs are traced again in the precision in which they were captured."""

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.pcg.analysis.traced_residuals import TracedResiduals, TypedEquation, traced_residuals
from unity.pcg.ir.program import close
from unity.pcg.jaxprs.trace_contexts import precision_of
from unity.pcg.operators.pointwise import pointwise
from unity.pcg.propagation.nested.derivative_rules import jvp_body, value_body
from unity.substitutions.language.typecheck import body_of


@jax.custom_jvp
def widened(x):
    return jnp.sin(x.astype(jnp.float64))


@widened.defjvp
def _widened_jvp(primals, tangents):
    x, t = primals[0], tangents[0]
    return widened(x), t.astype(jnp.float64) * jnp.cos(x.astype(jnp.float64))


@pytest.fixture
def narrow():
    with jax.enable_x64(False):
        yield


def equation_of(fn):
    with jax.enable_x64(True):
        (e,) = close(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((4,), jnp.float32))).equations
    return e


def test_a_rule_of_narrow_operands_and_wide_results_is_traced_in_64_bits(narrow):
    e = equation_of(widened)
    for body in (value_body(e), jvp_body(e).body):
        assert body is not None
        assert {str(body.tensor(a).dtype) for a in body.outputs} == {"float64"}


def test_the_derivative_of_a_conversion_keeps_nothing_in_any_precision(narrow):
    e = equation_of(lambda x: x.astype(jnp.float64))
    operand, result = (jax.ShapeDtypeStruct((4,), dtype) for dtype in ("float32", "float64"))
    residuals = traced_residuals(TypedEquation(e.signature, e.identity, (operand,), (result,), (0,), (0,), e))
    assert residuals == TracedResiduals((), (), ())


@pytest.mark.filterwarnings("error:Explicitly requested dtype")  # by which JAX says that it truncates types
@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"pipeline": unity.PipelineShape(2, 4)}], ids=str)
def test_a_plan_of_float64_is_derived_and_compiled_again_in_any_precision(options, narrow):
    def loss(layers, x):
        for w in layers:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    args = [jax.ShapeDtypeStruct((62, 62), "float64")] * 2, jax.ShapeDtypeStruct((64, 62), "float64")
    with jax.enable_x64(True):
        plan = unity.optimize(loss, *args, machine=unity.Machine.grid(1, 2, "a100"), progress=False, **options)
    plan.program.check_derivation()
    assert not plan.check().deviations


@pytest.mark.filterwarnings("error:Explicitly requested dtype")
def test_programs_of_operators_have_64_bits_in_any_precision(narrow):
    table, ids = ((61, 3), "float64"), ((7,), "int64")
    body = body_of("embedding", (), (table, ids))
    assert [body.tensor(a).dtype for a in (*body.inputs, *body.outputs)] == ["float64", "int64", "float64"]
    with jax.enable_x64(True):
        (relu,) = close(jax.make_jaxpr(jax.nn.relu)(jax.ShapeDtypeStruct((5, 61), "float64"))).equations
    assert pointwise(relu) == "relu"


@pytest.mark.parametrize(("dtype", "wide"), [("complex64", False), ("float32", False), ("complex128", True), ("int64", True)])
def test_types_of_64_bits_in_each_number_are_wide(dtype, wide, narrow):
    with precision_of([jax.ShapeDtypeStruct((), dtype)]):
        assert jnp.zeros((), float).dtype == ("float64" if wide else "float32")
