"""Import of released rules: every verdict, every operator, and damaged files. All samples are written here by hand."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict

import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from unity.base.errors import RuleError
from unity.substitutions.importing import import_flexflow, import_taso, report
from unity.substitutions.importing.flexflow import OPERATORS
from unity.substitutions.importing.taso import KINDS, PARAMETERS
from unity.substitutions.importing.taso_protobuf import read_rules
from unity.substitutions.language.text import parse_rule

# Protobuf, written


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    return b"".join(
        varint(k << 3) + varint(v) if isinstance(v, int) else varint(k << 3 | 2) + varint(len(v)) + v for k, v in fields
    )


def operator(kind: str, *inputs, **parameters: int) -> bytes:
    """Inputs are operators, or (operator, result)."""
    places = [i if isinstance(i, tuple) else (i, 0) for i in inputs]
    return message(
        (1, KINDS.index(kind)),
        *((2, message((1, o), (2, r))) for o, r in places),
        *((3, message((1, PARAMETERS.index(k.replace("_", "-"))), (2, v))) for k, v in parameters.items()),
    )


def taso_rule(source: list[bytes], target: list[bytes], *outputs: tuple[int, int, int, int]) -> bytes:
    """Outputs are (source operator, target operator, source result, target result)."""
    outputs = outputs or ((len(source) - 1, len(target) - 1 if target else -1, 0, 0),)
    mapped = [(3, message(*enumerate(o, 1))) for o in outputs]
    return message((1, message(*((1, o) for o in source), *((2, o) for o in target), *mapped)))


@pytest.fixture
def taso(tmp_path):
    def run(*rules: bytes):
        path = tmp_path / "rules.pb"
        path.write_bytes(b"".join(rules))
        return import_taso(path)

    return run


CONV = {"kernel_h": 3, "kernel_w": 3, "stride_h": 1, "stride_w": 1, "pad": 0, "acti": 0}
FUSED = {**CONV, "acti": 2}
WINDOW = {"kernel_h": 3, "kernel_w": 3}
PAIR = {"num_inputs": 2, "axis": 1, "numdim": 2}
SWAP = {"numdim": 2, "perm": 2, "outshuffle": 1}

TRUE = {
    "matmul": ([operator("matmul", -1, -4), operator("matmul", 0, -5)], [operator("matmul", -4, -5), operator("matmul", -1, 0)]),
    "linear": ([operator("linear", -1, -4), operator("relu", 0)], [operator("linear", -1, -4, acti=2)]),
    "ew-add": ([operator("ew-add", -1, -2)], [operator("ew-add", -2, -1)]),
    "ew-mul": ([operator("ew-mul", -1, -2)], [operator("ew-mul", -2, -1)]),
    "mul": (
        [operator("ew-add", -1, -2), operator("mul", 0, -3)],
        [operator("mul", -1, -3), operator("mul", -2, -3), operator("ew-add", 0, 1)],
    ),
    "relu": ([operator("relu", -1), operator("relu", 0)], [operator("relu", -1)]),
    "sigmoid": (
        [operator("concat", -1, -2, **PAIR), operator("sigmoid", 0)],
        [operator("sigmoid", -1), operator("sigmoid", -2), operator("concat", 0, 1, **PAIR)],
    ),
    "tanh": ([operator("tanh", -1), operator("transpose", 0, **SWAP)], [operator("transpose", -1, **SWAP), operator("tanh", 0)]),
    "transpose": ([operator("transpose", -1, **SWAP), operator("transpose", 0, **SWAP)], []),
    "conv2d": ([operator("conv2d", -7, -10, **CONV), operator("relu", 0)], [operator("conv2d", -7, -10, **FUSED)]),
    "enlarge": (
        [operator("conv2d", -7, -10, **{**CONV, "kernel_h": 1, "kernel_w": 3})],
        [operator("enlarge", -10, **WINDOW), operator("conv2d", -7, 0, **CONV)],
    ),
    "pool2d-max": ([operator("relu", -7), operator("pool2d-max", 0, **CONV)], [operator("pool2d-max", -7, **FUSED)]),
    "pool2d-avg": (
        [operator("ew-add", -7, -8), operator("pool2d-avg", 0, **{**CONV, "stride_h": 2, "stride_w": 2, "pad": 1})],
        [operator("pool2d-avg", x, **{**CONV, "stride_h": 2, "stride_w": 2, "pad": 1}) for x in (-7, -8)]
        + [operator("ew-add", 0, 1)],
    ),
    "constant-imm": ([operator("constant-imm"), operator("matmul", -1, 0)], []),
    "constant-iconv": ([operator("constant-iconv", **WINDOW), operator("conv2d", -7, 0, **CONV)], [], (1, -7, 0, 0)),
    "constant-one": ([operator("constant-one"), operator("ew-mul", -1, 0)], []),
    "constant-pool": (
        [operator("constant-pool", **WINDOW), operator("conv2d", -7, 0, **CONV)],
        [operator("pool2d-avg", -7, **CONV)],
    ),
    "concat of three": (
        [operator("concat", -1, -2, -3, num_inputs=3, axis=0, numdim=2), operator("relu", 0)],
        [*(operator("relu", x) for x in (-1, -2, -3)), operator("concat", 0, 1, 2, num_inputs=3, axis=0, numdim=2)],
    ),
}


@pytest.mark.parametrize("name", TRUE)
def test_a_true_taso_rule_is_proved(taso, name):
    (found,) = taso(taso_rule(*TRUE[name]))
    assert found.verdict.status == "proved", found.verdict.why
    assert parse_rule(found.text) == found.rule


def test_several_outputs_belong_to_one_rule(taso):
    source = [operator("relu", -1), operator("relu", -2)]
    target = [operator("concat", -1, -2, **PAIR), operator("relu", 0), operator("split", 1, num_outputs=2, axis=1)]
    (found,) = taso(taso_rule(source, target, (0, 2, 0, 0), (1, 2, 0, 1)))
    assert found.verdict.status == "proved"
    assert found.rule is not None
    assert len(found.rule.left) == 2


def test_an_operator_without_a_path_to_an_output_is_ignored(taso):
    (found,) = taso(taso_rule([operator("conv2d", -7, -8, **CONV), operator("relu", -1)], [operator("relu", -1)]))
    assert found.verdict.status == "proved"


def merged(acti: int) -> bytes:
    """Two convolutions of two images as a grouped one: false where the numbers of their outputs differ."""
    images, kernels = {**PAIR, "numdim": 4}, {**PAIR, "numdim": 4, "axis": 0}
    each = {**CONV, "acti": acti}
    source = [operator("conv2d", -7, -10, **each), operator("conv2d", -8, -11, **each), operator("concat", 0, 1, **images)]
    target = [operator("concat", -7, -8, **images), operator("concat", -10, -11, **kernels), operator("conv2d", 0, 1, **each)]
    return taso_rule(source, target)


@pytest.mark.parametrize("acti", [0, 2])
def test_a_grouped_convolution_is_refuted_by_different_output_channels(taso, acti):
    (found,) = taso(merged(acti))
    example = found.verdict.counterexample
    assert found.verdict.status == "refuted"
    assert example is not None
    assert example.shapes["x10"][0] != example.shapes["x11"][0]
    assert example.shapes["x7"] == example.shapes["x8"] == (1, 1, 1, 1)
    assert example.shapes["x10"][0] + example.shapes["x11"][0] == 4  # two groups divide it, and 1 + 1 are equal
    assert example.groups == {"t2": 2}
    assert found.verdict.why.endswith("it holds where x10.-4 = x11.-4")
    left, right = (np.array(side) for side in (example.left, example.right))
    assert (left != right).any()


def test_groups_of_a_source_follow_from_the_shapes_where_one_group_cannot_be(taso):
    kernels = {**PAIR, "numdim": 4, "axis": 0}
    source = [operator("concat", -7, -8, **{**PAIR, "numdim": 4}), operator("concat", -10, -10, **kernels)]
    source.append(operator("conv2d", 0, 1, **CONV))
    target = [operator("conv2d", x, -10, **CONV) for x in (-7, -8)]
    target.append(operator("concat", 0, 1, **{**PAIR, "numdim": 4}))
    (found,) = taso(taso_rule(source, target))
    assert "conv2d(2," in found.text
    assert found.verdict.status == "proved"
    assert found.rule is not None


FALSE = {
    "values": ([operator("ew-add", -1, -2)], [operator("ew-mul", -1, -2)]),
    "operands": ([operator("matmul", -1, -4)], [operator("matmul", -4, -1)]),
    "a shape": ([operator("transpose", -1, **SWAP)], []),
    "a function": ([operator("relu", -1)], [operator("sigmoid", -1)]),
    "an order": ([operator("concat", -1, -2, **PAIR)], [operator("concat", -2, -1, **PAIR)]),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_taso_rule_is_refuted(taso, name):
    (found,) = taso(taso_rule(*FALSE[name]))
    assert found.verdict.status == "refuted"
    assert found.verdict.counterexample is not None
    assert found.verdict.counterexample.left != found.verdict.counterexample.right


REFUSED = {
    "no such dimension": ([operator("concat", -1, -2, num_inputs=2, axis=2, numdim=2)], "ill-typed", "no dimension 2"),
    "ranks": ([operator("concat", -1, -2, **PAIR), operator("conv2d", 0, -3, **CONV)], "ill-typed", "rank"),
    "operands": ([operator("matmul", -1)], "ill-typed", "takes 2 operands, and has 1"),
    "a later operator": ([operator("relu", 1), operator("relu", -1)], "ill-typed", "does not come before"),
    "no such result": ([operator("relu", -1), operator("relu", (0, 1))], "ill-typed", "which it does not have"),
    "a permutation": ([operator("transpose", -1, numdim=2, perm=3)], "ill-typed", "not a permutation"),
    "a parameter": ([operator("conv2d", -1, -2)], "ill-typed", "no parameter kernel-h"),
    "sizes": ([operator("concat", -1, -2, **PAIR), operator("ew-add", 0, -1)], "ill-typed", "add"),
    "strides": ([operator("conv2d", -1, -2, **{**CONV, "stride_w": 2})], "unsupported", "stride"),
    "an activation": ([operator("conv2d", -1, -2, **{**CONV, "acti": 7})], "unsupported", "activation"),
    "a padding": ([operator("conv2d", -1, -2, **{**CONV, "pad": 7})], "unsupported", "padding"),
    "a huge kernel": ([operator("conv2d", -1, -2, **{**CONV, "kernel_h": 1 << 30})], "unsupported", "kernel-h"),
    "a huge window": ([operator("enlarge", -1, kernel_h=1 << 30, kernel_w=1 << 30)], "unsupported", "kernel-h"),
    "a huge rank": ([operator("concat", -1, -2, num_inputs=2, axis=0, numdim=1 << 30)], "unsupported", "rank"),
    "a huge split": ([operator("split", -1, axis=0, num_outputs=1 << 30)], "unsupported", "num-outputs"),
    "a huge graph": ([operator("relu", k - 1) for k in range(99)], "unsupported", "99 operators"),
    "a long permutation": ([operator("transpose", -1, numdim=3, perm=1 * 9 + 0 * 3 + 2)], "unsupported", "last two"),
    "a constant alone": ([operator("constant-one")], "unsupported", "its shape"),
    "an odd constant": ([operator("constant-imm"), operator("ew-add", -1, 0)], "unsupported", "its shape"),
    **{
        kind: ([operator(kind, -1)], "unsupported", "no such operator")
        for kind in ("input", "weight", "any", "dropout", "batchnorm", "reshape", "merge-gconv")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_untranslatable_taso_rule_has_a_reason(taso, name):
    source, status, why = REFUSED[name]
    found, good = taso(taso_rule(source, []), taso_rule(*TRUE["matmul"]))
    assert (found.verdict.status, good.verdict.status) == (status, "proved")
    assert why in found.verdict.why


def test_every_operator_of_the_list_has_a_sample():
    assert {*TRUE, *REFUSED, "concat", "split"} >= set(KINDS)


def test_a_product_of_vectors_is_ill_typed(taso):
    (found,) = taso(taso_rule([operator("relu", -1, numdim=1), operator("matmul", 0, 0)], [operator("relu", -1)]))
    assert (found.verdict.status, found.verdict.why) == ("ill-typed", "matmul of a tensor of rank 1")


def test_an_unknown_type_is_unsupported(taso):
    (found,) = taso(taso_rule([message((1, 99), (2, message((1, -1), (2, 0))))], []))
    assert (found.verdict.status, found.rule) == ("unsupported", None)


SAMPLE = taso_rule(*TRUE["matmul"])


def test_a_truncated_file_is_refused_with_the_byte():
    for end in range(1, len(SAMPLE)):
        with pytest.raises(RuleError, match="byte"):
            read_rules(SAMPLE[:end])


@given(st.binary(max_size=60), st.integers(0, len(SAMPLE)))
@settings(max_examples=fewer(100), deadline=None)
def test_a_damaged_file_is_read_or_refused(noise, at):
    for data in (noise, SAMPLE[:at] + noise + SAMPLE[at + len(noise) :]):
        with contextlib.suppress(RuleError):  # any other error fails
            assert isinstance(read_rules(data), tuple)


def test_another_file_is_refused():
    for data, why in [
        (b"\x0b", "wire type"),
        (b"\x80" * 11, "longer"),
        (message((7, 1)), "no field 7"),
        (message((1, 5)), "expected a rule"),
        (message((1, b"")), "without outputs"),
        (message((1, message((1, b"")))), "without a type"),
        (message((1, message((3, message((1, 0), (2, 0), (3, 0)))))), "lacks its field 4"),
    ]:
        with pytest.raises(RuleError, match=why):
            read_rules(data)


# FlexFlow


def node(kind: str, *inputs, **parameters: int) -> dict:
    places = [i if isinstance(i, tuple) else (i, 0) for i in inputs]
    return {
        "type": f"OP_{kind}",
        "input": [{"opId": o, "tsId": r} for o, r in places],
        "para": [{"key": f"PM_{k}", "value": v} for k, v in parameters.items()],
    }


def change(kind: str, x, dim: int) -> dict:
    return node(kind, x, PARALLEL_DIM=dim, PARALLEL_DEGREE=2)


def linear(x, w, acti: int = 0) -> dict:
    return node("LINEAR", x, w, ACTI=acti)


def concat(dim: int, x, y) -> dict:
    return node("CONCAT", x, y, AXIS=dim, NUMDIM=3, NUM_INPUTS=2)


def split(dim: int, x) -> dict:
    return node("SPLIT", x, AXIS=dim, NUM_OUTPUTS=2)


def flexflow_rule(source: list[dict], target: list[dict], *outputs: tuple[int, int, int, int]) -> dict:
    outputs = outputs or ((len(source) - 1, 0, len(target) - 1, 0),)
    keys = ("srcOpId", "srcTsId", "dstOpId", "dstTsId")
    mapped = [dict(zip(keys, o, strict=True)) for o in outputs]
    return {"name": "sample", "srcOp": source, "dstOp": target, "mappedOutput": mapped}


@pytest.fixture
def flexflow(tmp_path):
    def run(*rules: dict):
        path = tmp_path / "rules.json"
        path.write_text(json.dumps({"rule": rules}))
        return import_flexflow(path)

    return run


X, Y, W, V = -1, -2, -4, -5
PROVED = {
    "samples": (
        [change("PARTITION", X, 1), change("REPLICATE", W, 0), linear(0, 1, 2)],
        [linear(X, W), change("PARTITION", 0, 1), node("RELU", 1)],
        "map(relu, matmul(partition(-2, a, x1), transpose(replicate(a, w4))))"
        " = map(relu, partition(-2, a, matmul(x1, transpose(w4))))",
    ),
    "outputs": (
        [change("REPLICATE", X, 0), change("PARTITION", W, 1), linear(0, 1), change("COMBINE", 2, 2)],
        [linear(X, W)],
        "combine(-1, a, matmul(replicate(a, x1), transpose(partition(-2, a, w4)))) = matmul(x1, transpose(w4))",
    ),
    "channels": (
        [change("PARTITION", X, 2), change("PARTITION", W, 2), linear(0, 1), change("REDUCE", 2, 0)],
        [linear(X, W)],
        "reduce(a, matmul(partition(-1, a, x1), transpose(partition(-1, a, w4)))) = matmul(x1, transpose(w4))",
    ),
    "copies among the samples stay when slices are combined": (
        [change("PARTITION", X, 1), change("REPLICATE", 0, 1), change("COMBINE", 1, 1)],
        [change("REPLICATE", X, 1)],
        "combine(-2, a, replicate(b, partition(-2, a, x1))) = replicate(b, x1)",
    ),
    "a sum as a reduce": (
        [concat(0, X, Y), change("REDUCE", 0, 0)],
        [node("EW_ADD", X, Y)],
        "add(x1, x2) = add(x1, x2)",
    ),
    "copies reduced": (
        [change("REPLICATE", X, 0), change("REDUCE", 0, 0)],
        [change("REPLICATE", X, 1), change("REDUCE", 0, 1)],
        "add(x1, x1) = add(x1, x1)",
    ),
    "copies among the samples": (
        [change("REPLICATE", X, 1), node("RELU", 0), change("REDUCE", 1, 1)],
        [node("RELU", X), node("EW_ADD", 0, 0)],
        "add(map(relu, x1), map(relu, x1)) = add(map(relu, x1), map(relu, x1))",
    ),
    "one replica": (
        [change("REPLICATE", X, 0), change("COMBINE", 0, 0), linear(1, W)],
        [linear(X, W)],
        "matmul(x1, transpose(w4)) = matmul(x1, transpose(w4))",
    ),
    "products of sums": (
        [linear(X, W), linear(X, V), node("EW_ADD", 0, 1)],
        [node("EW_ADD", W, V), linear(X, 0)],
        "add(matmul(x1, transpose(w4)), matmul(x1, transpose(w5))) = matmul(x1, transpose(add(w4, w5)))",
    ),
    "elementwise": (
        [change("PARTITION", X, 1), change("PARTITION", Y, 1), node("EW_MUL", 0, 1)],
        [node("EW_MUL", Y, X), change("PARTITION", 0, 1)],
        "mul(partition(-2, a, x1), partition(-2, a, x2)) = partition(-2, a, mul(x2, x1))",
    ),
    "sigmoid": (
        [change("PARTITION", X, 2), node("SIGMOID", 0)],
        [node("SIGMOID", X), change("PARTITION", 0, 2)],
        "map(sigmoid, partition(-1, a, x1)) = partition(-1, a, map(sigmoid, x1))",
    ),
    "tanh": ([node("TANH", X)], [node("TANH", X)], "map(tanh, x1) = map(tanh, x1)"),
}


@pytest.mark.parametrize("name", PROVED)
def test_a_true_flexflow_rule_is_proved_and_has_axes(flexflow, name):
    source, target, text = PROVED[name]
    (found,) = flexflow(flexflow_rule(source, target))
    assert found.verdict.status == "proved", found.verdict.why
    if name == "copies among the samples":  # copies on several devices have no state once something was done to them
        assert found.rule is not None
        assert not found.rule.parallel
    assert found.text.removeprefix("sample   ") == text
    assert parse_rule(found.text) == found.rule


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_split_undoes_a_concat(flexflow, dim):
    (found,) = flexflow(
        flexflow_rule(
            [node("RELU", X), node("RELU", Y)],
            [concat(dim, X, Y), node("RELU", 0), split(dim, 1)],
            (0, 0, 2, 0),
            (1, 0, 2, 1),
        )
    )
    assert found.verdict.status == "proved"


ILL = {
    "replicas": ([concat(0, X, Y), linear(0, W)], "operand 1 has 2 replicas that differ"),
    "a weight's replicas": ([concat(0, W, V), linear(X, 0)], "operand 2 has 2 replicas that differ"),
    "degrees": ([change("PARTITION", X, 1), linear(0, W)], "sample degree 2, operand 2 replica degree 1"),
    "slices": ([change("PARTITION", X, 1), change("REDUCE", 0, 1)], "not a partial sum"),
    "a whole tensor": ([change("REDUCE", X, 2)], "not a partial sum"),
    "one replica": ([change("REDUCE", X, 0)], "not a partial sum"),
    "fused relu": ([change("PARTITION", X, 2), change("PARTITION", W, 2), linear(0, 1, 2)], "fused too early"),
    "relu": ([change("PARTITION", X, 2), change("PARTITION", W, 2), linear(0, 1), node("RELU", 2)], "is a partial sum"),
    "elementwise": ([change("PARTITION", X, 1), node("EW_ADD", 0, Y)], "operand 1 has degrees 1·2·1, operand 2 1·1·1"),
    "concat": ([change("PARTITION", X, 1), concat(0, Y, 0)], "degrees"),
    "combine": ([change("COMBINE", X, 1)], "no 2 pieces"),
    "split": ([split(1, X)], "was not concatenated"),
    "sides": ([change("PARTITION", X, 1)], "source's degrees"),
    "no operand": ([node("RELU")], "takes 1 operands, and has 0"),
    "no parameter": ([node("CONCAT", X, Y)], "no parameter PM_AXIS"),
    "a dimension": ([change("PARTITION", X, 3)], "dimensions 0, 1 and 2"),
    "a degree": ([node("PARTITION", X, PARALLEL_DIM=1, PARALLEL_DEGREE=1)], "less than 2"),
    "a later operator": ([node("RELU", 1), node("RELU", X)], "does not come before"),
    "no such result": ([node("RELU", X), node("RELU", (0, 1))], "does not have"),
}


@pytest.mark.parametrize("name", ILL)
def test_an_ill_typed_flexflow_rule_has_a_reason(flexflow, name):
    source, why = ILL[name]
    (found,) = flexflow(flexflow_rule(source, [node("RELU", X)]))
    assert found.verdict.status == "ill-typed"
    assert why in found.verdict.why


def test_an_operator_that_the_language_lacks_is_unsupported(flexflow):
    huge = [change("REPLICATE", k - 1 if k else X, 0) for k in range(10)]
    many = [node("RELU", k - 1 if k else X) for k in range(99)]
    wide = [node("PARTITION", X, PARALLEL_DIM=1, PARALLEL_DEGREE=1 << 30)]
    for source in ([node("BATCHNORM", X)], [linear(X, W, 9)], huge, many, wide):
        (found,) = flexflow(flexflow_rule(source, [node("RELU", X)]))
        assert found.verdict.status == "unsupported"


def test_a_false_flexflow_rule_is_refuted(flexflow):
    found = flexflow(
        flexflow_rule([node("EW_ADD", X, Y)], [node("EW_MUL", X, Y)]),
        flexflow_rule([node("RELU", X)], [concat(0, X, X), change("REDUCE", 0, 0)]),
        flexflow_rule([concat(1, X, Y)], [concat(1, Y, X)]),
    )
    for i in found:
        assert i.verdict.status == "refuted"
        assert i.verdict.counterexample is not None
        assert i.verdict.counterexample.left != i.verdict.counterexample.right


def test_every_flexflow_operator_has_a_sample():
    used = {o["type"] for sample in (*PROVED.values(), *ILL.values()) for side in sample[:-1] for o in side}
    assert used >= set(OPERATORS)


def test_a_damaged_json_file_is_refused_with_the_place(tmp_path):
    path = tmp_path / "rules.json"
    good = json.dumps({"rule": [flexflow_rule(*PROVED["channels"][:2])]})
    for text, why in [
        (good[: len(good) // 2], "line 1, column"),
        ("", "line 1, column 1"),
        ("[" * 200_000, "nested|line 1"),
        ("[]", 'expected an object with "rule"'),
        ('{"rule": 3}', "expected a value of type list"),
        ('{"rule": [{}]}', 'rule 0: expected an object with "name"'),
        (good.replace('"opId": -1', '"opId": "x"'), "opId"),
        (good.replace('"type": "OP_LINEAR", ', ""), 'expected an object with "type"'),
        ('{"rule": [{"name": "n", "srcOp": [], "dstOp": [], "mappedOutput": []}]}', "no outputs"),
    ]:
        path.write_text(text)
        with pytest.raises(RuleError, match=why):
            import_flexflow(path)


# The reading, executed independently: whole arrays, with every index of a dimension written down


def run(nodes: list[dict], inputs: dict[int, np.ndarray]) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Return the value and degrees of the last operator, or None where the graph is ill-typed only by its sizes."""
    found = []
    for o in nodes:
        at = {p["key"].removeprefix("PM_"): p["value"] for p in o["para"]}
        xs = [(inputs[i["opId"]], (1, 1, 1)) if i["opId"] < 0 else found[i["opId"]] for i in o["input"]]
        (x, degrees), d = xs[0], at.get("PARALLEL_DIM", at.get("AXIS", 0))
        more = tuple(n * 2 if k == d else n for k, n in enumerate(degrees))
        less = tuple(n // 2 if k == d and n > 1 else n for k, n in enumerate(degrees))
        match o["type"].removeprefix("OP_"):
            case "PARTITION":
                found.append((x, more))
            case "COMBINE":
                found.append((x, less))
            case "REPLICATE":
                found.append((np.repeat(x, 2, d), more))
            case "REDUCE":
                if x.shape[d] % 2:
                    return None
                neighbours = x.reshape(*x.shape[:d], -1, 2, *x.shape[d + 1 :])
                found.append((neighbours.sum(d + 1), less))
            case "RELU":
                found.append((np.maximum(x, 0), degrees))
            case "EW_ADD":
                if x.shape != xs[1][0].shape:
                    return None
                found.append((x + xs[1][0], degrees))
            case "CONCAT":
                if any(n != m for k, (n, m) in enumerate(zip(x.shape, xs[1][0].shape, strict=True)) if k != d):
                    return None
                found.append((np.concatenate([x, xs[1][0]], d), degrees))
    return found[-1]


def chains(length: int) -> list[list[dict]]:
    """Yield every chain of operators on x, some of which read x or a second input again."""
    steps = [
        lambda p: node("RELU", p),
        lambda p: node("EW_ADD", p, p),
        lambda p: node("EW_ADD", p, Y),
        lambda p: concat(0, p, p),
        lambda p: concat(1, p, p),
        *(lambda p, k=k, d=d: change(k, p, d) for k in ("COMBINE", "REPLICATE", "REDUCE") for d in (0, 1)),
        lambda p: change("PARTITION", p, 1),
    ]
    return [
        [s(k - 1 if k else X) for k, s in enumerate(chosen)]
        for n in range(1, length + 1)
        for chosen in itertools.product(steps, repeat=n)
    ]


def test_no_wrong_flexflow_rule_is_proved_and_no_right_one_refuted(flexflow):
    rng = np.random.default_rng(0)
    inputs = {k: rng.integers(-9, 9, (1, 4, 4)) for k in (X, Y)}
    results = [(nodes, run(nodes, inputs)) for nodes in chains(3)]
    classes = defaultdict(list)
    for nodes, found in results:
        if found is not None:
            classes[found[0].tobytes(), found[0].shape, found[1]].append(nodes)
    large = [c for c in classes.values() if len(c) > 1]
    right = [flexflow_rule(*(c[i] for i in rng.choice(len(c), 2, replace=False))) for c in large]
    keys = list(classes)
    wrong = [flexflow_rule(*(classes[keys[i]][0] for i in rng.choice(len(keys), 2, replace=False))) for _ in range(80)]
    found = flexflow(*right, *wrong)
    verdicts = [i.verdict.status for i in found]
    assert all("relu" in i.text for i in found if i.verdict.status == "open")  # relu(x + x) = relu(x) + relu(x) is no axiom
    assert "open" not in verdicts[len(right) :]
    assert "refuted" not in verdicts[: len(right)]
    assert verdicts[: len(right)].count("proved") > 20
    assert "proved" not in verdicts[len(right) :]


def test_the_report_counts_verdicts_and_names_rules(taso):
    found = taso(SAMPLE, merged(0), taso_rule([operator("dropout", -1)], []))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report(found))
    text = capture.get()
    assert all(word in text for word in ("3 rules", "proved", "refuted", "unsupported", "taso-1", "dropout", "median"))
    assert report([]) is not None
