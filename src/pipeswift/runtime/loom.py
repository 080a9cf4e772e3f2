"""The programs that one rank runs: of single passes, and of pairs woven on costs that its expert group agrees on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import median

from pipeswift.ir import Action, Op, Overlap, Schedule, parts
from pipeswift.program import Lane, Part, Program, Work, compile_action, merge
from pipeswift.runtime.calls import Bound
from pipeswift.runtime.groups import Group
from pipeswift.runtime.recorder import Recorder
from pipeswift.runtime.stage import Stage
from pipeswift.verify import check_collectives

Key = tuple[tuple[int, Op], ...]  # what a program is for: (stage, op) of its pass, or of both of a pair
_STAGE_AND_OP = itemgetter(0, 1)
WARM_UP = 1  # steps that are not looked at; the next one calibrates


class Loom:
    """Makes the programs of `schedule` on one rank, by what they are for.

    In a program an action's micro-batch is the number of its pass, 0 or 1. Pairs are woven if a stage of theirs has
    all-to-alls to hide. The first ones are woven on nominal costs; see `learn`.
    experts: the ranks that share them out, which run the same programs at the same time.
    Raises InvalidSchedule, on all of these, when their collectives would come in different orders.
    """

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, Stage], experts: Group):
        self._stages, self._last, self._experts = stages, schedule.num_stages - 1, experts
        self._name, self._order = schedule.name, schedule.orders[rank]
        self._pairs = {key_of(bundle) for entry in self._order for bundle in self.bundles(entry) if len(bundle) > 1}
        ops = {op for order in schedule.orders for op in map(Op, set(order.rows[:, 1].tolist()))}
        self._keys: list[Key] = sorted([*(((stage, op),) for stage in stages for op in ops), *self._pairs])
        self._seconds: Mapping[Work, float] = {}
        self._steps = 0
        self.programs = self._weave()

    def bundles(self, entry: Action | Overlap) -> Sequence[tuple[Action, ...]]:
        """The actions of an entry: those that run as one program together."""
        if isinstance(entry, Action):
            return ((entry,),)
        woven = any(self._stages[action.stage].exchanges for action in parts(entry))
        return (parts(entry),) if woven else [(action,) for action in parts(entry)]

    def learn(self, recorder: Recorder, calls: Mapping[Key, Sequence[Bound]]) -> bool:
        """After each step: whether pairs are woven anew, on what `recorder` has measured. Once, by all ranks alike.

        An all-to-all costs what the rank saw that came to it last, the least over ranks; compute what it takes the
        slowest. On each rank it is the median over the step.
        """
        self._steps += 1
        if not self._pairs or self._steps != WARM_UP + 1:
            return False
        everyone = self._experts.all_gather(self._measured(recorder, calls))
        by_length = {work: sorted(theirs[work] for theirs in everyone) for work in everyone[0]}
        self._seconds = {work: found[0 if work.lane is Lane.ALL_TO_ALL else -1] for work, found in by_length.items()}
        self.programs = self._weave()
        return True

    def _weave(self) -> dict[Key, Program]:
        made = {key: self._program(key) for key in self._keys}
        if self._pairs:
            mine = [work for program in made.values() for work in program.on(Lane.ALL_TO_ALL)]
            check_collectives(self._name, self._experts.all_gather(mine))
        return made

    def _program(self, key: Key) -> Program:
        apart = [self._alone(Action(stage, op, number)) for number, (stage, op) in enumerate(key)]
        return apart[0] if len(apart) == 1 else merge(apart[0], apart[1], self._cost)

    def _alone(self, action: Action) -> Program:
        stage, op, _ = action
        downstream, upstream = stage < self._last, stage > 0
        takes, sends = (upstream, downstream) if op is Op.F else (downstream, upstream)
        program = compile_action(action, layout=self._stages[stage].forms, takes=takes, sends=sends)
        if self._stages[stage].exchanges and op is not Op.W:
            program = self._stages[stage].grain.cut(program, op)
        return program

    def _cost(self, work: Work) -> float:
        """Seconds; as long as none are known, any unit."""
        if work.lane is Lane.POINT_TO_POINT:
            return 0.0  # a pass starts when its input is here, and nobody waits for its output
        return self._seconds.get(_of_any(work), 0.1 if work.part is Part.COUNTS else 1 / work.chunks)

    def _measured(self, recorder: Recorder, calls: Mapping[Key, Sequence[Bound]]) -> dict[Work, float]:
        seconds = iter(recorder.seconds())
        found: dict[Work, list[float]] = defaultdict(list)
        for entry in self._order:
            for key in map(key_of, self.bundles(entry)):
                for work in (bound.spans for bound in calls[key] if bound.spans):
                    found[_of_any(work)].append(next(seconds))
        pairs = {_of_any(work) for key in self._pairs for work in self.programs[key].works}
        return {work: median(found[work]) for work in sorted(pairs) if work.lane is not Lane.POINT_TO_POINT}


def key_of(actions: Sequence[Action]) -> Key:
    """What the program of these actions is filed under."""
    return tuple(map(_STAGE_AND_OP, actions))


def _of_any(work: Work) -> Work:
    """The same work of whatever micro-batch."""
    return work._replace(action=work.action._replace(microbatch=0))
