"""The closing table: a step as predicted and as measured, and rank by rank what its time went into."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.policy import Rule
from pipeswift.policy.diary import Diary
from pipeswift.program import BlockCosts, Grain, Line
from pipeswift.simulate import replay
from pipeswift.trace import PLANNING, PLANS, Counter
from pipeswift.train.closing import close, tables, text_of
from pipeswift.train.comparison import compare
from pipeswift.train.cut import Cut
from pipeswift.train.metrics import Outcome
from tests.report.timelines import LANES, SHORT

COSTS = BlockCosts(Line(1e-3, 2e-9), sent=4e6, experts={op: Line(5e-4, 0.02) for op in Op})
MEASURED = "all-to-all takes 1.00 ms + 8.00 ms for 4.00 MB, experts 0.50 ms a chunk + 20.00 ms."


def test_the_closing_table_sets_prediction_beside_measurement(capsys):
    schedule = schedules.build("1f1b", 2, 4)
    told = (Counter(PLANS, 0, np.zeros(1), np.array([2])), Counter(PLANNING, 0, np.zeros(1), np.array([0.03])))
    measured = replace(replay(schedule, Costs.uniform(2, comm=0.5)), counters=told)
    close(
        Outcome(
            schedule=schedule,
            cut=Cut((3, 2)),
            late_steps=((measured, measured),),
            first_held_out=5.5,
            held_out=2.0,
            tokens_per_second=1000,
            seconds=60,
            grains={0: Grain(2, 1, COSTS), 1: Grain(3, 1, COSTS)},
            cores=2,
            ranks_here=2,
            threads=1,
        ),
        compare(schedule, [[measured, measured]]),
        Path("runs/x"),
    )
    shown = capsys.readouterr().out
    for words in (
        "makespan",
        "bubble by span",
        "2 1",
        "2 ranks",
        "shared 2 cores",
        "5.500 -> 2.000",
        "stage: 3 2.",
        "stage: 2/1, 3/1.",
        "planned 2 times, in 15.0 ms each",
        MEASURED,
        "the first of 2 copies",
        "rank 1, replica 0   70.6 %   29.4 %",
    ):
        assert words in shown


def shown(*replicas, layout=(1, 1)):
    """The tables as they are printed, without trailing blanks."""
    return "\n" + "\n".join(line.rstrip() for line in text_of(tables(replicas, layout)).splitlines()) + "\n"


def test_a_plain_pipeline_is_busy_or_idle():
    assert (
        shown(SHORT)
        == """
 share of the step     busy     idle
─────────────────────────────────────
 rank 0              50.0 %   50.0 %
 rank 1              50.0 %   50.0 %
"""
    )


def test_all_to_alls_rules_and_loads_of_all_ranks_of_all_replicas():
    leader, follower = Diary(0), Diary(1)
    for moment, rule in enumerate((Rule.FOLLOW, Rule.ADVANCE, Rule.FOLLOW)):
        leader.note(float(moment), rule, depth=moment)
    follower.note(0.0, Rule.FORCE, depth=3)
    loads = {"0.1: rows 0": 6, "0.1: rows 1": 2, "0.1: taken 0": 6, "0.1: taken 1": 2}
    told = [Counter(name, 0, np.zeros(1), np.array([rows])) for name, rows in loads.items()]
    decided = replace(LANES, counters=(*leader.counters(), *follower.counters(), *told))
    even = [replace(counter, value=np.array([4])) for counter in told]
    assert (
        shown(decided, replace(LANES, counters=tuple(even)))
        == """
 share of the step     busy   exposed   reducing     idle   hidden
───────────────────────────────────────────────────────────────────
 rank 0, replica 0   54.5 %     9.1 %      9.1 %   27.3 %   18.2 %
 rank 0, replica 1   54.5 %     9.1 %      9.1 %   27.3 %   18.2 %
 rank 1, replica 0   54.5 %     0.0 %      0.0 %   45.5 %    0.0 %
 rank 1, replica 1   54.5 %     0.0 %      0.0 %   45.5 %    0.0 %

 decisions by rule   follow   advance   force   waiting
────────────────────────────────────────────────────────
 rank 0, replica 0        2         1       0         2
 rank 0, replica 1        0         0       0         0
 rank 1, replica 0        0         0       1         3
 rank 1, replica 1        0         0       0         0

 largest load over mean   expert   rank   rank, by micro-batch
───────────────────────────────────────────────────────────────
 stage 0                    1.25   1.25                   1.25
"""
    )


def test_of_many_ranks_the_first_are_shown():
    trace = replay(schedules.build("gpipe", 64, 1), Costs.uniform(64))
    lines = shown(trace).splitlines()
    assert len(lines) == 1 + 2 + 16 + 1
    assert lines[-1] == " and 48 more"
