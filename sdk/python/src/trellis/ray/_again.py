"""Work whose node is lost is done again on another one, where nobody can tell the difference. Needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Callable, Generic, Optional, TypeVar

from ._lost import NodeLostError
from ._work import Said

T = TypeVar("T")

#: The pause before the second try, in seconds; each further one is twice as long. Ray needs a moment to see that a node is gone.
PAUSE_S = 0.25


@dataclass(frozen=True)
class Terms:
    """When work is done again."""

    #: How often it is tried.
    n_tries: int
    #: Whether a try leaves nothing behind that a second one would find.
    is_repeatable: bool
    #: The saved context that it is about.
    context: Optional[str] = None


async def tried(
    attempt: Callable[[tuple[str, ...]], AsyncIterator[T]],
    terms: Terms,
    loss_of: Callable[[Exception], Optional[NodeLostError]],
    resumed: Optional[Callable[[], Resuming[T]]] = None,
) -> AsyncGenerator[T, None]:
    """The items of an attempt, and where its node is lost those of the next, which is given the nodes to be avoided.

    An attempt of which the caller was given something is followed by another only where ``resumed`` says what of the next one it has
    had. `NodeLostError`: the work is not done again, and why.
    """
    avoiding: tuple[str, ...] = ()
    n_delivered, pause = 0, PAUSE_S
    passing = resumed() if resumed is not None else None
    for number in range(1, terms.n_tries + 1):
        if passing is not None:
            passing.begin()
        try:
            async with aclosing(_generator(attempt(avoiding))) as items:
                async for item in items:
                    left = item if passing is None else passing.pass_on(item)
                    if left is not None:
                        n_delivered += 1
                        yield left
            return
        except DiffersError as error:
            error.context, error.n_delivered = terms.context, n_delivered
            raise
        except Exception as error:
            loss = loss_of(error)
            if loss is None:
                raise
            why = _why_not(terms, number, n_delivered, passing is not None)
            if why is not None:
                raise NodeLostError(
                    loss.reason,
                    kept=why,
                    node=loss.node,
                    context=terms.context,
                    n_delivered=n_delivered,
                ) from error
            if loss.node:
                avoiding = (*avoiding, loss.node)
        await asyncio.sleep(pause)
        pause *= 2


def _why_not(terms: Terms, n_tried: int, n_delivered: int, is_resumable: bool) -> Optional[str]:
    """Why the work is not done once more; `None` where it is."""
    if not terms.is_repeatable:
        return (
            f"it may have saved {terms.context!r} before, or not: what that node has on disk is there when it comes back, "
            "and no other node has it"
        )
    if n_delivered > 0 and not is_resumable:
        return f"{n_delivered} pieces had been delivered, and stay valid; nothing was saved"
    if n_tried >= terms.n_tries:
        return f"this was the last of {terms.n_tries} tries; nothing was saved under a name that another try would need"
    return None


class Resuming(Generic[T]):
    """What of an attempt the caller has had from those before it."""

    def begin(self) -> None:
        """Another attempt begins."""
        raise NotImplementedError

    def pass_on(self, item: T) -> Optional[T]:
        """What is new in an item; `NodeLostError` where the attempt says something else than those before."""
        raise NotImplementedError


class SaidBefore(Resuming[Said]):
    """The text of an answer that the caller has: a second answer has to begin with it, and is passed on from there."""

    def __init__(self) -> None:
        self._delivered = ""
        self._n_met = 0

    def begin(self) -> None:
        """Another attempt begins."""
        self._n_met = 0

    def pass_on(self, item: Said) -> Optional[Said]:
        """What is new in a piece."""
        due = self._delivered[self._n_met :]
        met = min(len(due), len(item.text))
        if item.text[:met] != due[:met] or (due[met:] and item.answered is not None):
            raise DiffersError(self._delivered)
        self._n_met += met
        new = item.text[met:]
        if not new and item.answered is None:
            return None
        self._delivered += new
        self._n_met += len(new)
        return replace(item, text=new)


class DiffersError(NodeLostError):
    """A node was lost in the middle of an answer, and another one answers differently: the machines compute differently."""

    def __init__(self, delivered: str) -> None:
        super().__init__(
            "another node does not say the same",
            kept=f"the {len(delivered)} characters that had been delivered stay valid",
        )


async def _generator(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """An iterator that can be closed."""
    try:
        async for item in items:
            yield item
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
