"""What the daemon refuses or ends something with: one class for each code, which is never changed or reused."""

from __future__ import annotations

from typing import Optional

from ._errors import TrellisError


class DaemonError(TrellisError):
    """The daemon refused or ended the request.

    ``code`` is for programs, ``message`` for people; ``name`` says what it is about (an argument, a limit, a budget), ``value``
    what was refused, ``limit`` the limit that it passed, in the unit of what is named. A code that this version does not know
    comes as this class itself.
    """

    code: str = ""

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        name: Optional[str] = None,
        value: Optional[str] = None,
        limit: Optional[int] = None,
    ) -> None:
        self.code = code or type(self).code
        self.message = message or self.code
        self.name = name
        self.value = value
        self.limit = limit
        super().__init__(self.message)


class UnknownComponentError(DaemonError):
    """The daemon does not hold the component; upload it and ask again."""

    code = "unknown_component"


class UnknownProgramError(DaemonError):
    """No program is registered under that name."""

    code = "unknown_program"


class UnknownModelError(DaemonError):
    """No model of that name is loaded."""

    code = "unknown_model"


class ModelLoadedError(DaemonError):
    """A model of that name is loaded already."""

    code = "model_loaded"


class ModelDoesNotFitError(DaemonError):
    """There is no room for the model beside the others; the value is what it needs, the limit what it could get."""

    code = "model_does_not_fit"


class NoRoomNowError(DaemonError):
    """There is no room for the model beside others that guests use, and there may be another time."""

    code = "no_room_now"
    is_retryable = True


class ModelLeavingError(DaemonError):
    """The model is on its way out: it is neither to be had nor to be loaded until it is gone."""

    code = "model_leaving"
    is_retryable = True


class LoadFailedError(DaemonError):
    """The model cannot be loaded: its files or its device."""

    code = "load_failed"


class ModelUnloadedError(DaemonError):
    """The model that the guest worked with was unloaded."""

    code = "model_unloaded"
    is_retryable = True


class UnknownGuestError(DaemonError):
    """No such guest, or one of another user."""

    code = "unknown_guest"


class InvalidArgumentError(DaemonError):
    """An argument outside its range."""

    code = "invalid_argument"


class InvalidComponentError(DaemonError):
    """The bytes are not a component that this daemon can run."""

    code = "invalid_component"


class IncompatibleHostError(DaemonError):
    """The component was built for another version of the host API."""

    code = "incompatible_host"


class CompileFailedError(DaemonError):
    """The component does not compile within its limits."""

    code = "compile_failed"


class HashMismatchError(DaemonError):
    """The uploaded bytes do not have the announced hash."""

    code = "hash_mismatch"


class LimitExceededError(DaemonError):
    """A limit of the connection or the protocol."""

    code = "limit_exceeded"


class BudgetExceededError(DaemonError):
    """A budget of the guest, its session or its user."""

    code = "budget_exceeded"


class DeadlineExceededError(DaemonError):
    """The guest ran past its deadline, or waited for messages for longer than it may."""

    code = "deadline_exceeded"


class GuestFailedError(DaemonError):
    """The guest returned an error; the message is its text."""

    code = "guest_failed"


class GuestTrappedError(DaemonError):
    """The guest trapped."""

    code = "guest_trapped"


class PolicyEndedError(DaemonError):
    """The operator's policy ended the guest; the message is its reason."""

    code = "policy_ended"


class PolicyFailedError(DaemonError):
    """The operator's policy failed, and the guest ended with it."""

    code = "policy_failed"


class CancelledError(DaemonError):
    """The client cancelled the request."""

    code = "cancelled"


class StoppedError(DaemonError):
    """A user stopped the guest."""

    code = "stopped"


class TakenOverError(DaemonError):
    """Another client of the same user reads the detached guest now."""

    code = "taken_over"


class OutputLostError(DaemonError):
    """What a detached guest sent there is not kept any more; the limit is the number of the first event that is."""

    code = "output_lost"


class ShuttingDownError(DaemonError):
    """The daemon is going down."""

    code = "shutting_down"
    is_retryable = True


class PermissionDeniedError(DaemonError):
    """The actor may not do that."""

    code = "permission_denied"


class InvalidConfigurationError(DaemonError):
    """The configuration that was read again is wrong, and was not taken."""

    code = "invalid_configuration"


class UnsupportedError(DaemonError):
    """The daemon does not know this kind of request."""

    code = "unsupported"


class ProtocolError(DaemonError):
    """The peer broke the protocol; the connection ends."""

    code = "protocol"


class EngineFailedError(DaemonError):
    """The model that the guest worked with has failed, and others on its device have not; or an engine cannot go on."""

    code = "engine_failed"
    is_retryable = True


class DeviceFailedError(DaemonError):
    """The device that the models run on has failed, and with it everything that was under way. The daemon ends, or
    opens the device again.
    """

    code = "device_failed"
    is_retryable = True


class OverloadedError(DaemonError):
    """The daemon has no more of something that comes free again, such as file descriptors."""

    code = "overloaded"
    is_retryable = True


class ProcessLostError(DaemonError):
    """The process in which the guests of the user run has come to its end, and all of them with it."""

    code = "process_lost"
    is_retryable = True


class InternalError(DaemonError):
    """A mistake of the daemon."""

    code = "internal"


#: The class of each code.
BY_CODE: dict[str, type[DaemonError]] = {kind.code: kind for kind in DaemonError.__subclasses__()}


def daemon_error(
    code: str, message: str, name: Optional[str], value: Optional[str], limit: Optional[int]
) -> DaemonError:
    """The error of this code."""
    kind = BY_CODE.get(code, DaemonError)
    return kind(message, code=code, name=name, value=value, limit=limit)
