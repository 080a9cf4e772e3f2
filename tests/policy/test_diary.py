"""The diary: decisions as counters of a trace, and their sums."""

from pipeswift.policy import Rule
from pipeswift.policy.diary import Diary, tally
from pipeswift.trace import QUEUE_DEPTH


def diary(rank: int, *rules: Rule) -> Diary:
    made = Diary(rank)
    for time, rule in enumerate(rules):
        made.note(float(time), rule, depth=2 * time)
    return made


def test_a_counter_for_the_queue_and_one_for_each_rule_that_decided():
    depth, follow, hold = diary(3, Rule.FOLLOW, Rule.HOLD, Rule.FOLLOW).counters()
    assert (depth.name, depth.rank, depth.time.tolist(), depth.value.tolist()) == (QUEUE_DEPTH, 3, [0, 1, 2], [0, 2, 4])
    assert (follow.name, follow.time.tolist(), follow.value.tolist()) == ("rule follow", [0, 2], [1, 2])
    assert (hold.name, hold.time.tolist(), hold.value.tolist()) == ("rule hold", [1], [1])


def test_the_tally_has_a_number_per_rank_for_the_rules_that_decided():
    first, second = diary(0, Rule.FOLLOW, Rule.FOLLOW), diary(1, Rule.FOLLOW, Rule.FORCE)
    assert tally((*first.counters(), *second.counters()), num_ranks=2) == {"follow": [2, 1], "force": [0, 1]}


def test_nothing_decided_nothing_counted():
    assert tally(diary(0).counters(), num_ranks=1) == {}
