"""What a rank's policy gets to see and tells of in a step: its monitor, its neighbours' news, and a diary."""

from __future__ import annotations

import numpy as np

from pipeswift.ir import Action
from pipeswift.policy import Decision, Monitor
from pipeswift.policy.diary import Diary
from pipeswift.runtime.news import News
from pipeswift.runtime.recorder import clock
from pipeswift.trace import Counter

MESSAGES = "control messages"


class Lookout:
    """The eyes of one rank; lives as long as its monitor, over many steps."""

    def __init__(self, monitor: Monitor, news: News):
        self.monitor, self._news = monitor, news
        self._diary = Diary(monitor.rank)
        self._ended: tuple[Action, float] | None = None  # what the monitor has yet to be told

    def begin_step(self) -> None:
        self._take_in()  # before the monitor forgets what the last pass's micro-batch took forward
        self._news.step += 1
        self._news.sent = 0
        self.monitor.begin_step()
        self._diary = Diary(self.monitor.rank)

    def look(self, now: float) -> None:
        """Takes in what has ended here and what has come from neighbours; never waits."""
        self._take_in()
        for summary in self._news.heard():
            self.monitor.hear(summary, now)

    def note(self, now: float, decision: Decision, depth: int) -> None:
        self._diary.note(now, decision.rule, depth)

    def begin(self, action: Action, now: float, depth: int) -> None:
        """The rank starts an action, and sends word of it."""
        self.look(clock())
        self._news.tell(self.monitor.summary(action, now, depth))

    def end(self, action: Action, seconds: float) -> None:
        """An action is over. The next look takes it in, since now the next one could start."""
        self._ended = action, seconds

    def counters(self, now: float) -> tuple[Counter, ...]:
        """What was decided in this step, and how many messages told of it."""
        sent = Counter(MESSAGES, self.monitor.rank, np.array([now]), np.array([self._news.sent]))
        return *self._diary.counters(), sent

    def _take_in(self) -> None:
        if self._ended is not None:
            self.monitor.ended(*self._ended)
            self._ended = None
