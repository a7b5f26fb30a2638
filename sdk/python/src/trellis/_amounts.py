"""Guests and models as the daemon describes them, and what was used and computed.

As in ``sdk/wire``: fields that an older daemon does not send have their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True)
class Causes:
    """What was computed in vain and what was waited for, by cause."""

    #: Rows in vain: their guest gave up what they were computed for while they were under way.
    n_rows_given_up: int = 0
    #: Rows in vain: the draw before them was the last of its run, by a stop token for one.
    n_rows_past_end: int = 0
    #: Rows in vain: of a step that failed, or under way for work that failed.
    n_rows_failed: int = 0
    #: Rows that drew nothing because their masks had not come.
    n_rows_sat_out: int = 0
    #: Tokens in vain: decoded ahead of a guest that did something else then.
    n_tokens_given_up: int = 0
    #: Tokens in vain: guessed wrongly.
    n_tokens_guessed_wrong: int = 0
    #: Steps of the device, those of other models included, that went by while a context could decode and had no row
    #: in them, summed over contexts.
    n_steps_waited_to_decode: int = 0
    #: As above, while a context had a prompt to compute: steps had no room for it within their length.
    n_steps_waited_with_prompt: int = 0
    #: As above, while a context stood in line for KV pages.
    n_steps_waited_for_pages: int = 0
    #: As above, while a context had no mask for its next draw.
    n_steps_waited_for_masks: int = 0


@dataclass(frozen=True)
class Computed:
    """What was computed."""

    #: Steps.
    n_steps: int = 0
    #: Rows of those steps.
    n_rows: int = 0
    #: Rows computed in vain: their work ended while they were under way.
    n_rows_in_vain: int = 0
    #: Tokens computed.
    n_tokens: int = 0
    #: Tokens of prompts that the prefix cache already held.
    n_tokens_cached: int = 0
    #: Tokens decoded ahead, or guessed, in vain.
    n_tokens_in_vain: int = 0
    #: Tokens computed again, after their KV had been given up for want of pages.
    n_tokens_again: int = 0
    #: What was in vain and what was waited for, by cause.
    causes: Causes = field(default_factory=Causes, metadata={"flat": True})


@dataclass(frozen=True)
class GuestUsage:
    """What a guest has used."""

    #: Tokens computed for it, those decoded ahead in vain included.
    n_tokens: int = 0
    #: Tokens decoded ahead of a stream and then forgotten, or guessed wrongly.
    n_tokens_in_vain: int = 0
    #: Tokens of prompts that the prefix cache already held; not part of ``n_tokens``.
    n_tokens_cached: int = 0
    #: Tokens that were guessed for it, by a draft model for one, and verified.
    n_tokens_guessed: int = 0
    #: Those of them that were right.
    n_tokens_guessed_right: int = 0
    #: Tokens of saved contexts that it opened whose KV came back from disk; not part of ``n_tokens``. An older daemon
    #: does not say.
    n_tokens_reopened: int = 0
    #: Bytes of that KV.
    reopened_bytes: int = 0
    #: Microseconds from when it opened such contexts until they were there, summed over them.
    reopened_us: int = 0
    #: Steps of devices that went by while a context of it could have been in them, summed over contexts: others were
    #: served, it stood in line for KV pages, or it had no mask.
    n_steps_waited: int = 0
    #: What was in vain and what it waited for, by cause.
    causes: Causes = field(default_factory=Causes, metadata={"flat": True})
    #: Bytes of its output that the client was sent, as credit counts them.
    output_bytes: int = 0
    #: Microseconds from its start to its end.
    elapsed_us: int = 0


@dataclass(frozen=True)
class GuestAmounts:
    """Amounts of what a guest is bounded in, by the names of their limits: what it uses, or what it may use."""

    #: Bytes of linear memory.
    memory_bytes: int = 0
    #: Milliseconds of processor time.
    cpu_ms: int = 0
    #: KV pages that its contexts hold.
    n_pages: int = 0
    #: Open contexts.
    n_contexts: int = 0
    #: Tokens computed for it.
    n_tokens: int = 0
    #: Bytes of host memory for token lists, masks and grammars.
    host_bytes: int = 0


@dataclass(frozen=True)
class GuestInfo:
    """A running guest."""

    #: Its number, never given twice by one daemon.
    guest_id: int = 0
    #: The connection that started it; of a detached guest a number of its own, among theirs.
    session_id: int = 0
    #: The user that it belongs to.
    uid: int = 0
    #: The class of that user; an older daemon does not say.
    class_: Optional[str] = field(default=None, metadata={"name": "class"})
    #: The name of its program; of a component what its client calls it, if it does, and the beginning of its hash.
    program: str = ""
    #: What it is doing, in a word.
    state: str = ""
    #: The models that it holds something of: a handle, a context, or whatever else was made with them.
    models: list[str] = field(default_factory=list)
    #: Its open contexts.
    n_contexts: int = 0
    #: KV pages that its contexts hold.
    n_pages: int = 0
    #: Those of them that made room for others and are in host memory.
    n_pages_on_host: int = 0
    #: Bytes of its linear memory.
    memory_bytes: int = 0
    #: Milliseconds since it started.
    elapsed_ms: int = 0
    #: Tokens of its prompts that are being computed; 0 where none is, or where an older daemon does not say.
    n_prompt_tokens: int = 0
    #: Those of them that are left.
    n_prompt_tokens_left: int = 0
    #: Whether it goes on without the connection that started it.
    is_detached: bool = False
    #: Whether a client reads it, where it is detached.
    is_attached: bool = False
    #: What it has used so far: its tokens and its time. What it has sent is known at its end.
    usage: GuestUsage = field(default_factory=GuestUsage)
    #: What it uses of what it is bounded in; an older daemon does not say.
    used: Optional[GuestAmounts] = None
    #: The most that it may use, within what its session and its user may; an older daemon does not say.
    limits: Optional[GuestAmounts] = None


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model."""

    #: The name that guests ask for.
    name: str = ""
    #: Its architecture, as its ``config.json`` names it.
    architecture: str = ""
    #: Entries of its vocabulary.
    n_vocab: int = 0
    #: Positions of its longest context.
    n_positions: int = 0
    #: Its parameters.
    n_parameters: int = 0
    #: Bytes of its weights on the device.
    weight_bytes: int = 0
    #: The type of its weights on the device.
    dtype: str = ""
    #: The device that runs it.
    device: str = ""
    #: What it is doing, in a word: ``loaded``, ``draining`` while it is unloaded and its guests come to their ends,
    #: ``failed``; of one that is loaded on demand also ``unloaded``, ``loading``.
    state: str = ""
    #: Whether it is loaded when a guest asks for it.
    is_on_demand: bool = False
    #: Whether it stays loaded once it is, whatever else is asked for. An older daemon does not say.
    is_pinned: bool = False
    #: Other names under which guests find it.
    aliases: list[str] = field(default_factory=list)
    #: Bytes of it that are loaded, and bytes in all, while it is being loaded; 0 for what is not known.
    loading_bytes: Optional[tuple[int, int]] = None
    #: Milliseconds since a guest had anything of it, of one that is loaded on demand, and is loaded.
    unused_ms: Optional[int] = None
    #: The folder that it was loaded from, as far as the actor may know; absent for a bundled one.
    folder: Optional[str] = None
    #: Guests that name no model get this one.
    is_default: bool = False
    #: KV pages that it has now; they change when other models come and go.
    n_pages: int = 0
    #: KV pages that nothing holds.
    n_pages_free: int = 0
    #: Bytes of a KV page.
    page_bytes: int = 0
    #: Open contexts.
    n_contexts: int = 0
    #: What was computed since it was loaded.
    computed: Computed = field(default_factory=Computed, metadata={"flat": True})
    #: Milliseconds that the device has computed for it.
    busy_ms: int = 0
    #: Why nothing more is computed for it; absent while it works.
    failure: Optional[str] = None


@dataclass(frozen=True)
class FitInfo:
    """Whether there is room for a model."""

    #: Its name.
    model: str = ""
    #: Whether a load would come to its end at once: now, or once what is named in ``evicts`` is unloaded, which it
    #: does by itself.
    fits: bool = False
    #: Whether it is loaded.
    is_loaded: bool = False
    #: The device that it would run on.
    device: str = ""
    #: All that it needs at least.
    needed_bytes: int = 0
    #: Of which its weights.
    weight_bytes: int = 0
    #: Of which memory for steps.
    step_bytes: int = 0
    #: Of which KV, for one context of the longest.
    kv_bytes: int = 0
    #: Positions of its longest context, which is shorter than the model's where there is no room for that.
    n_positions: int = 0
    #: What other models do not need of the device.
    free_bytes: int = 0
    #: What all models may take of the device together.
    capacity_bytes: int = 0
    #: Models that nobody uses, and that would be unloaded.
    evicts: list[str] = field(default_factory=list)
    #: Whether it would fit later: once models come free that would make room.
    fits_later: bool = False
    #: Those of them that guests use.
    used: list[str] = field(default_factory=list)
