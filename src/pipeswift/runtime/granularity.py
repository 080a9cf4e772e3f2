"""How the experts of a pipeline's stages are cut: as it was set, or as measurement after the first step suggests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeswift.ir import Action, Op, Schedule
from pipeswift.program import BlockCosts, Grain, choose, compile_action
from pipeswift.runtime.lanes import Lanes
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.stage import Stage


class Granularity:
    """Of one pipeline. Every rank must make one, at the same time.

    wanted: the grain of all stages; None: to be found. due: whether it is yet to be. grains: as it is now, by stage, of
    all stages of the pipeline that share out experts.
    """

    def __init__(self, peers: Peers, stages: Mapping[int, Stage], schedule: Schedule, wanted: Grain | None):
        self._peers, self._schedule = peers, schedule
        self._stages = {index: stage for index, stage in stages.items() if stage.exchanges}
        shared_out = peers.replicas.experts.size > 1
        self.due = shared_out and wanted is None
        self.grains = self._everyone() if shared_out else {}

    def measure(self, lanes: Lanes, moved: Callable[[], None]) -> None:
        """Finds the grain of every stage, between steps, by loads that have been seen. Every rank must call this.

        moved: called after each layer, for whoever watches.
        """
        for stage in self._stages.values():
            mine = []
            for exchange in stage.exchanges:
                mine.append(exchange.measure(lanes))
                moved()
            everyone = self._peers.replicas.experts.all_gather(mine)
            costs = BlockCosts.mean([cost for theirs in everyone for cost in theirs])
            stage.regroup(_chosen(stage, costs, self._schedule.splits_backward))
        self.due, self.grains = False, self._everyone()

    def info(self) -> dict[str, object]:
        """For a trace."""
        return {
            f"chunks of experts, stage {index}": f"{grain.forward} forward, {grain.backward} backward"
            for index, grain in self.grains.items()
        }

    def _everyone(self) -> dict[int, Grain]:
        found: dict[int, Grain] = {}
        for theirs in self._peers.all_gather({index: stage.grain for index, stage in self._stages.items()}):
            found |= theirs
        return dict(sorted(found.items()))


def _chosen(stage: Stage, costs: BlockCosts, splits_backward: bool) -> Grain:
    """The same on all ranks that share out experts, since they have the same costs."""
    most = min(exchange.most for exchange in stage.exchanges)

    def chunks(op: Op) -> int:
        whole = compile_action(Action(stage.index, op, 0), layout=stage.forms, takes=False, sends=False)
        return choose(whole, costs, most=most).chunks

    return Grain(chunks(Op.F), chunks(Op.I if splits_backward else Op.B), costs)
