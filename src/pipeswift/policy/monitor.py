"""What one rank knows of time: how long passes take here, and what its neighbours are doing.

Facts in, numbers out; no clock and no I/O. What neighbours tell arrives late or never, and nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isnan, log10, nan, sqrt
from typing import NamedTuple

from pipeswift.ir import Action, Op

SHORT, LONG = 5, 10  # passes in a window, where they last a tenth of a second and a second
GUESS = (nan, 1.0, 1.0, 2.0)  # by op: seconds for each second of the micro-batch's F, before the first pass


class Summary(NamedTuple):
    """What a rank tells when it starts an action. Times are on the teller's clock."""

    rank: int
    action: Action
    time: float
    until: float  # when it expects the action to end; nan while it cannot know
    swing: float  # the largest std/mean among its windows; nan while none is full
    depth: int  # F and I that have arrived and not started, over its stages


@dataclass(frozen=True)
class Calibration:
    """What a static run has shown. seconds: mean of (stage, op); swing: std/mean of each stage's passes."""

    seconds: Mapping[tuple[int, Op], float]
    swing: Mapping[int, float]


@dataclass(frozen=True)
class Alarm:
    """When swings count.

    A window swings above `threshold` (std/mean), and `windows` in a row must agree on a change. A stage whose swing in
    the calibration run is above `sensitive` counts as crowded from half the queue on (`Rules.crowd`).
    """

    threshold: float = 0.05
    windows: int = 3
    sensitive: float = 0.20


class Window:
    """The last few passes of one stage and op."""

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float]] = deque(maxlen=LONG)  # (its seconds, those of its micro-batch's F)
        self.mean = self.deviation = nan
        self.count = 0
        self._ratio = nan  # seconds for each second of the micro-batch's F
        self._follows_forward = False  # whether the F tells more than the mean

    def add(self, seconds: float, forward: float) -> None:
        passes = self._passes
        passes.append((seconds, forward))
        self.count += 1
        size = self.size
        while len(passes) > size:
            passes.popleft()
        n, total, forwards = len(passes), 0.0, 0.0
        for mine, first in passes:
            total += mine
            forwards += first
        self.mean = mean = total / n
        self.deviation = sqrt(sum((mine - mean) ** 2 for mine, _ in passes) / n)
        if forwards > 0.0:
            self._ratio = ratio = total / forwards
            self._follows_forward = sum(abs(mine - ratio * first) for mine, first in passes) <= sum(
                abs(mine - mean) for mine, _ in passes
            )

    @property
    def size(self) -> int:
        """How many passes the window spans: fewer of short ones, whose changes are sooner seen."""
        if isnan(self.mean):
            return LONG
        grown = SHORT + (LONG - SHORT) * (1.0 + log10(max(self.mean, 1e-9)))
        return max(SHORT, min(LONG, round(grown)))

    def expected(self, forward: float) -> float:
        """Seconds of the next pass, of a micro-batch whose F took `forward`, nan if unknown."""
        return self._ratio * forward if self._follows_forward and not isnan(forward) else self.mean


class Monitor:
    """The watch of one rank; a step's clock feeds it, and it outlives the step."""

    def __init__(self, rank: int, calibration: Calibration | None = None, alarm: Alarm = Alarm()):
        self.rank, self._alarm = rank, alarm
        self._known = calibration or Calibration({}, {})
        self._windows: dict[tuple[int, Op], Window] = {}
        self._forwards: dict[tuple[int, int], float] = {}  # seconds of F by (stage, micro-batch), of this step
        self._heard: dict[int, Summary] = {}
        self._depths: dict[int, deque[int]] = {}
        self._skew: dict[int, float] = {}  # our clock minus a teller's, from above
        self._agreeing = 0
        # Whether passes take what they always take, here and at the neighbours: in the calibration run, or in the last
        # step since; in this step so far; and now.
        self.steady = self._was_calm = calibration is not None and self._is_calm(calibration.swing.values())
        self._all_calm: bool | None = None  # None before the first pass
        self.unit = nan  # mean seconds of an F or a backward here

    def begin_step(self) -> None:
        """Micro-batches start anew; windows and what is known of neighbours' clocks stay."""
        if self._all_calm is not None:
            self._was_calm, self._all_calm = self._all_calm, None
        self._forwards.clear()
        self._heard.clear()

    def summary(self, action: Action, now: float, depth: int) -> Summary:
        """What to tell of an action that starts now."""
        return Summary(self.rank, action, now, now + self.expected(action), self.swing, depth)

    def ended(self, action: Action, seconds: float) -> None:
        """An action of this rank took so long."""
        stage, op, microbatch = action
        forward = seconds if op is Op.F else self._forwards.get((stage, microbatch), nan)
        if op is Op.F:
            self._forwards[stage, microbatch] = seconds
        if (window := self._windows.get((stage, op))) is None:
            window = self._windows[stage, op] = Window()
        window.add(seconds, forward)
        if op is not Op.W:
            means = [window.mean for (_, op), window in self._windows.items() if op is not Op.W]
            self.unit = sum(means) / len(means)
            self._settle()

    def hear(self, summary: Summary, now: float) -> None:
        """Another rank's summary, read now."""
        late = now - summary.time
        self._skew[summary.rank] = min(late, self._skew.get(summary.rank, late))
        self._heard[summary.rank] = summary
        self._depths.setdefault(summary.rank, deque(maxlen=self._alarm.windows)).append(summary.depth)

    def expected(self, action: Action) -> float:
        """Seconds that a pass of this rank will take; nan while nothing is known."""
        stage, op, microbatch = action
        forward = self._forwards.get((stage, microbatch), nan)
        if (window := self._windows.get((stage, op))) is not None:
            return window.expected(forward)
        return self._known.seconds.get((stage, op), GUESS[op] * forward)

    def end_of(self, rank: int, stage: int, ops: tuple[Op, ...], microbatch: int) -> float:
        """When `rank` will have done one of these passes, on our clock; inf unless it is known to have started it."""
        heard = self._heard.get(rank)
        if heard is None or heard.action.stage != stage or heard.action.microbatch != microbatch:
            return inf
        if heard.action.op not in ops or isnan(heard.until):
            return inf
        return heard.until + self._skew[rank]

    def depth(self, rank: int) -> int:
        """How much work has waited at another rank whenever it was heard of lately; 0 before."""
        return min(self._depths.get(rank, ()), default=0)

    @property
    def swing(self) -> float:
        """The largest std/mean among this rank's windows; nan while none is full."""
        return max((w.deviation / w.mean for w in self._windows.values() if w.count >= SHORT), default=nan)

    def _settle(self) -> None:
        """Leaves or enters the steady state when enough windows in a row say so."""
        swings = [summary.swing for summary in self._heard.values()] + [self.swing]
        calm_now = self._is_calm(swings)
        self._all_calm = calm_now and self._all_calm is not False
        calm = self._was_calm and calm_now  # a burst has calm moments; leaving the hint only in between pays less
        self._agreeing = 0 if calm is self.steady else self._agreeing + 1
        if self._agreeing >= self._alarm.windows:
            self.steady, self._agreeing = calm, 0

    def _is_calm(self, swings: Iterable[float]) -> bool:
        return not any(swing > self._alarm.threshold for swing in swings)
