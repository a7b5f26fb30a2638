"""The deployment, and a handle to it that tries again."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Optional

from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError

from .._errors import TrellisError
from .._events import Event
from .._reading import Output
from ._again import SaidBefore, Terms, tried
from ._lost import NodeLostError
from ._options import deployment_options
from ._server import TrellisServer
from ._work import Chat, Run, Said

#: How often work is tried, on nodes that are lost one after the other.
N_TRIES = 6

#: How Ray says that a replica is gone, or what it had answered.
_LOSSES = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError)


def deployment(
    *,
    socket: Optional[str] = None,
    model: Optional[str] = None,
    timeout: float = 60.0,
    **options: Any,
) -> Any:
    """The application for ``serve.run``: one replica a node, next to that node's daemon.

    ``socket``, ``model`` and ``timeout`` are those of `TrellisServer`, the options those of ``serve.deployment``. Ray has to be
    connected already. ``ray_actor_options={"resources": {"trellis": 1}}`` keeps it to the nodes that were started with that resource.
    """
    made = serve.deployment(TrellisServer, name="trellis", **deployment_options(options))
    return made.bind(socket=socket, model=model, timeout=timeout)


class Cluster:
    """Calls of a deployment, as ``serve.run`` returns its handle, that are tried again where that is safe.

    Work whose node is lost is done again, up to ``n_tries`` times in all, where the caller can tell no difference: a run about no
    saved context of which nothing was delivered; and a chat, whose messages are all that was said: where a part of its answer was
    delivered, the next node has to answer with the same characters first. All else ends with `NodeLostError`. What a guest itself
    ended with is the error that the client of the daemon would raise, and is not tried again.
    """

    def __init__(self, handle: Any, *, n_tries: int = N_TRIES) -> None:
        self._handle = handle
        self._n_tries = n_tries

    async def run(self, work: Run) -> Output:
        """Runs a guest to its end, and collects what it sends."""
        work = _seeded_run(work)

        async def once(avoiding: tuple[str, ...]) -> AsyncGenerator[Output, None]:
            yield await self._handle.run.remote(replace(work, avoiding=avoiding))

        async with aclosing(tried(once, self._terms(work.context, work.context is None), loss_of)) as outputs:
            async for output in outputs:
                return output
        raise NodeLostError("the replica answered nothing", context=work.context)

    async def stream(self, work: Run) -> AsyncGenerator[Event, None]:
        """What a guest sends, as it comes. The guest is stopped where the loop is left."""
        work = _seeded_run(work)

        def once(avoiding: tuple[str, ...]) -> AsyncIterator[Event]:
            return _streamed(self._handle.stream, replace(work, avoiding=avoiding))

        async with aclosing(tried(once, self._terms(work.context, work.context is None), loss_of)) as events:
            async for event in events:
                yield event

    async def say(self, chat: Chat) -> AsyncGenerator[Said, None]:
        """The answer to a chat, piece by piece; the last piece says how it ended, and where."""
        chat = chat if chat.seed is not None else replace(chat, seed=drawn_seed())

        def once(avoiding: tuple[str, ...]) -> AsyncIterator[Said]:
            return _streamed(self._handle.say, replace(chat, avoiding=avoiding))

        terms = self._terms(chat.context, True)
        async with aclosing(tried(once, terms, loss_of, SaidBefore)) as pieces:
            async for piece in pieces:
                yield piece

    def _terms(self, context: Optional[str], is_repeatable: bool) -> Terms:
        return Terms(self._n_tries, is_repeatable, context)


def loss_of(error: Exception) -> Optional[NodeLostError]:
    """What was lost, where an error of Ray says that; what the replica itself raised is raised here where it is something else."""
    told: Any = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(told, NodeLostError):
        return told
    if isinstance(told, _LOSSES):
        return NodeLostError(f"a replica is lost: {str(told).strip().splitlines()[0]}")
    if isinstance(told, TrellisError):
        raise told from None
    return None


async def _streamed(method: Any, work: Any) -> AsyncGenerator[Any, None]:
    """The items of a streaming call; the replica is told where they are not wanted any more."""
    response = method.options(stream=True).remote(work)
    is_whole = False
    try:
        async for item in response:
            yield item
        is_whole = True
    finally:
        if not is_whole:
            response.cancel()


def _seeded_run(work: Run) -> Run:
    if work.options.get("seed") is not None:
        return work
    options = work.options.copy()
    options["seed"] = drawn_seed()
    return replace(work, options=options)


def drawn_seed() -> int:
    """A seed for work that was given none."""
    return random.SystemRandom().getrandbits(64)
