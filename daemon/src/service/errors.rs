//! Errors of the guest host as clients see them.

use std::fmt::Display;

use trellis_engine::account::BudgetExceeded;
use trellis_wire::{ErrorBody, ErrorCode};

use crate::daemon::DaemonError;
use crate::guest::{GuestEnd, GuestError, shown_name};
use crate::models::{DeviceFailure, Models};
use crate::on_demand::Again;
use crate::reload::ReloadError;
use crate::upgrade::UpgradeError;

/// A mistake of ours.
pub(super) fn internal(error: &dyn Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::Internal, error.to_string())
}

fn unknown_guest(guest_id: u64) -> ErrorBody {
    ErrorBody::new(ErrorCode::UnknownGuest, format!("no guest {guest_id} of yours runs")).with_value(guest_id)
}

/// The client is gone and does not see it.
pub(super) fn session_ended() -> ErrorBody {
    ErrorBody::new(ErrorCode::Cancelled, "the connection has ended")
}

/// Nothing can be computed until the device is opened again, by this daemon or by the next.
pub(super) fn device_failed(failure: &DeviceFailure) -> ErrorBody {
    ErrorBody::new(ErrorCode::DeviceFailed, format!("the device failed, try again: {failure}"))
        .about("device")
        .with_value(&failure.device)
}

/// Whether guests find a model of this name, loaded or to be loaded for them.
pub(super) fn check_known(name: &str, models: &Models) -> Result<(), ErrorBody> {
    let (listing, known) = (models.listing(), models.known());
    if models.declared().resolve(name).is_some() || known.iter().any(|other| other == name) {
        return Ok(());
    }
    if listing.is_leaving(name) {
        return Err(not_loaded(&DaemonError::Leaving { name: name.to_owned() }));
    }
    let are = if models.declared().is_empty() { "are" } else { "are, or would be" };
    let known = if known.is_empty() { "none is".to_owned() } else { format!("{} {are}", known.join(", ")) };
    let name = shown_name(name);
    let message = format!("no model named {name:?} is loaded; {known}");
    Err(ErrorBody::new(ErrorCode::UnknownModel, message).about("model").with_value(name))
}

/// Why a model was not loaded or not unloaded.
pub(super) fn not_loaded(error: &DaemonError) -> ErrorBody {
    let body = |code| ErrorBody::new(code, error.to_string()).about("model");
    match error {
        DaemonError::UnknownModel { name } | DaemonError::UnknownShape { name } => {
            body(ErrorCode::InvalidArgument).with_value(name)
        }
        DaemonError::AlreadyLoaded { name, .. } => body(ErrorCode::ModelLoaded).with_value(name),
        DaemonError::Leaving { name } => body(ErrorCode::ModelLeaving).with_value(name),
        DaemonError::Panicked { name, .. } => body(ErrorCode::Internal).with_value(name),
        DaemonError::GivenUp => body(ErrorCode::Cancelled),
        DaemonError::NotLoaded { name, .. } => body(ErrorCode::UnknownModel).with_value(name),
        DaemonError::NoRoom { needed_bytes, free_bytes, .. } => {
            body(ErrorCode::ModelDoesNotFit).about("bytes").with_value(needed_bytes).with_limit(*free_bytes)
        }
        DaemonError::NoRoomNow { name, .. } | DaemonError::MakesRoom { name } => {
            body(ErrorCode::NoRoomNow).with_value(name)
        }
        DaemonError::KvTooSmall { needed_bytes, kv_bytes, .. } => {
            body(ErrorCode::ModelDoesNotFit).about("bytes").with_value(needed_bytes).with_limit(*kv_bytes)
        }
        DaemonError::Engine { source, .. } if source.is_retryable() => body(ErrorCode::EngineFailed),
        _ => body(ErrorCode::LoadFailed),
    }
}

/// Why the configuration was not read again, or not taken.
pub(super) fn not_reloaded(error: &ReloadError) -> ErrorBody {
    let code = match error {
        ReloadError::NoOrigin => ErrorCode::Unsupported,
        ReloadError::Ending => ErrorCode::ShuttingDown,
        ReloadError::Panicked => ErrorCode::Internal,
        ReloadError::Config(_) | ReloadError::Daemon(_) => ErrorCode::InvalidConfiguration,
    };
    ErrorBody::new(code, format!("{error}; nothing has changed"))
}

