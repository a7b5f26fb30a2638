"""A Ray cluster of two nodes on this machine, each with a daemon of its own, beside a head that has none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from conftest import GUESTS, Daemon
from ray import serve
from ray.cluster_utils import Cluster as Local

#: A node that was started with this has a daemon.
RESOURCE = {"trellis": 1}


class Nodes:
    """The cluster, and the daemon of each of its nodes by the node's Ray id."""

    def __init__(self) -> None:
        self.daemons: dict[str, Daemon] = {}
        self._nodes: dict[str, Any] = {}
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            #: Where the head's proxy listens, at 127.0.0.1.
            self.port: int = bound.getsockname()[1]

    def start(self, n_nodes: int) -> None:
        """Starts them, and Ray Serve."""
        # Telemetry has no place in a test.
        os.environ.update(
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
            # A busy machine starts a process slowly.
            RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="120",
            RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S="120",
        )
        # A node that is killed is seen to be within seconds, and not within half a minute.
        system = {
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 5000,
            "health_check_failure_threshold": 3,
        }
        head = {"num_cpus": 4, "include_dashboard": False, "_system_config": system}
        self._local = Local(initialize_head=True, head_node_args=head)
        for _ in range(n_nodes):
            daemon = Daemon(GUESTS)
            node = self._local.add_node(
                num_cpus=2, resources=RESOURCE, env_vars={"TRELLIS_SOCKET": str(daemon.socket)}
            )
            self.daemons[node.node_id] = daemon
            self._nodes[node.node_id] = node
        ray.init(address=self._local.address, log_to_driver=False, logging_level="ERROR")
        try:
            serve.start(http_options={"location": "HeadOnly", "port": self.port})
        except TimeoutError:
            # Ray has given its proxy a minute, on a busy machine; it goes on with it.
            serve.start()

    def kill(self, node_id: str) -> None:
        """Ends a node and its daemon, without a word."""
        self.daemons[node_id].kill()
        self._local.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def close(self) -> None:
        """Ends everything."""
        serve.shutdown()
        ray.shutdown()
        self._local.shutdown()
        for daemon in self.daemons.values():
            daemon.close()


@contextmanager
def cluster(n_nodes: int = 2) -> Iterator[Nodes]:
    """A cluster for as long as this lasts."""
    nodes = Nodes()
    try:
        nodes.start(n_nodes)
        yield nodes
    finally:
        nodes.close()
