"""The timetable of 1F1B runs every pass once and in order, needs the published time and memory, and delivers messages in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity.pcg.parallel.timetable import (
    HALVES,
    backward_micro_batch,
    drain_ticks,
    forward_micro_batch,
    home,
    incoming_micro_batch,
    pairs,
    returning_micro_batch,
)

STAGES, ROWS = st.integers(2, 9), st.integers(1, 5)
FORWARD, BACKWARD = "f", "b"


def timetable(stages: int, micro_batches: int) -> list[list[tuple[str, int] | None]]:
    """Return for every half tick and stage the pass and its micro-batch, or None."""
    rows = []
    for tick in range(micro_batches + stages - 1):
        for half in HALVES:
            row = [
                (FORWARD, forward_micro_batch(tick, s)) if s % 2 == half else (BACKWARD, backward_micro_batch(tick, s, stages))
                for s in range(stages)
            ]
            rows.append([entry if 0 <= entry[1] < micro_batches else None for entry in row])
    return rows


def done(stages, micro_batches):
    """In which half tick each pass is done."""
    found = {}
    for half, row in enumerate(timetable(stages, micro_batches)):
        for stage, what in enumerate(row):
            if what is not None:
                assert (stage, *what) not in found
                found[stage, *what] = half
    return found


def seconds(stages, micro_batches, forward, backward, pairwise):
    """When the last stage is done, where an exchange waits for its two stages, or for all."""
    clock = [0.0] * stages
    for half, row in enumerate(timetable(stages, micro_batches)):
        for stage, what in enumerate(row):
            clock[stage] += 0.0 if what is None else forward if what[0] == FORWARD else backward
        for a, b in pairs(stages, half % 2) if pairwise else ():
            clock[a] = clock[b] = max(clock[a], clock[b])
        clock = clock if pairwise else [max(clock)] * stages
    return max(clock)


@given(STAGES, ROWS)
def test_every_pass_is_done_once_after_what_it_needs(stages, rows):
    n = stages * rows
    when = done(stages, n)
    assert len(when) == 2 * stages * n
    for number in range(n):
        for stage in range(1, stages):
            assert when[stage - 1, FORWARD, number] < when[stage, FORWARD, number]
            assert when[stage, BACKWARD, number] < when[stage - 1, BACKWARD, number]
        assert when[stages - 1, FORWARD, number] < when[stages - 1, BACKWARD, number]


@given(STAGES, ROWS)
def test_a_stage_holds_no_more_micro_batches_than_stages_follow(stages, rows):
    n = stages * rows
    when = done(stages, n)
    for stage in range(stages):
        spans = [(when[stage, FORWARD, k], when[stage, BACKWARD, k]) for k in range(n)]
        held = max(sum(a <= half <= b for a, b in spans) for half in range(2 * (n + stages)))
        assert held == stages - stage
        # so a ring of as many places is enough: who comes into a place finds it empty
        assert all(spans[k][1] < spans[k + stages][0] for k in range(n - stages))


@given(STAGES, ROWS, st.integers(1, 9), st.integers(1, 9))
def test_it_takes_as_long_as_published(stages, rows, forward, backward):
    n = stages * rows
    assert seconds(stages, n, forward, backward, pairwise=True) == (n + stages - 1) * (forward + backward)
    waiting = seconds(stages, n, forward, backward, pairwise=False)
    assert waiting <= (n + stages - 1) * 2 * max(forward, backward)


@given(STAGES, ROWS)
def test_every_micro_batch_is_stored_somewhere(stages, rows):
    found = sorted(home(number, stages, rows) for number in range(stages * rows))
    assert found == [(stage, row) for stage in range(stages) for row in range(rows)]


@given(STAGES, ROWS)
def test_without_draining_a_batch_begins_in_one_step_and_is_home_in_the_next(stages, rows):
    """A sample that is stored on another stage than 0 sets off when its batch is there; so does what the tail reads of it; and
    a gradient comes home, before its batch's second step is over."""
    n = stages * rows
    for number in range(n):
        stage, _ = home(number, stages, rows)
        sets_off = next(tick for tick in range(-stages, 2 * n) if incoming_micro_batch(tick, stage) == number)
        assert sets_off >= 0 or (stage, number) == (0, 0)  # stage 0 begins with it
        assert next(tick for tick in range(2 * n + stages) if forward_micro_batch(tick, stage) == number) >= 0
        at_home = next(tick for tick in range(3 * n) if returning_micro_batch(tick, stage, stages) == number)
        assert at_home < min(2 * n, n + stages - 1 + drain_ticks(stages, rows))
        assert next(tick for tick in range(3 * n) if backward_micro_batch(tick, stage, stages) == number) < 2 * n


def exchanged(before, stages, half):
    """What lies on every stage after an exchange."""
    after = [None] * stages if pairs(stages, half) else list(before)
    for a, b in pairs(stages, half):
        after[a], after[b] = before[b], before[a]
    return after


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("rows", range(1, 5))
def test_what_is_sent_arrives_where_and_when_it_is_wanted(stages, rows):
    """`working` goes through the stages and back, `passing` from where it is stored to stage 0, and its gradient home; `item` from
    there to the last stage, and back. Samples are numbers, gradients negative ones."""
    n, last = stages * rows, stages - 1
    working, passing, item = [1] + [None] * last, [None] * stages, [None] * stages
    brought, items = set(), set()
    for tick in range(n + last + drain_ticks(stages, rows)):
        for half in HALVES:
            for k in range(stages):
                onward = k % 2 == half
                number = forward_micro_batch(tick, k) if onward else backward_micro_batch(tick, k, stages)
                if 0 <= number < n:
                    here = home(number, stages, rows)[0] == k
                    if onward and here:
                        item[k] = number + 1
                    assert working[k] == (number + 1) * (1 if onward else -1)
                    if onward and k == last:
                        assert item[k] == number + 1
                    if not onward and here:
                        items.add(item[k])
                number = incoming_micro_batch(tick, k)
                if not onward and 0 <= number < n and home(number, stages, rows)[0] == k:
                    passing[k] = number + 1
            done, waiting = list(working), list(passing)
            working, passing, item = (exchanged(xs, stages, half) for xs in (working, passing, item))
            if half == last % 2:
                working[last] = item[last] = -(forward_micro_batch(tick, last) + 1)
            if half == 1:
                working[0], passing[0] = waiting[0], done[0]
            for k in range(stages):
                number = returning_micro_batch(tick, k, stages)
                if k % 2 != half and 0 <= number < n and home(number, stages, rows)[0] == k:
                    brought.add(passing[k])
    assert brought == items == {-number - 1 for number in range(n)}
