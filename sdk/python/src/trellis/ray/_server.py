"""A replica: what stands on a node between Ray Serve and the node's daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Optional

import ray

from .._async import AsyncClient
from .._errors import TrellisError
from .._events import Event
from .._guest import AsyncGuest
from .._info import DaemonInfo
from .._reading import Output
from ._chat import answer
from ._llm import LlmMethods
from ._lost import NodeLostError, is_loss
from ._options import deployment_options
from ._work import Chat, Run, Said

#: How many names of saved contexts a replica tells the routers of: the newest.
N_CONTEXTS_MAX = 4_096

#: Seconds within which a daemon that is well says so.
HEALTH_S = 5.0


class TrellisServer(LlmMethods):
    """Runs guests and answers chats by the daemon of its node; the daemon has the devices, so that a replica asks Ray for none.

    The daemon is that of ``socket``, or else of ``TRELLIS_SOCKET`` as the node's Ray was started with it, or else that of the user
    that Ray runs as, or the machine's. Replicas are made by Ray: `trellis.ray.deployment` binds this class, and an `LLMConfig` of
    ``ray.serve.llm`` takes it as its ``server_cls``, where ``engine_kwargs`` may have ``socket``, ``model`` (the daemon's name of it;
    its default otherwise) and ``timeout``.
    """

    def __init__(
        self,
        llm_config: Any = None,
        *,
        socket: Optional[str] = None,
        model: Optional[str] = None,
        timeout: float = 60.0,
    ) -> None:
        told: dict[str, Any] = {"socket": socket, "model": model, "timeout": timeout}
        if llm_config is not None:
            unknown = set(llm_config.engine_kwargs) - set(told)
            if unknown:
                raise TypeError(f"engine_kwargs of a Trellis server has no {sorted(unknown)[0]!r}")
            told.update(llm_config.engine_kwargs)
        self._llm_config = llm_config
        self._socket: Optional[str] = told["socket"]
        self._model: Optional[str] = told["model"]
        self._timeout: float = told["timeout"]
        self._node: str = ray.get_runtime_context().get_node_id()
        self._client: Optional[AsyncClient] = None
        self._connecting = asyncio.Lock()
        # In the order in which they were asked for last.
        self._contexts: dict[str, None] = {}

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """How ``ray.serve.llm`` deploys it."""
        return deployment_options(dict(llm_config.deployment_config), llm_config.runtime_env)

    async def start(self) -> None:
        """Connects to the daemon. Calls do so as well."""
        await self._connected()

    async def check_health(self) -> None:
        """Whether the node's daemon answers: `NodeLostError` where it does not, and Ray starts the replica again."""
        with self._losses():
            client = await self._connected()
            info: DaemonInfo = await client.info(timeout=HEALTH_S)
        if info.failure is not None:
            raise NodeLostError(
                f"the daemon of node {self._node} has failed: {info.failure}", node=self._node
            )

    def record_routing_stats(self) -> dict[str, list[str]]:
        """The contexts that this node has, for routers that have not sent them here themselves. Ray asks once a second."""
        return {"contexts": list(self._contexts)}

    async def run(self, work: Run) -> Output:
        """Runs a guest to its end, and collects what it sends."""
        with self._losses():
            client = await self._connected()
            async with self._started(client, work) as guest:
                sending = asyncio.ensure_future(_send(guest, work))
                try:
                    return await guest.collect()
                finally:
                    sending.cancel()

    async def stream(self, work: Run) -> AsyncGenerator[Event, None]:
        """What a guest sends, as it comes. The guest is stopped where the caller leaves."""
        with self._losses():
            client = await self._connected()
            async with self._started(client, work) as guest:
                sending = asyncio.ensure_future(_send(guest, work))
                try:
                    async for event in guest:
                        yield event
                finally:
                    sending.cancel()

    async def say(self, chat: Chat) -> AsyncGenerator[Said, None]:
        """The answer to a chat, piece by piece."""
        chat.model = chat.model or self._model
        self._holds(chat.context)
        with self._losses():
            async with aclosing(answer(await self._connected(), chat, self._node)) as pieces:
                async for piece in pieces:
                    yield piece

    def _started(self, client: AsyncClient, work: Run) -> AsyncGuest:
        self._holds(work.context)
        options = work.options.copy()
        if self._model is not None:
            options.setdefault("model", self._model)
        return client.start(work.program, *work.arguments, **options)

    def _holds(self, context: Optional[str]) -> None:
        if context is not None:
            self._contexts.pop(context, None)
            self._contexts[context] = None
            if len(self._contexts) > N_CONTEXTS_MAX:
                del self._contexts[next(iter(self._contexts))]

    async def _connected(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                self._client = await AsyncClient.connect(self._socket, timeout=self._timeout)
            return self._client

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Says that the daemon is lost so that the caller knows which node to avoid; the next call connects anew."""
        try:
            yield
        except TrellisError as error:
            if not is_loss(error) or isinstance(error, NodeLostError):
                raise
            client, self._client = self._client, None
            if client is not None:
                client.close()
            raise NodeLostError(
                f"the daemon of node {self._node} is lost: {error}", node=self._node
            ) from error


async def _send(guest: AsyncGuest, work: Run) -> None:
    """Puts the messages of a run into the guest's inbox, beside what reads it, and ends them."""
    try:
        await guest.send_lines(work.messages_to_guest, timeout=None)
    except TrellisError:
        # A guest that has ended takes no more; what ended it is read by who reads it.
        return
