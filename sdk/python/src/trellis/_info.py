"""The daemon as it describes itself.

As in ``sdk/wire``: fields that an older daemon does not send have their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from ._amounts import Computed


@dataclass(frozen=True)
class DeviceInfo:
    """A device in use."""

    #: As the settings name it: ``cpu``, ``cuda``, ``cuda:1``.
    name: str = ""
    #: The models on it, those on their way out included.
    models: list[str] = field(default_factory=list)
    #: Milliseconds since it was opened.
    open_ms: int = 0
    #: Milliseconds of those in which it computed, for models that are gone as well. In the rest it was idle.
    busy_ms: int = 0
    #: Steps computed for the models on it, from the load of each on.
    n_steps: int = 0
    #: Rows of those steps.
    n_rows: int = 0
    #: Tokens computed in them.
    n_tokens: int = 0
    #: Contexts that its last steps had no room for, or no KV pages, and that wait for the next; an older daemon does
    #: not say.
    n_contexts_waiting: Optional[int] = None
    #: Bytes that models may take of it; absent where that is not known.
    memory_bytes: Optional[int] = None
    #: Bytes that they use: their weights, and KV pages that something holds.
    memory_bytes_used: Optional[int] = None


@dataclass(frozen=True)
class LoadingInfo:
    """A model that is being loaded."""

    #: The name that guests will ask for.
    model: str = ""
    #: Bytes of its weights that are on the device.
    done_bytes: int = 0
    #: Bytes in all; 0 as long as that is not known.
    total_bytes: int = 0


@dataclass(frozen=True)
class FailureInfo:
    """Something that went wrong in the daemon, and not in a guest."""

    #: What, and why.
    message: str = ""
    #: Milliseconds since.
    ago_ms: int = 0


@dataclass(frozen=True)
class ClassInfo:
    """A class of users."""

    #: Its name; ``default`` is that of users who are in no other.
    name: str = ""
    #: How much of the devices and processors each of its users has, beside a user with a share of 1.
    share: int = 0
    #: KV pages of users of a lower rank make room first.
    rank: int = 0
    #: The most that each of its users may have, by name, of what is not as for each user of any class.
    limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DaemonInfo:
    """The daemon as a whole."""

    #: Name and version of the build.
    build: str = ""
    #: Its process.
    pid: int = 0
    #: The devices that it computes on, as people know them.
    device: str = ""
    #: Each device that it computes on.
    devices: list[DeviceInfo] = field(default_factory=list)
    #: Names of the loaded models.
    models: list[str] = field(default_factory=list)
    #: Names of the registered programs.
    programs: list[str] = field(default_factory=list)
    #: Milliseconds since it started.
    uptime_ms: int = 0
    #: Bytes of its resident memory.
    resident_bytes: int = 0
    #: Bytes of KV memory that models have. Pages differ in size from model to model: ``ModelInfo`` counts them.
    kv_bytes: int = 0
    #: Bytes of it that nothing holds.
    kv_bytes_free: int = 0
    #: What was computed since the daemon started, for models that are gone as well: these counters never shrink.
    computed: Computed = field(default_factory=Computed)
    #: Running guests, of all users.
    n_guests: int = 0
    #: Open connections; each detached guest counts as one more.
    n_sessions: int = 0
    #: The class of the user that asks; an older daemon does not say.
    class_: Optional[ClassInfo] = field(default=None, metadata={"name": "class"})
    #: What the user that asks may do: ``run``, ``upload``, ``load``, ``see_others``, ``stop_others``, and ``operate``
    #: for the operator; an older daemon does not say.
    permissions: Optional[list[str]] = None
    #: Where guests run: ``thread`` for threads of the daemon, ``process`` where those of each user have a process of
    #: their own; an older daemon does not say.
    isolation: Optional[str] = None
    #: With ``process``: what the kernel enforces of the rules about files, ports and sockets (Landlock) that such a
    #: process has beside its filter of system calls: ``enforced``, ``partly-enforced``, ``missing``. Absent where
    #: that is not known.
    file_rules: Optional[str] = None
    #: What it is doing, in a word: ``ready``, ``draining`` while it takes on nothing more and what runs comes to its
    #: end, ``failed``; an older daemon does not say.
    state: Optional[str] = None
    #: Models that are being loaded.
    loading: list[LoadingInfo] = field(default_factory=list)
    #: Why nothing can be computed: which device has failed, and of what; absent while all is well.
    failure: Optional[str] = None
    #: The last load or device that failed since it started, also where all is well by now.
    last_failure: Optional[FailureInfo] = None
    #: The operator's policy, between guests and their clients: its file and the beginning of its hash; absent where
    #: there is none.
    policy: Optional[str] = None


@dataclass(frozen=True)
class SettingChange:
    """A setting that a configuration has changed."""

    #: As in the file: ``limits.cpu_ms`` is ``cpu_ms`` in its table ``[limits]``.
    name: str = ""
    #: The value before, as JSON; absent where nothing was set.
    before: Optional[str] = None
    #: The value after, likewise.
    after: Optional[str] = None


@dataclass(frozen=True)
class ReloadInfo:
    """What has come of a configuration that was read again."""

    #: What holds from now on.
    changed: list[SettingChange] = field(default_factory=list)
    #: What would hold if the daemon were started again.
    waiting: list[SettingChange] = field(default_factory=list)


@dataclass(frozen=True)
class UpgradeInfo:
    """What is about to take a daemon's place."""

    #: The path of the program.
    program: str = ""
    #: What it says of its version.
    version: str = ""
    #: Guests, uploads and loads whose ends the daemon waits for.
    n_at_work: int = 0
    #: How long it waits for them, in milliseconds; those that are left then end with ``ShuttingDownError``.
    drain_ms: int = 0


@dataclass(frozen=True)
class LimitInfo:
    """A limit of the daemon, where its number comes from, and how much of it is in use."""

    #: Its name, as the daemon's configuration has it: ``limits.cpu_ms``, ``budgets.user.n_pages``.
    name: str = ""
    #: What it bounds.
    about: str = ""
    #: What its numbers count: ``bytes``, ``ms``, or ``count`` for things.
    unit: str = ""
    #: Each of what has it: a ``guest``, a ``session``, a ``user``, the ``daemon``.
    scope: str = ""
    #: The most, of which 2^63 - 1 is none; absent where the machine decides and nothing was decided yet.
    value: Optional[int] = None
    #: Where the value is from: ``default``, the ``file`` of the configuration, the ``machine``, or the ``program``
    #: that started the daemon inside itself.
    source: str = ""
    #: What the user that asks has in use; absent where that is not counted, or is a guest's or a session's.
    used: Optional[int] = None
    #: What all users have in use together; only for who has the permission ``see_others``.
    used_by_all: Optional[int] = None


@dataclass(frozen=True)
class LogLines:
    """Lines of the daemon's log that follow each other. There may be more behind them."""

    #: The oldest first.
    lines: list[str] = field(default_factory=list)
    #: The number of the line behind them.
    next: int = 0
    #: The number of the line behind all that there are at this moment.
    end: int = 0
    #: Lines that were asked for by their numbers, and that the daemon does not keep any more.
    n_missed: int = 0
