use std::fmt;

use serde::{Deserialize, Serialize};

use crate::open_enum::open_enum;

open_enum! {
    /// What went wrong, for programs to act on. Names are never changed or reused.
    pub enum ErrorCode {
        /// The daemon does not hold the component; upload it and ask again.
        UnknownComponent = "unknown_component",
        /// No program is registered under that name.
        UnknownProgram = "unknown_program",
        /// No model of that name is loaded.
        UnknownModel = "unknown_model",
        /// A model of that name is loaded already.
        ModelLoaded = "model_loaded",
        /// There is no room for the model beside the others; the value is what it needs, the limit what it could get.
        ModelDoesNotFit = "model_does_not_fit",
        /// There is no room for the model beside others that guests use, and there may be another time.
        NoRoomNow = "no_room_now",
        /// The model is on its way out: it is neither to be had nor to be loaded until it is gone.
        ModelLeaving = "model_leaving",
        /// The model cannot be loaded: its files or its device.
        LoadFailed = "load_failed",
        /// The model that the guest worked with was unloaded.
        ModelUnloaded = "model_unloaded",
        /// No such guest, or one of another user.
        UnknownGuest = "unknown_guest",
        /// An argument outside its range.
        InvalidArgument = "invalid_argument",
        /// The bytes are not a component that this daemon can run.
        InvalidComponent = "invalid_component",
        /// The component was built for another version of the host API.
        IncompatibleHost = "incompatible_host",
        /// The component does not compile within its limits.
        CompileFailed = "compile_failed",
        /// The uploaded bytes do not have the announced hash.
        HashMismatch = "hash_mismatch",
        /// A limit of the connection or the protocol.
        LimitExceeded = "limit_exceeded",
        /// A budget of the guest, its session or its user.
        BudgetExceeded = "budget_exceeded",
        /// The guest ran past its deadline, or waited for messages for longer than it may.
        DeadlineExceeded = "deadline_exceeded",
        /// The guest returned an error; the message is its text.
        GuestFailed = "guest_failed",
        /// The guest trapped.
        GuestTrapped = "guest_trapped",
        /// The operator's policy ended the guest; the message is its reason.
        PolicyEnded = "policy_ended",
        /// The operator's policy failed, and the guest ended with it.
        PolicyFailed = "policy_failed",
        /// The client cancelled the request.
        Cancelled = "cancelled",
        /// A user stopped the guest.
        Stopped = "stopped",
        /// Another client of the same user reads the detached guest now.
        TakenOver = "taken_over",
        /// What a detached guest sent there is not kept any more; the limit is the number of the first event that is.
        OutputLost = "output_lost",
        /// The daemon is going down.
        ShuttingDown = "shutting_down",
        /// The actor may not do that.
        PermissionDenied = "permission_denied",
        /// The configuration that was read again is wrong, and was not taken.
        InvalidConfiguration = "invalid_configuration",
        /// The daemon does not know this kind of request.
        Unsupported = "unsupported",
        /// The peer broke the protocol; the connection ends.
        Protocol = "protocol",
        /// The model that the guest worked with has failed, and others on its device have not; or an engine cannot go on.
        EngineFailed = "engine_failed",
        /// The device that the models run on has failed, and with it everything that was under way. The daemon ends, or
        /// opens the device again.
        DeviceFailed = "device_failed",
        /// The daemon has no more of something that comes free again, such as file descriptors.
        Overloaded = "overloaded",
        /// The process in which the guests of the user run has come to its end, and all of them with it.
        ProcessLost = "process_lost",
        /// A mistake of the daemon.
        Internal = "internal",
    }
}

impl ErrorCode {
    /// Whether the same request, unchanged, may succeed another time: it met a daemon that was about to end or had too much to
    /// do, a device that failed, or a model that was on its way out.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::DeviceFailed
                | Self::EngineFailed
                | Self::ModelLeaving
                | Self::ModelUnloaded
                | Self::NoRoomNow
                | Self::Overloaded
                | Self::ProcessLost
                | Self::ShuttingDown
        )
    }
}

/// An error as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// For programs.
    pub code: ErrorCode,
    /// For people: one sentence, with the value and the limit in it.
    #[serde(default)]
    pub message: String,
    /// What it is about: an argument, a limit, a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The value that was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The limit that it passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

impl ErrorBody {
    /// An error without fields.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), name: None, value: None, limit: None }
    }

    /// A number over its limit: `limit_exceeded`, with all fields set.
    #[must_use]
    pub fn over_limit(name: &str, value: u64, limit: u64) -> Self {
        Self::new(ErrorCode::LimitExceeded, format!("{name}: {value} is over the limit of {limit}"))
            .about(name)
            .with_value(value)
            .with_limit(limit)
    }

    /// Names what the error is about.
    #[must_use]
    pub fn about(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// Adds the value that was refused.
    #[must_use]
    pub fn with_value(self, value: impl fmt::Display) -> Self {
        Self { value: Some(value.to_string()), ..self }
    }

    /// Adds the limit that was passed.
    #[must_use]
    pub fn with_limit(self, limit: u64) -> Self {
        Self { limit: Some(limit), ..self }
    }
}

impl fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() { self.code.fmt(f) } else { f.write_str(&self.message) }
    }
}

impl std::error::Error for ErrorBody {}
