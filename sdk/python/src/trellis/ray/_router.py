"""To which replica, and with that to which node's daemon, a call goes."""

from __future__ import annotations

import time
from typing import Any, Optional

import ray
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from ._holders import Holders, avoided_by, context_of, without


class TrellisRouter(PrefixCacheAffinityRouter):
    """Routes by named context, and else as Ray's `PrefixCacheAffinityRouter` does.

    A call about a named context goes to the node that the last one about it went to, for as long as that has a replica, and waits
    for room there. Any other goes to the node that knows the longest beginning of its text; where none knows a tenth of it, to the
    one that was sent the least text; and where one node has over ``imbalanced_threshold`` calls more than another, to the less
    loaded of two.

    It is imported from where it is defined in Ray: its public name comes with ``ray.serve.llm``, which needs more than
    ``ray[serve]``.
    """

    def initialize_state(self, imbalanced_threshold: float = 8, **state: Any) -> None:
        """As Ray's, with a bound on how uneven the load may become for the sake of prefixes."""
        super().initialize_state(imbalanced_threshold=imbalanced_threshold, **state)
        self._holders = Holders()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: Optional[PendingRequest] = None
    ) -> list[list[RunningReplica]]:
        """The replicas that may take the call."""
        if pending_request is None:
            ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, None)
            return ranks
        arguments = (*pending_request.args, *pending_request.kwargs.values())
        allowed = without(candidate_replicas, avoided_by(arguments))
        context = context_of(arguments, pending_request.metadata.session_id)
        if context is not None:
            holding = await self._holding(context, allowed)
            if holding:
                return [holding]
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        among = {replica.replica_id for replica in allowed}
        chosen = [[replica for replica in rank if replica.replica_id in among] for rank in ranks]
        return [rank for rank in chosen if rank] or [allowed]

    async def _holding(self, context: str, among: list[RunningReplica]) -> list[RunningReplica]:
        """The replica of the node that the context was sent to, by this router or by another one."""
        node = self._holders.node_of(context)
        if node is not None:
            return [replica for replica in among if replica.node_id == node]
        ids = {replica.replica_id.to_full_id_str(): replica for replica in among}
        key = _key(context)
        found, owners = await self._tree_actor.prefix_match.remote(key, list(ids))
        return [ids[owner] for owner in owners or () if owner in ids] if found == key else []

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers where a call went, for this router and, in the actor that Ray has for prefixes, for all others."""
        super().on_request_routed(pending_request, replica_id, result)
        arguments = (*pending_request.args, *pending_request.kwargs.values())
        context = context_of(arguments, pending_request.metadata.session_id)
        replica = self.curr_replicas.get(replica_id)
        if context is None or replica is None or self._holders.node_of(context) == replica.node_id:
            return
        self._holders.hold(context, replica.node_id)
        ray.get(self._tree_actor.insert.remote(_key(context), replica_id.to_full_id_str(), time.time()))


def _key(context: str) -> str:
    """A name among the texts of the prefix tree; begins with what no text for a model begins with."""
    return f"\0{context}\0"
