"""What a cluster is asked for. The first argument of every call, so that the router can read it; needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from .._program import ProgramLike, StartOptions, program_of


@dataclass
class Run:
    """A guest to be run on some node.

    A component's file is read where this is made, and travels with it; a name means a program that the daemons have registered.
    """

    program: ProgramLike
    arguments: tuple[str, ...] = ()
    #: Messages for its inbox, in this order; none come after them.
    messages_to_guest: tuple[str, ...] = ()
    #: The name of the saved context that it opens or saves: it runs on the node that holds it.
    context: Optional[str] = None
    #: As :class:`trellis.StartOptions`. Without a ``seed``, one is drawn by the caller, so that a second try draws the same.
    options: StartOptions = field(default_factory=lambda: StartOptions())
    #: Nodes that it is not to run on, by their Ray ids, as long as there are others.
    avoiding: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.arguments = tuple(self.arguments)
        self.messages_to_guest = tuple(self.messages_to_guest)
        self.program = program_of(self.program)

    @property
    def prompt(self) -> str:
        """What Ray's prefix-aware router compares."""
        program = program_of(self.program)
        name = program.name or program.label or ""
        return "\n".join((name, *self.arguments, *self.messages_to_guest))


@dataclass
class Chat:
    """A conversation to be answered. Its messages are all that was said, so that any node can go on with it."""

    #: Each with a ``role`` and a ``content``, both texts; the last is what is answered.
    messages: list[dict[str, str]]
    #: The name under which the node keeps what it has computed for the next answer; that one goes to the same node then.
    context: Optional[str] = None
    #: 0 takes the most probable token.
    temperature: float = 0.0
    top_p: Optional[float] = None
    top_k: Optional[int] = None
    #: From 0 to 2^64 - 1. Without one, it is drawn by the caller, so that a second try draws the same.
    seed: Optional[int] = None
    #: The most tokens of the answer.
    max_tokens: Optional[int] = None
    #: The daemon's name of the model; its default otherwise.
    model: Optional[str] = None
    #: Nodes that it is not to be answered on, by their Ray ids, as long as there are others.
    avoiding: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """What the guest `conversation` is told of the answer."""
        told = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
        }
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True)
class Answered:
    """How an answer ended."""

    #: ``complete``; ``full`` at its most tokens; ``stopped`` where its daemon was about to end.
    ending: str
    n_prompt_tokens: int
    #: Those of them that had been computed before, for the saved context or another conversation with the same beginning.
    n_cached_tokens: int
    n_tokens: int
    #: Whether the node keeps the conversation under its name; false where it has none, or there was no room.
    is_kept: bool
    #: The Ray id of the node that answered; empty outside of Ray.
    node: str = ""


@dataclass(frozen=True)
class Said:
    """A piece of an answer; the last one has no text, and says how it ended."""

    text: str
    answered: Optional[Answered] = None
