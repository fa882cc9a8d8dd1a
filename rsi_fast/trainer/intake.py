"""What a round learns from: gives the collector its orders, and takes the trajectories that are due.

Rank 0 decides and all ranks read. At max_staleness 0 a round is one order, whole. Else orders are given ahead, and a
round takes the first finished trajectories, so that neither training nor collection waits for the slowest attempt.
"""

import torch.distributed as dist

from rsi_fast.config import Config, Stage
from rsi_fast.spool import Order, Spool
from rsi_fast.trainer import rollouts
from rsi_fast.trainer.checkpoint import State
from rsi_fast.trainer.ledger import Ledger, Round


class Intake:
    def __init__(self, config: Config, task_names: list[str], offline: bool):
        self.config, self.task_names, self.offline = config, task_names, offline
        self.spool = Spool(config.run.dir)
        self.ledger = Ledger(config.run.dir)

    def take(self, state: State, stage: Stage) -> Round:
        """The round that `state` is at. A collective. Raises UserError when it lacks trajectories."""
        name = rollouts.order_name(state.stage + 1, stage.label, state.round)
        if self.offline:
            taken = Round.of({f"{name}/{i:05d}": t for i, t in enumerate(rollouts.read_from(self.spool, name))})
        else:
            chosen: list = [None]
            if dist.get_rank() == 0:
                limits = self.config.rollout
                taken = self.ledger.take(
                    self._orders(state, stage),
                    stage.attempts,
                    state.weight_version,
                    limits.max_staleness,
                    limits.round_timeout_s,
                )
                chosen = [(list(taken.trajectories), taken.dropped)]
            dist.broadcast_object_list(chosen, src=0)
            if dist.get_rank():
                ids, dropped = chosen[0]
                taken = Round({i: self.spool.read_one(i) for i in ids}, dropped)
        if dist.get_rank() == 0:
            self.ledger.record(name, taken)
        return taken

    def _orders(self, state: State, stage: Stage) -> list[Order]:
        """The stage's, up to this round's and as many ahead as may be stale, given where they are not yet."""
        ahead = self.config.rollout.max_staleness
        orders = []
        for round_ in range(min(state.round + ahead, stage.rounds - 1) + 1):
            order = self.spool.find_order(rollouts.order_name(state.stage + 1, stage.label, round_))
            # Without lookahead a resumed run must ask for what the first start did, and give_order makes sure of it.
            if order is None or (round_ == state.round and not ahead):
                order = self._next_order(state, stage, round_)
                self.spool.give_order(order)
            orders.append(order)
        return orders

    def _next_order(self, state: State, stage: Stage, round_: int) -> Order:
        start = history = None
        if self.config.curriculum.attempts:
            name = rollouts.order_name(state.stage + 1, stage.label, round_)
            start, history = self.spool.next_draw(before=name), self.ledger.history()
        return rollouts.training_order(
            self.config, state.stage + 1, round_, self.task_names, state.weight_version, start, history
        )

    def resume(self, state: State) -> None:
        """Rounds that come again are not in the ledger. Of rank 0."""
        if state.stage < len(self.config.stages):
            label = self.config.stages[state.stage].label
            self.ledger.remove_from(rollouts.order_name(state.stage + 1, label, state.round))

    def close(self, state: State, stage: Stage) -> None:
        """The stage is over; attempts that no round took are dropped. Of rank 0."""
        names = [rollouts.order_name(state.stage + 1, stage.label, i) for i in range(stage.rounds)]
        orders = [order for name in names if (order := self.spool.find_order(name))]
        self.ledger.close(names[state.round - 1], orders)
