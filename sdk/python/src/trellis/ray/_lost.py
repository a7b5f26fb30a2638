"""What is said where a node has gone and its work is not done again."""

from __future__ import annotations

from typing import Optional

from .._errors import ConnectionLostError, NotRunningError, TrellisError
from .._faults import ProcessLostError, ShuttingDownError


class NodeLostError(TrellisError):
    """The node, its replica or its daemon has gone, and the work was not done again: why, and what is left of it.

    The caller may try the same once more (``is_retryable``), knowing that.
    """

    is_retryable = True

    def __init__(
        self,
        reason: str,
        *,
        kept: str = "",
        node: str = "",
        context: Optional[str] = None,
        n_delivered: int = 0,
    ) -> None:
        #: What has gone.
        self.reason = reason
        #: What is left of the work, in a sentence; empty where nothing is said of it.
        self.kept = kept
        #: The Ray id of the node; empty where that is not known.
        self.node = node
        #: The saved context that the work was about.
        self.context = context
        #: Pieces that the caller had been given.
        self.n_delivered = n_delivered
        super().__init__(f"{reason}; {kept}" if kept else reason)


def is_loss(error: TrellisError) -> bool:
    """Whether this says that the daemon is gone or about to go, and nothing against the work itself."""
    if isinstance(error, ConnectionLostError):
        return error.is_retryable
    return isinstance(error, (NotRunningError, ShuttingDownError, ProcessLostError, NodeLostError))
