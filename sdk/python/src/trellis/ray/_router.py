"""To which replica, and with that to which node's daemon, a call goes."""

from __future__ import annotations

from typing import Any, Optional

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ._placement import Call, Placement, call_of


class TrellisRouter(RequestRouter):
    """Routes by named context, and else by the beginning of the text, and else to the least loaded node.

    A call about a named context goes to the node that has it, and waits for room there. This router knows that of the calls that it
    has sent, and of others by what replicas tell Ray (`record_routing_stats`), once a second. Any other call goes to the node that
    knows most of its beginning, in blocks of 64 characters, unless that has over ``n_calls_uneven`` more calls under way than
    another; or else to the node with the fewest.

    Ray's own `PrefixCacheAffinityRouter` is not built on: its prefixes are in an actor on any one of the nodes, and when that is lost
    no call is routed any more; and calls that come at once all go to one node, as it counts them only once they are under way.
    """

    def initialize_state(self, n_calls_uneven: int = 8) -> None:
        """What ``request_router_kwargs`` may have: how uneven the load may become for the sake of prefixes."""
        self._placement = Placement(n_calls_uneven)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: Optional[PendingRequest] = None
    ) -> list[list[RunningReplica]]:
        """The replicas that may take the call, the best first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        by_node = {replica.node_id: replica for replica in candidate_replicas}
        queues = self.replica_queue_len_cache
        loads = {node: queues.get(replica.replica_id) or 0 for node, replica in by_node.items()}
        held = {node: replica.routing_stats.get("contexts", ()) for node, replica in by_node.items()}
        nodes = self._placement.choose(_call(pending_request), loads, held)
        return [[by_node[node]] for node in nodes]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers where a call went."""
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._placement.sent(_call(pending_request), replica.node_id)


def _call(pending_request: PendingRequest) -> Call:
    metadata = pending_request.metadata
    arguments = (*pending_request.args, *pending_request.kwargs.values())
    return call_of(metadata.internal_request_id, arguments, metadata.session_id)
