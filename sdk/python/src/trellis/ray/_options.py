"""How Ray Serve deploys the replicas: one a node, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import ray
from ray.serve.config import RequestRouterConfig

#: Calls that a replica has under way at most, where nothing else is said; more wait.
N_CALLS_MAX = 256


def deployment_options(
    chosen: Mapping[str, Any], runtime_env: Optional[dict[str, Any]] = None
) -> dict[str, Any]:
    """The options of ``serve.deployment``, where those that were chosen stand over these.

    Without ``num_replicas`` and ``autoscaling_config`` there is one replica for each node that is alive now and has the resources
    that ``ray_actor_options`` ask for. `ValueError`: several replicas a node, which would share one daemon.
    """
    if chosen.get("max_replicas_per_node", 1) != 1:
        raise ValueError("max_replicas_per_node is 1: a node has one daemon, which has all its devices")
    options: dict[str, Any] = {
        "max_ongoing_requests": N_CALLS_MAX,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "request_router_config": RequestRouterConfig(
            request_router_class="trellis.ray.TrellisRouter", request_routing_stats_period_s=1.0
        ),
        **chosen,
        "max_replicas_per_node": 1,
    }
    # The replica waits for the daemon and computes nothing.
    actor = {"num_cpus": 0, "num_gpus": 0, **(chosen.get("ray_actor_options") or {})}
    if runtime_env:
        actor["runtime_env"] = {**runtime_env, **actor.get("runtime_env", {})}
    options["ray_actor_options"] = actor
    if "num_replicas" not in options and "autoscaling_config" not in options:
        options["num_replicas"] = _n_nodes(actor.get("resources") or {})
    return options


def _n_nodes(resources: Mapping[str, float]) -> int:
    """Nodes that are alive and have all of these resources; at least 1, so that the deployment says what it waits for."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [has for has in nodes if all(has.get(name, 0) >= amount for name, amount in resources.items())]
    return max(len(fitting), 1)
