"""Runs one rank's part of a step: asks the policy what to start, runs it, sleeps when there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty
from typing import Any

from pipeswift.ir import Action, Op, Overlap, Schedule, parts
from pipeswift.passes import weight_runs
from pipeswift.policy import Agreed, Decision, Policy, Ready, View
from pipeswift.program import Lane
from pipeswift.runtime.calls import Bound, Calls, Job, Pass, join
from pipeswift.runtime.groups import Group
from pipeswift.runtime.lanes import Lanes, Launched
from pipeswift.runtime.lookout import Lookout
from pipeswift.runtime.loom import Key, Loom, key_of
from pipeswift.runtime.parley import Parley
from pipeswift.runtime.progress import Progress, Run
from pipeswift.runtime.recorder import Recorder, clock
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.steering import Helm
from pipeswift.runtime.wiring import Wiring


class Executor:
    """One rank's runner of one schedule. Each (stage, op) is compiled once to a list of bound calls."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        on_backward: Callable[[Action], None],
        grad_ready: Callable[[Stage], None],
        progress: Progress,
        lanes: Lanes,
        experts: Group,
        batched_weight_gradients: bool = False,
    ):
        self.schedule, self.rank = schedule, rank
        self._stages, self._wiring = stages, wiring
        self._on_backward, self._grad_ready = on_backward, grad_ready
        self._progress = progress
        self._backwards = dict.fromkeys(stages, 0)  # by stage, in one step
        for route, stage in schedule.stages_on(rank):
            self._backwards[stage] += schedule.route_of.count(route)
        if schedule.splits_backward:
            for stage in stages.values():
                stage.prepare_split()
        together = _by_last(weight_runs(schedule.orders[rank])) if batched_weight_gradients else None
        self._calls, self._lanes = Calls(schedule, stages, wiring, lanes, together), lanes
        self._loom, self._experts = Loom(schedule, rank, stages, experts), experts
        self._bound = self._bind()
        self._spans = self._count_spans()
        self._recorder = Recorder(rank, schedule.num_ranks, 0)

    def run(self, job: Job, helm: Helm) -> Recorder:
        """One step, in which `helm` decides. Raises whatever a layer, the loss or a channel raised."""
        ready, parley = self._ready(helm)  # before anything arrives
        self._wiring.begin(self.schedule)
        backwards = dict(self._backwards)  # still to come, by stage
        run = self._progress.run = Run(helm.order or self.schedule, self.rank, ready)
        self._recorder = recorder = Recorder(self.rank, self.schedule.num_ranks, self._spans)
        self._calls.begin(job, recorder)
        watch = helm.lookout if parley is None or parley.leads else None  # who follows decides nothing
        for entry, besides in self._decisions(ready, helm.policy, watch, parley):
            for actions in self._loom.bundles(entry):
                run.started += actions
                self._run(actions)
                if besides is not None:
                    besides.wait()
                for action in actions:
                    ready.finish(action)
                run.ended += len(actions)
                for action in actions:
                    self._account(action, backwards)
        self._wiring.end()
        with self._progress.joining("what pairs cost"):
            if self._loom.learn(recorder, self._bound):
                self._bound = self._bind()
        if watch:
            recorder.counters = watch.counters(clock())
        if parley:
            recorder.counters = *recorder.counters, parley.end(self.rank, clock())
        return recorder

    def _ready(self, helm: Helm) -> tuple[Ready, Parley | None]:
        """What may start on this rank, and how it agrees on that with others, where its passes meet theirs."""
        if helm.hotline is None or not any(stage.exchanges for stage in self._stages.values()):
            return Ready(self.schedule, self.rank, helm.slots), None
        member, members = self._experts.rank, self._experts.size
        ready = Agreed(self.schedule, self.rank, helm.slots, member, members)
        return ready, Parley(ready, member, helm.policy, helm.hotline, self._wiring.inbox)

    def _decisions(
        self, ready: Ready, policy: Policy, watch: Lookout | None, parley: Parley | None
    ) -> Iterator[tuple[Action | Overlap, Launched | None]]:
        """What to run, one entry after the other: each has started, and is over when the next is asked for.

        With it what another thread does besides, to be waited for before the entry's end counts: until then `ready`,
        `watch` and `parley` are that thread's.
        """
        inbox, started, idle_since = self._wiring.inbox, 0, clock()
        if watch:
            watch.begin_step()
        while not ready.finished:
            while not inbox.empty():
                self._arrive(ready, inbox.get())
            now, due = clock(), parley and parley.due()
            if watch and not due:
                watch.look(now)
            view = View(self.rank, now, started, idle_since, watch and watch.monitor)
            decision = due or policy.next(ready, view)
            entry = decision.entry
            if entry is None:
                if watch:
                    watch.note(now, decision, ready.depth)
                self._await_arrival(ready, decision.until)
                continue
            started += 1
            depth = ready.depth
            for action in parts(entry):
                ready.start(action)
            if parley and parley.leads:
                parley.say()
                yield entry, self._lanes.launch(Lane.ALL_TO_ALL, partial(_tell, watch, parley, decision, view, depth))
            else:
                if watch:
                    _tell(watch, None, decision, view, depth)
                yield entry, None
            idle_since = clock()
            if watch:
                watch.end(parts(entry)[0], idle_since - now)

    def _await_arrival(self, ready: Ready, until: float) -> None:
        """Sleeps until something arrives, or `until`."""
        timeout = max(until - clock(), 0.0) if until < inf else None
        with suppress(Empty):
            self._arrive(ready, self._wiring.inbox.get(timeout=timeout))

    def close(self) -> None:
        """Lets go of stages and channels, so that they end with their last user and not at some garbage collection."""
        self._bound.clear()
        for stage in self._stages.values():
            stage.tail = None

    def _run(self, actions: Sequence[Action]) -> None:
        passes = tuple(map(Pass, actions))
        for lane, number, call, _ in self._bound[key_of(actions)]:
            if lane is Lane.COMPUTE:
                start = clock()
                call(passes[number])
                self._recorder.span(actions[number], start, clock())
            else:
                call(passes[number])

    def _bind(self) -> dict[Key, tuple[Bound, ...]]:
        """The calls of every program; those of a pair stay apart, so that each work has a span of its own."""
        bound = {key: self._calls.bind(program) for key, program in self._loom.programs.items()}
        return {key: join(calls) if len(key) == 1 else calls for key, calls in bound.items()}

    def _count_spans(self) -> int:
        """The most that a step records."""
        spans = {key: sum(bool(bound.spans) for bound in calls) for key, calls in self._bound.items()}
        bundles = (bundle for entry in self.schedule.orders[self.rank] for bundle in self._loom.bundles(entry))
        return sum(spans[key_of(bundle)] for bundle in bundles)

    def _account(self, action: Action, backwards: dict[int, int]) -> None:
        """Tells the owner of the weights that a backward has added to gradients, and when a stage's are complete."""
        if action.op is Op.F:
            return
        self._on_backward(action)
        if action.op is not Op.I:
            backwards[action.stage] -= 1
            if not backwards[action.stage]:
                self._grad_ready(self._stages[action.stage])

    def _arrive(self, ready: Ready, arrival: Any) -> None:
        if isinstance(arrival, BaseException):
            raise arrival
        if arrival is not None:
            ready.arrive(arrival.product, arrival.stage, arrival.microbatch)


def _tell(watch: Lookout | None, parley: Parley | None, decision: Decision, view: View, depth: int) -> None:
    """What neighbours and members get to know of an entry that has started."""
    assert decision.entry is not None
    action = parts(decision.entry)[0]
    if parley:
        parley.promise(action, view)
    if watch:
        watch.note(view.now, decision, depth)
        watch.begin(action, view.now, depth)


def _by_last(runs: Sequence[tuple[int, tuple[int, ...]]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """For the last W of each run, (stage, micro-batch), the micro-batches whose work it does."""
    return {(stage, microbatches[-1]): microbatches for stage, microbatches in runs}
