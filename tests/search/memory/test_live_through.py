"""Live values beside an operator's own, compared with brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unity.pcg.ir.graph import Node, Value
from unity.search.memory.live_through import live_through

Case = tuple[list[Node], dict[Value, float], list[Value]]


@st.composite
def operators(draw: st.DrawFn) -> Case:
    """Draw operators with an input before them, the bytes of their values, and the values that are read at the end."""
    values = [Value(Node("input", (), ()), 0)]
    nodes = list[Node]()
    for _ in range(draw(st.integers(0, 12))):
        nodes.append(Node("made", tuple(draw(st.lists(st.sampled_from(values), max_size=3))), ()))
        values += [Value(nodes[-1], i) for i in range(draw(st.integers(1, 2)))]
    nbytes = {v: draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])) for v in values}
    return nodes, nbytes, draw(st.lists(st.sampled_from(values), unique=True))


@given(operators())
def test_waiting_bytes_are_those_of_brute_force(case: Case) -> None:
    nodes, nbytes, ends = case

    def waits(v: Value, at: int) -> bool:
        before = all(v.node is not node for node in nodes[at:])
        later = v in ends or any(v in node.operands for node in nodes[at + 1 :])
        return before and later and v not in nodes[at].operands

    assert live_through(nodes, nbytes, ends) == [sum(n for v, n in nbytes.items() if waits(v, at)) for at in range(len(nodes))]
