"""Client of the Trellis daemon, which runs WebAssembly guests next to a language model.

.. code-block:: python

    from trellis import Client

    with Client.connect() as client:
        for text in client.start("chat.wasm", "What is 37 + 48?", seed=7).texts():
            print(text, end="", flush=True)

`Client` is for programs without asyncio and for notebooks, `AsyncClient` for those with it. Both have the names of the Rust client.
Times are in seconds, sizes in bytes.
"""

from ._amounts import (
    Causes,
    Computed,
    FitInfo,
    GuestAmounts,
    GuestInfo,
    GuestUsage,
    ModelInfo,
)
from ._async import (
    AsyncClient,
    Connecting,
)
from ._attached import (
    AsyncAttached,
    AsyncResumed,
)
from ._errors import (
    ClosedError,
    ConnectError,
    ConnectionLostError,
    GuestEndedError,
    HandshakeError,
    NotRunningError,
    RequestError,
    TimedOutError,
    TooOldError,
    TrellisError,
    UnknownAnswerError,
    VersionError,
)
from ._events import (
    AttachedTo,
    Event,
    Json,
    Log,
    Profiled,
    Progress,
    Recorded,
    Started,
    Text,
    Tokens,
    UnknownEvent,
)
from ._faults import (
    BudgetExceededError,
    CancelledError,
    CompileFailedError,
    DaemonError,
    DeadlineExceededError,
    DeviceFailedError,
    EngineFailedError,
    GuestFailedError,
    GuestTrappedError,
    HashMismatchError,
    IncompatibleHostError,
    InternalError,
    InvalidArgumentError,
    InvalidComponentError,
    InvalidConfigurationError,
    LimitExceededError,
    LoadFailedError,
    ModelDoesNotFitError,
    ModelLeavingError,
    ModelLoadedError,
    ModelUnloadedError,
    NoRoomNowError,
    OutputLostError,
    OverloadedError,
    PermissionDeniedError,
    PolicyEndedError,
    PolicyFailedError,
    ProcessLostError,
    ProtocolError,
    ShuttingDownError,
    StoppedError,
    TakenOverError,
    UnknownComponentError,
    UnknownGuestError,
    UnknownModelError,
    UnknownProgramError,
    UnsupportedError,
)
from ._guest import (
    AsyncGuest,
)
from ._info import (
    ClassInfo,
    DaemonInfo,
    DeviceInfo,
    FailureInfo,
    LimitInfo,
    LoadingInfo,
    LogLines,
    ReloadInfo,
    SettingChange,
    UpgradeInfo,
)
from ._program import (
    Program,
    ProgramLike,
    StartOptions,
)
from ._protocol import (
    Protocol,
)
from ._reading import (
    AsyncReading,
    Output,
)
from ._sync import (
    Client,
)
from ._sync_reading import (
    Attached,
    Guest,
    Reading,
    Resumed,
)
from ._version import (
    __version__,
)
from ._waits import (
    DEFAULT,
    Timeout,
)

__all__ = [
    "DEFAULT",
    "AsyncAttached",
    "AsyncClient",
    "AsyncGuest",
    "AsyncReading",
    "AsyncResumed",
    "Attached",
    "AttachedTo",
    "BudgetExceededError",
    "CancelledError",
    "Causes",
    "ClassInfo",
    "Client",
    "ClosedError",
    "CompileFailedError",
    "Computed",
    "ConnectError",
    "Connecting",
    "ConnectionLostError",
    "DaemonError",
    "DaemonInfo",
    "DeadlineExceededError",
    "DeviceFailedError",
    "DeviceInfo",
    "EngineFailedError",
    "Event",
    "FailureInfo",
    "FitInfo",
    "Guest",
    "GuestAmounts",
    "GuestEndedError",
    "GuestFailedError",
    "GuestInfo",
    "GuestTrappedError",
    "GuestUsage",
    "HandshakeError",
    "HashMismatchError",
    "IncompatibleHostError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidComponentError",
    "InvalidConfigurationError",
    "Json",
    "LimitExceededError",
    "LimitInfo",
    "LoadFailedError",
    "LoadingInfo",
    "Log",
    "LogLines",
    "ModelDoesNotFitError",
    "ModelInfo",
    "ModelLeavingError",
    "ModelLoadedError",
    "ModelUnloadedError",
    "NoRoomNowError",
    "NotRunningError",
    "Output",
    "OutputLostError",
    "OverloadedError",
    "PermissionDeniedError",
    "PolicyEndedError",
    "PolicyFailedError",
    "ProcessLostError",
    "Profiled",
    "Program",
    "ProgramLike",
    "Progress",
    "Protocol",
    "ProtocolError",
    "Reading",
    "Recorded",
    "ReloadInfo",
    "RequestError",
    "Resumed",
    "SettingChange",
    "ShuttingDownError",
    "StartOptions",
    "Started",
    "StoppedError",
    "TakenOverError",
    "Text",
    "TimedOutError",
    "Timeout",
    "Tokens",
    "TooOldError",
    "TrellisError",
    "UnknownAnswerError",
    "UnknownComponentError",
    "UnknownEvent",
    "UnknownGuestError",
    "UnknownModelError",
    "UnknownProgramError",
    "UnsupportedError",
    "UpgradeInfo",
    "VersionError",
    "__version__",
]