/// Why no program takes the place of the daemon's.
pub(super) fn not_upgraded(error: &UpgradeError) -> ErrorBody {
    let body = |code| ErrorBody::new(code, format!("{error}; nothing has changed"));
    match error {
        UpgradeError::NoProgram | UpgradeError::Lent => body(ErrorCode::Unsupported),
        UpgradeError::Ending => body(ErrorCode::ShuttingDown),
        UpgradeError::Refused { .. } => body(ErrorCode::InvalidConfiguration),
        UpgradeError::Relative { path }
        | UpgradeError::NoFile { path, .. }
        | UpgradeError::NotRegular { path }
        | UpgradeError::Open { path, .. } => {
            body(ErrorCode::InvalidArgument).about("program").with_value(path.display())
        }
        UpgradeError::Late { program, .. } | UpgradeError::NotTrellis { program, .. } => {
            body(ErrorCode::InvalidArgument).about("program").with_value(program)
        }
    }
}

/// Why a guest was not compiled or not started.
pub(crate) fn refused(error: &GuestError) -> ErrorBody {
    let body = |code| ErrorBody::new(code, error.to_string());
    match error {
        GuestError::NotWasm { .. }
        | GuestError::CoreModule
        | GuestError::Invalid { .. }
        | GuestError::MissingRun { .. }
        | GuestError::WrongType { .. } => body(ErrorCode::InvalidComponent),
        GuestError::UnknownImport { import, .. } | GuestError::WrongVersion { import, .. } => {
            body(ErrorCode::IncompatibleHost).about("import").with_value(import)
        }
        GuestError::TooLarge { n_bytes, limit_bytes } => body(ErrorCode::LimitExceeded)
            .about("component_bytes")
            .with_value(n_bytes)
            .with_limit(*limit_bytes as u64),
        GuestError::NeedsTooMuch { what, needed, limit } => {
            body(ErrorCode::LimitExceeded).about(*what).with_value(needed).with_limit(*limit)
        }
        GuestError::CompileTimeout { limit_ms } => {
            body(ErrorCode::CompileFailed).about("compile_ms").with_limit(*limit_ms)
        }
        GuestError::CompileLate { .. } => body(ErrorCode::Overloaded).about("processors"),
        GuestError::CompilerDied { limit_bytes, .. } => {
            body(ErrorCode::CompileFailed).about("compile_memory_bytes").with_limit(*limit_bytes)
        }
        GuestError::CompileQueueFull { n_queued, limit } => body(ErrorCode::LimitExceeded)
            .about("n_compiles_queued")
            .with_value(n_queued)
            .with_limit(*limit as u64),
        GuestError::TooManyGuests { running, limit, .. } => {
            body(ErrorCode::LimitExceeded).about("n_guests").with_value(running).with_limit(u64::from(*limit))
        }
        GuestError::ArgumentsTooLarge { n_bytes, limit_bytes } => body(ErrorCode::LimitExceeded)
            .about("argument_bytes")
            .with_value(n_bytes)
            .with_limit(*limit_bytes as u64),
        GuestError::OverBudget(exceeded) => over_host_bytes(exceeded),
        GuestError::NotRunning { id } => unknown_guest(id.0),
        GuestError::NoModel => body(ErrorCode::UnknownModel),
        GuestError::NoDescriptors => body(ErrorCode::Overloaded).about("file descriptors"),
        // Where the executable and the cache are, is for the log.
        GuestError::Compiler { source, .. } => internal(&format!("the compiler cannot be run: {source}")),
        GuestError::Cache { reason, .. } => internal(&format!("the cache of compiled code: {reason}")),
        GuestError::NotConfined { .. } | GuestError::Runtime { .. } => body(ErrorCode::Internal),
    }
}

/// A budget of host memory that has no room.
pub(crate) fn over_host_bytes(exceeded: &BudgetExceeded) -> ErrorBody {
    let BudgetExceeded { used, requested, limit, .. } = *exceeded;
    ErrorBody::new(ErrorCode::BudgetExceeded, exceeded.to_string())
        .about("host_bytes")
        .with_value(used.saturating_add(requested))
        .with_limit(limit)
}

