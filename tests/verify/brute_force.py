"""A judge of schedules that knows nothing of the verifier: it tries every way in which the ranks may move."""

from __future__ import annotations

from collections import Counter

from pipeswift.ir import MAKES, Action, Op, Schedule, parts

Place = tuple[int, int | None]  # (entry, how many messages it has handed over; None before the entry has started)
Message = tuple[int, int, int]  # (sending stage, receiving stage, micro-batch)
State = tuple[tuple[Place, ...], frozenset[Message]]  # a place per rank; messages accepted and not yet taken


def accepts(schedule: Schedule, pool: int) -> bool:
    """Whether every rank does what it has to, in an order that adds up, and always comes to its end."""
    orders = [list(map(parts, order)) for order in schedule.orders]
    flat = [[action for entry in order for action in entry] for order in orders]
    return _complete(schedule, flat) and _ascending(schedule, flat) and _World(schedule, orders, pool).always_ends()


def _complete(schedule: Schedule, flat: list[list[Action]]) -> bool:
    done = Counter((rank, action) for rank, actions in enumerate(flat) for action in actions)
    for microbatch, route in enumerate(schedule.route_of):
        for stage, rank in enumerate(schedule.routes[route]):
            mine = {op: done.pop((rank, Action(stage, op, microbatch)), 0) for op in Op}
            if mine not in ({Op.F: 1, Op.I: 0, Op.W: 0, Op.B: 1}, {Op.F: 1, Op.I: 1, Op.W: 1, Op.B: 0}):
                return False
    return not done


def _ascending(schedule: Schedule, flat: list[list[Action]]) -> bool:
    lines: dict[object, list[int]] = {}
    for stage, op, microbatch in (action for actions in flat for action in actions):
        for product in MAKES[op]:
            lines.setdefault((stage, product, schedule.route_of[microbatch]), []).append(microbatch)
    return all(line == sorted(line) for line in lines.values())


class _World:
    def __init__(self, schedule: Schedule, orders: list[list[tuple[Action, ...]]], pool: int):
        self.schedule, self.orders, self.pool = schedule, orders, pool

    def always_ends(self) -> bool:
        """Search all states; the movers' turns must not matter for whether the end is reached."""
        todo: list[State] = [(((0, None),) * len(self.orders), frozenset())]
        seen, ends = set(todo), set[bool]()
        while todo:
            state = todo.pop()
            successors = {moved for rank in range(len(self.orders)) if (moved := self.move(state, rank))}
            if not successors:
                ends.add(all(entry == len(order) for (entry, _), order in zip(state[0], self.orders, strict=True)))
            todo += successors - seen
            seen.update(successors)
        assert len(ends) == 1, "the outcome depends on whose turn it is"
        return ends.pop()

    def move(self, state: State, rank: int) -> State | None:
        """The state after the next thing that `rank` does, None if it cannot do it."""
        places, inbox = state
        entry, sent = places[rank]
        if entry == len(self.orders[rank]):
            return None
        if sent is None:
            wanted = self.messages_in(rank, entry)
            if not wanted <= inbox or not self.own_inputs_there(rank, entry):
                return None
            return self.settle(places, inbox - wanted, rank, entry, 0)
        message = self.messages_out(rank, entry)[sent]
        if not self.room(places, inbox, message):
            return None
        return self.settle(places, inbox | {message}, rank, entry, sent + 1)

    def settle(self, places: tuple[Place, ...], inbox: frozenset[Message], rank: int, entry: int, sent: int) -> State:
        done = sent == len(self.messages_out(rank, entry))
        place: Place = (entry + 1, None) if done else (entry, sent)
        return (*places[:rank], place, *places[rank + 1 :]), inbox

    def room(self, places: tuple[Place, ...], inbox: frozenset[Message], message: Message) -> bool:
        source_stage, stage, microbatch = message
        route = self.schedule.route_of[microbatch]
        if self.pool:
            same = [i for a, b, i in inbox if (a, b) == (source_stage, stage) and self.schedule.route_of[i] == route]
            return len(same) < self.pool
        receiver = self.schedule.routes[route][stage]
        entry, sent = places[receiver]
        at_the_door = sent is None and entry < len(self.orders[receiver])
        return at_the_door and message in self.messages_in(receiver, entry)

    def messages_in(self, rank: int, entry: int) -> set[Message]:
        """What the parts of the entry take from other ranks."""
        found = set()
        for stage, op, i in self.orders[rank][entry]:
            source = {Op.F: stage - 1, Op.I: stage + 1, Op.B: stage + 1, Op.W: None}[op]
            if source is not None and self.elsewhere(source, i, rank):
                found.add((source, stage, i))
        return found

    def messages_out(self, rank: int, entry: int) -> list[Message]:
        found = []
        for stage, op, i in self.orders[rank][entry]:
            target = {Op.F: stage + 1, Op.I: stage - 1, Op.B: stage - 1, Op.W: None}[op]
            if target is not None and self.elsewhere(target, i, rank):
                found.append((stage, target, i))
        return found

    def elsewhere(self, stage: int, microbatch: int, rank: int) -> bool:
        route = self.schedule.routes[self.schedule.route_of[microbatch]]
        return 0 <= stage < len(route) and route[stage] != rank

    def own_inputs_there(self, rank: int, entry: int) -> bool:
        ran = {action for earlier in self.orders[rank][:entry] for action in earlier}
        return all(self.own_input_there(ran, action, rank) for action in self.orders[rank][entry])

    def own_input_there(self, ran: set[Action], action: Action, rank: int) -> bool:
        stage, op, i = action
        route = self.schedule.routes[self.schedule.route_of[i]]
        if op is Op.F:
            return stage == 0 or route[stage - 1] != rank or Action(stage - 1, Op.F, i) in ran
        if op is Op.W:
            return Action(stage, Op.I, i) in ran
        from_above = stage + 1 == len(route) or route[stage + 1] != rank
        gradient = from_above or not ran.isdisjoint({Action(stage + 1, Op.I, i), Action(stage + 1, Op.B, i)})
        return gradient and Action(stage, Op.F, i) in ran
