//! What is known of guests, models and devices, as clients are told it.

use std::time::Duration;

use trellis_engine::{EngineStats, ModelHandle};
use trellis_wire::{
    DeviceInfo, ErrorBody, ErrorCode, GuestAmounts, GuestUsage, LogLines, LogsAsked, ModelInfo,
};

use crate::guest::{Amounts, Used};
use crate::logs::{self, Batch, Since};
use crate::models::DeviceWatch;
use crate::permissions::is_operator;
use crate::session::Actor;
use crate::totals;

/// The names of all devices in use.
pub(super) fn device_names(models: &[ModelHandle]) -> String {
    let mut devices: Vec<&str> = models.iter().map(ModelHandle::device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.join(", ")
}

/// What is known of a device without its models.
pub(super) fn device_info(DeviceWatch { device, past, .. }: &DeviceWatch) -> DeviceInfo {
    DeviceInfo {
        name: device.clone(),
        open_ms: whole_ms(past.open_for()),
        busy_ms: whole_ms(past.busy()),
        n_contexts_waiting: Some(0),
        memory_bytes: past.capacity_bytes(),
        memory_bytes_used: Some(0),
        ..DeviceInfo::default()
    }
}

/// Adds what a model has of its device and has done on it.
pub(super) fn add_model(device: &mut DeviceInfo, model: &ModelHandle, stats: &EngineStats) {
    let EngineStats { n_steps, n_rows, n_tokens, .. } = *stats;
    device.models.push(model.model().name.clone());
    device.busy_ms += whole_ms(stats.device_busy);
    device.n_steps += n_steps;
    device.n_rows += n_rows;
    device.n_tokens += n_tokens;
    let n_pages_held = (stats.n_pages as u64).saturating_sub(n_pages_free(stats));
    let n_bytes = model.weights().n_bytes + n_pages_held * model.limits().page_bytes as u64;
    *device.memory_bytes_used.get_or_insert(0) += n_bytes;
    *device.n_contexts_waiting.get_or_insert(0) += stats.n_waiting as u64;
}

pub(super) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn usage(used: &Used) -> GuestUsage {
    GuestUsage {
        n_tokens: used.n_tokens,
        n_tokens_in_vain: used.causes.n_tokens_in_vain(),
        n_tokens_cached: used.n_tokens_cached,
        n_tokens_reopened: used.n_tokens_reopened,
        reopened_bytes: used.reopened_bytes,
        reopened_us: used.reopened_us,
        n_tokens_guessed: used.n_tokens_guessed,
        n_tokens_guessed_right: used.n_tokens_guessed_right,
        n_steps_waited: used.causes.n_steps_waited(),
        causes: totals::by_cause(&used.causes),
        ..GuestUsage::default()
    }
}

pub(super) fn amounts(amounts: &Amounts) -> GuestAmounts {
    let Amounts { memory_bytes, cpu_ms, n_pages, n_contexts, n_tokens, host_bytes } = *amounts;
    GuestAmounts { memory_bytes, cpu_ms, n_pages, n_contexts, n_tokens, host_bytes }
}

pub(super) fn model_info(loaded: &ModelHandle, stats: &EngineStats, actor: Actor) -> ModelInfo {
    let model = loaded.model();
    // Only the operator sees where files are kept.
    let folder = model.folder.as_ref().filter(|_| is_operator(actor));
    ModelInfo {
        name: model.name.clone(),
        architecture: model.config.architecture.name().to_owned(),
        n_vocab: model.config.vocab_size as u64,
        n_positions: loaded.limits().n_positions_max as u64,
        n_parameters: model.n_parameters,
        weight_bytes: loaded.weights().n_bytes,
        dtype: loaded.weights().dtype.name().to_owned(),
        device: loaded.device().to_owned(),
        state: match loaded.failure() {
            Some(_) => "failed",
            None if loaded.is_closed() => "draining",
            None => "loaded",
        }
        .to_owned(),
        folder: folder.map(|folder| folder.display().to_string()),
        n_pages: stats.n_pages as u64,
        n_pages_free: n_pages_free(stats),
        page_bytes: loaded.limits().page_bytes as u64,
        n_contexts: stats.n_contexts as u64,
        computed: totals::computed(stats),
        busy_ms: whole_ms(stats.device_busy),
        failure: loaded.failure().map(|failure| failure.to_string()),
        ..ModelInfo::default()
    }
}

/// Lines of the log of this process.
pub(super) async fn logs(LogsAsked { number, n_newest, waits }: LogsAsked) -> Result<LogLines, ErrorBody> {
    let ring = logs::ring().ok_or_else(|| {
        ErrorBody::new(ErrorCode::Unsupported, "this daemon runs inside a program, and keeps no log")
    })?;
    let since = number.map_or(Since::Last(n_newest.unwrap_or(u64::MAX)), Since::Number);
    if let (true, Some(number)) = (waits, number) {
        ring.has(number).await;
    }
    let Batch { lines, next, end, n_missed } = ring.read(since);
    Ok(LogLines { lines, next, end, n_missed })
}

/// Pages that are to be had: one that only the prefix cache remembers is given up for a context that needs one.
pub(super) fn n_pages_free(stats: &EngineStats) -> u64 {
    (stats.n_pages_free + stats.n_pages_cached) as u64
}

/// Bytes of this process that are in memory.
pub(super) fn resident_bytes() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let n_pages: u64 = pages.split_whitespace().nth(1)?.parse().ok()?;
    Some(n_pages * rustix::param::page_size() as u64)
}