/// Why a guest ended before its time.
pub(crate) fn ended(end: &GuestEnd) -> ErrorBody {
    let body = |code| ErrorBody::new(code, end.to_string());
    let over = |name: &str, value: u64, limit: u64| {
        body(ErrorCode::BudgetExceeded).about(name).with_value(value).with_limit(limit)
    };
    match end {
        GuestEnd::Finished => body(ErrorCode::Internal),
        GuestEnd::Failed { .. } => body(ErrorCode::GuestFailed),
        GuestEnd::Exited { code } => body(ErrorCode::GuestFailed).about("status").with_value(code),
        GuestEnd::Trapped { .. } => body(ErrorCode::GuestTrapped),
        GuestEnd::CpuExceeded { used_ms, limit_ms } => over("cpu_ms", *used_ms, *limit_ms),
        GuestEnd::MemoryExceeded { requested_bytes, limit_bytes } => {
            over("memory_bytes", *requested_bytes, *limit_bytes)
        }
        GuestEnd::HostBytesExceeded(exceeded) => over_host_bytes(exceeded),
        GuestEnd::TableExceeded { requested, limit } => over("n_table_elements", *requested, *limit),
        GuestEnd::HandlesExceeded { limit } => over("n_handles", *limit + 1, *limit),
        GuestEnd::CallBytesExceeded { limit_bytes } => {
            body(ErrorCode::BudgetExceeded).about("call_bytes").with_limit(*limit_bytes)
        }
        GuestEnd::RecordingExceeded { waiting_bytes, limit_bytes } => {
            over("recording_bytes", *waiting_bytes, *limit_bytes)
        }
        GuestEnd::DeadlineExceeded { limit_ms } => {
            body(ErrorCode::DeadlineExceeded).about("deadline_ms").with_limit(*limit_ms)
        }
        GuestEnd::IdleExceeded { limit_ms } => {
            body(ErrorCode::DeadlineExceeded).about("idle_ms").with_limit(*limit_ms)
        }
        GuestEnd::Stopped => body(ErrorCode::Stopped),
        GuestEnd::DeviceFailed { device, .. } => {
            body(ErrorCode::DeviceFailed).about("device").with_value(device)
        }
        GuestEnd::ModelFailed { model, .. } => body(ErrorCode::EngineFailed).about("model").with_value(model),
        GuestEnd::ModelUnloaded { model } => body(ErrorCode::ModelUnloaded).about("model").with_value(model),
        GuestEnd::ModelNotLoaded { model, again, .. } => {
            let code = match again {
                Again::Never => ErrorCode::LoadFailed,
                Again::Later => ErrorCode::NoRoomNow,
                Again::NextDaemon => ErrorCode::ShuttingDown,
            };
            body(code).about("model").with_value(model)
        }
        GuestEnd::ClientGone => body(ErrorCode::Cancelled),
        GuestEnd::Panicked { .. } => body(ErrorCode::Internal),
        GuestEnd::ProcessLost { .. } => body(ErrorCode::ProcessLost),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::limits::table;

    #[test]
    fn a_client_the_log_and_the_table_have_one_name_for_a_limit() {
        let ends = [
            GuestEnd::CpuExceeded { used_ms: 2, limit_ms: 1 },
            GuestEnd::MemoryExceeded { requested_bytes: 2, limit_bytes: 1 },
            GuestEnd::TableExceeded { requested: 2, limit: 1 },
            GuestEnd::HandlesExceeded { limit: 1 },
            GuestEnd::CallBytesExceeded { limit_bytes: 1 },
            GuestEnd::RecordingExceeded { waiting_bytes: 2, limit_bytes: 1 },
            GuestEnd::DeadlineExceeded { limit_ms: 1 },
            GuestEnd::IdleExceeded { limit_ms: 1 },
        ];
        let limits = table(&Config::default());
        for end in ends {
            let name = end.limit().expect("a limit has ended it");
            let told = ended(&end);
            assert_eq!((told.name.as_deref(), told.limit), (Some(name), Some(1)), "{end:?}");
            assert!(limits.iter().any(|limit| limit.name == format!("limits.{name}")), "{name}");
        }
    }
}
