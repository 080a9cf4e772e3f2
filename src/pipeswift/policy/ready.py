"""What one rank may start now: facts in (something arrived, something ran), ready actions out. No clock, no I/O.

The simulator's event loop and the runtime's executor feed the same object, so a policy sees the same facts in both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pipeswift.ir import MAKES, Action, Op, Product, Schedule, needs, parts

Slots = Mapping[tuple[int, int], int]  # (stage, route) -> micro-batches that may be in flight there


class Ready:
    """The set of actions that `rank` may start.

    An action is ready when what it needs is here (`ir.needs`), when it is the next of its stage and route in
    micro-batch order, and, for an F, when the stage has a free slot. A slot is taken by F and freed by B or W (by F
    itself in a forward-only schedule).
    """

    def __init__(self, schedule: Schedule, rank: int, slots: Slots):
        self._route_of = schedule.route_of
        self._held = schedule.stages_on(rank)
        self._free = {(stage, route): slots[stage, route] for route, stage in self._held}
        self._needs = {
            stage: tuple(needs(Action(stage, op, 0), schedule.num_stages) for op in Op) for _, stage in self._held
        }
        self._here: set[tuple[Product, int, int]] = set()
        of_route: list[list[int]] = [[] for _ in schedule.routes]
        for microbatch, route in enumerate(schedule.route_of):
            of_route[route].append(microbatch)
        # Micro-batches that have not started their F, their backward, their (separate) W; next one first.
        self._forward = {(stage, route): deque(of_route[route]) for route, stage in self._held}
        self._backward = {(stage, route): deque(of_route[route]) for route, stage in self._held}
        self._weight: dict[tuple[int, int], deque[int]] = {(stage, route): deque() for route, stage in self._held}
        self._queues = (self._forward, self._backward, self._weight, self._backward)  # by op
        self._feeds = _feeds(schedule, [stage for _, stage in self._held])
        self._depth = 0
        self._heads: dict[tuple[Op, tuple[int, int]], Action] = {}  # of the queues, by op and (stage, route)
        for place in self._free:
            self._advance(place, tuple(Op))
        self._started: set[Action] = set()
        self._done = 0  # actions at the front of the order that `first` is asked for, all started
        self._closing = (Op.F,) if schedule.forward_only else (Op.W, Op.B)
        self._unfinished = sum(len(queue) for queue in self._forward.values())

    @property
    def finished(self) -> bool:
        """Whether every micro-batch has been through all of this rank's stages, both ways unless forward-only."""
        return self._unfinished == 0

    def arrive(self, product: Product, stage: int, microbatch: int) -> None:
        """A product made elsewhere is here now."""
        self._add(product, stage, microbatch)

    def start(self, action: Action) -> None:
        """The action starts: it leaves its queue, and an F takes a slot."""
        place = action.stage, self._route_of[action.microbatch]
        head = self._queues[action.op][place].popleft()
        self._started.add(action)
        if head != action.microbatch:
            raise ValueError(f"{action} started out of order: micro-batch {head} was next")
        if action.op is not Op.W and (action.op is not Op.F or action.stage):
            self._depth -= 1
        if action.op is Op.F:
            self._free[place] -= 1
        elif action.op is Op.I:
            self._weight[place].append(action.microbatch)
        self._advance(place, _MOVES[action.op])

    def finish(self, action: Action) -> None:
        """The action ended: what it made is here, and what only it needed is not kept."""
        stage, op, microbatch = action
        for product in MAKES[op]:
            self._add(product, stage, microbatch)
        if op in self._closing:
            self._free[stage, self._route_of[microbatch]] += 1
            self._unfinished -= 1
            spent = stage - 1 if op is Op.F else stage  # a next stage on this rank still needs what an F has made
            self._here.difference_update(
                ((Product.OUTPUT, spent, microbatch), (Product.WEIGHT_GRADIENT, spent, microbatch))
            )

    def __contains__(self, action: Action) -> bool:
        stage, op, microbatch = action
        place = stage, self._route_of[microbatch]
        queue = self._queues[op][place]
        if not queue or queue[0] != microbatch or (op is Op.F and self._free[place] <= 0):
            return False
        for product, at in self._needs[stage][op]:  # noqa: SIM110  policies ask all the time, and all() takes longer
            if (product, at, microbatch) not in self._here:
                return False
        return True

    def __iter__(self) -> Iterator[Action]:
        """Every ready action; a backward is offered whole (B) and split (I)."""
        return (action for action in self.next_in_line() if action in self)

    def next_in_line(self) -> Collection[Action]:
        """For each stage and route, the next action of each op, ready or not."""
        return self._heads.values()

    def first(self, order: Sequence[Action]) -> Action | None:
        """The first of `order` that has not started; ask with one order only, since the search goes on where it was."""
        done, started = self._done, self._started
        while done < len(order) and order[done] in started:
            done += 1
        self._done = done
        return order[done] if done < len(order) else None

    def waits_for_messages(self, action: Action) -> bool:
        """Whether an action that is next of its kind lacks at most what other ranks have to send."""
        if action.op is Op.F and self._free[action.stage, self._route_of[action.microbatch]] <= 0:
            return False
        held = self._needs.keys()
        return all(
            (product, stage, action.microbatch) in self._here or (stage not in held)
            for product, stage in self._needs[action.stage][action.op]
        )

    def has(self, product: Product, stage: int, microbatch: int) -> bool:
        """Whether what that stage made of that micro-batch is here."""
        return (product, stage, microbatch) in self._here

    def _advance(self, place: tuple[int, int], ops: Iterable[Op]) -> None:
        for op in ops:
            if queue := self._queues[op][place]:
                self._heads[op, place] = Action(place[0], op, queue[0])
            else:
                self._heads.pop((op, place), None)

    def _add(self, product: Product, stage: int, microbatch: int) -> None:
        self._here.add((product, stage, microbatch))
        self._depth += (product, stage) in self._feeds

    @property
    def depth(self) -> int:
        """How many F and backwards have their input here and have not started, over this rank's stages.

        The first stage's inputs are not counted: they are all here from the start.
        """
        return self._depth

    def free_slots(self, stage: int, route: int) -> int:
        return self._free[stage, route]


_MOVES = ((Op.F,), (Op.I, Op.B, Op.W), (Op.W,), (Op.I, Op.B))  # by the op that starts, those whose next is another


def _feeds(schedule: Schedule, held: list[int]) -> frozenset[tuple[Product, int]]:
    """The products that an F or a backward of the held stages waits for."""
    last = schedule.num_stages - 1
    feeds = {(Product.OUTPUT, stage - 1) for stage in held}
    if not schedule.forward_only:
        feeds |= {(Product.GRADIENT, stage + 1) if stage < last else (Product.OUTPUT, stage) for stage in held}
    return frozenset(feeds)


def slots_of(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The most micro-batches that the schedule's own order has in flight on each (stage, route)."""
    level = dict.fromkeys(
        ((stage, route) for route in range(len(schedule.routes)) for stage in range(schedule.num_stages)), 0
    )
    peak = dict(level)
    for order in schedule.orders:
        for entry in order:
            # Both parts of an Overlap start before either ends.
            for stage, op, microbatch in parts(entry):
                if op is Op.F:
                    place = stage, schedule.route_of[microbatch]
                    level[place] += 1
                    peak[place] = max(peak[place], level[place])
            for stage, op, microbatch in parts(entry):
                if op in (Op.W, Op.B):
                    level[stage, schedule.route_of[microbatch]] -= 1
    return peak
