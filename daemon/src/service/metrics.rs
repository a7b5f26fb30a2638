//! What the service reads off itself for monitoring, at the moment that it is asked.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use trellis_engine::account::Resource;
use trellis_engine::{EngineStats, ModelHandle};
use trellis_wire::{Causes, DeviceInfo};

use super::HostService;
use super::told::{add_model, device_info, n_pages_free, resident_bytes};
use crate::guest::GuestActivity;
use crate::metrics::{Exposition, SessionCounts};
use crate::tasks::blocking;

/// How long an engine may take to say how it is.
const ANSWER_TIME: Duration = Duration::from_secs(1);

impl HostService {
    pub(super) async fn exposition(&self, sees_others: bool, counts: &SessionCounts) -> Exposition {
        let listing = self.loader.models().listing();
        let mut devices: Vec<DeviceInfo> = listing.devices().iter().map(device_info).collect();
        let mut models: Vec<(ModelHandle, EngineStats)> = Vec::new();
        let asked: Vec<ModelHandle> =
            listing.loaded().iter().chain(listing.leaving().iter()).cloned().collect();
        let mut answers = Vec::new();
        for model in &asked {
            answers.push(tokio::time::timeout(ANSWER_TIME, model.stats()));
        }
        for (model, answer) in asked.iter().zip(join_all(answers).await) {
            // One that has just gone, or whose device has, can say nothing any more; and one that does not come round keeps nobody
            // from hearing of the others. Its counters stay as they were seen last.
            let Ok(Ok(stats)) = answer else { continue };
            if let Some(idx) = listing.devices().iter().position(|device| device.engine.is_of(model)) {
                add_model(&mut devices[idx], model, &stats);
            }
            self.loader.totals().see(model, &stats);
            models.push((model.clone(), stats));
        }
        for device in &mut devices {
            device.busy_ms = self.busy_seen.see(&device.name, device.busy_ms);
        }
        let mut exposition = Exposition::default();
        self.add_process(&mut exposition);
        self.add_guests(&mut exposition, counts);
        if sees_others {
            self.add_charged(&mut exposition).await;
        }
        self.reliefs.add_to(&mut exposition);
        exposition.add("trellis_models_loading", [([], self.loader.news().loading().len() as f64)]);
        self.loader.news().loads().add_to(&mut exposition);
        add_models(&mut exposition, &models);
        let totals = self.loader.totals().by_name();
        add_counters(&mut exposition, &totals);
        exposition.add_requests(&totals);
        add_devices(&mut exposition, &devices);
        self.add_computed(&mut exposition);
        exposition
    }

    fn add_process(&self, exposition: &mut Exposition) {
        exposition.add("trellis_build_info", [([env!("CARGO_PKG_VERSION")], 1.0)]);
        exposition.add("trellis_uptime_seconds", [([], self.started.elapsed().as_secs_f64())]);
        exposition.add("process_resident_memory_bytes", resident_bytes().map(|n| ([], n as f64)));
    }

    fn add_guests(&self, exposition: &mut Exposition, counts: &SessionCounts) {
        exposition.add("trellis_sessions", [([], self.n_sessions.load(Ordering::Relaxed) as f64)]);
        let guests = self.host.guests();
        let n_of = |activity| guests.iter().filter(|guest| guest.activity == activity).count() as f64;
        let states = [("running", GuestActivity::Running), ("waiting", GuestActivity::Waiting)];
        exposition.add("trellis_guests", states.map(|(state, activity)| ([state], n_of(activity))));
        counts.add_to(exposition);
        exposition.add("trellis_compiles", [([], self.host.n_compiles() as f64)]);
        exposition.add("trellis_programs", [([], self.host.programs_ready().0 as f64)]);
    }

    /// What others have, which is not for everybody.
    async fn add_charged(&self, exposition: &mut Exposition) {
        let charged_bytes = self.accounts.used(Resource::HostBytes);
        exposition.add("trellis_host_memory_charged_bytes", [([], charged_bytes as f64)]);
        if let Some(keepers) = self.loader.keepers().cloned() {
            let n_bytes = blocking(move || keepers.n_bytes(None)).await;
            exposition.add("trellis_saved_contexts_bytes", [([], n_bytes as f64)]);
        }
    }

    fn add_computed(&self, exposition: &mut Exposition) {
        let computed = self.loader.totals().all();
        for (name, number) in [
            ("trellis_steps", computed.n_steps),
            ("trellis_rows", computed.n_rows),
            ("trellis_rows_sat_out", computed.causes.n_rows_sat_out),
            ("trellis_tokens", computed.n_tokens),
            ("trellis_tokens_again", computed.n_tokens_again),
        ] {
            exposition.add(name, [([], number as f64)]);
        }
        let Causes {
            n_rows_given_up,
            n_rows_past_end,
            n_rows_failed,
            n_rows_sat_out: _,
            n_tokens_given_up,
            n_tokens_guessed_wrong,
            n_steps_waited_to_decode,
            n_steps_waited_with_prompt,
            n_steps_waited_for_pages,
            n_steps_waited_for_masks,
        } = computed.causes;
        let of = |cause, number: u64| ([cause], number as f64);
        exposition.add(
            "trellis_rows_in_vain",
            [of("given_up", n_rows_given_up), of("past_end", n_rows_past_end), of("failed", n_rows_failed)],
        );
        exposition.add(
            "trellis_tokens_in_vain",
            [of("gave_up", n_tokens_given_up), of("guessed_wrong", n_tokens_guessed_wrong)],
        );
        exposition.add(
            "trellis_steps_waited",
            [
                of("to_decode", n_steps_waited_to_decode),
                of("with_prompt", n_steps_waited_with_prompt),
                of("for_pages", n_steps_waited_for_pages),
                of("for_masks", n_steps_waited_for_masks),
            ],
        );
    }
}

fn add_models(exposition: &mut Exposition, models: &[(ModelHandle, EngineStats)]) {
    let name = |model: &ModelHandle| model.model().name.clone();
    let names: Vec<String> = models.iter().map(|(model, _)| name(model)).collect();
    let weights = models.iter().zip(&names).map(|((model, _), name)| {
        let weights = model.weights();
        ([name.as_str(), model.device(), weights.dtype.name()], weights.n_bytes as f64)
    });
    exposition.add("trellis_model_weights_bytes", weights);
    let mut each = |metric, number: fn(&EngineStats) -> f64| {
        let samples = models.iter().zip(&names).map(|((_, stats), name)| ([name.as_str()], number(stats)));
        exposition.add(metric, samples);
    };
    each("trellis_contexts", |stats| stats.n_contexts as f64);
    each("trellis_contexts_saved", |stats| stats.n_saved as f64);
    each("trellis_kv_pages_on_host", |stats| stats.n_pages_on_host as f64);
    each("trellis_contexts_waiting", |stats| stats.n_waiting as f64);
    each("vllm:num_requests_running", |stats| stats.n_runs as f64);
    each("vllm:num_requests_waiting", |stats| stats.n_runs_waiting as f64);
    // Of one whose pages were taken away there is no part.
    let with_pages = models.iter().zip(&names).filter(|((_, stats), _)| stats.n_pages > 0);
    let usage = with_pages.map(|((_, stats), name)| ([name.as_str()], n_held(stats) / stats.n_pages as f64));
    exposition.add("vllm:kv_cache_usage_perc", usage);
    let pages = models.iter().zip(&names).flat_map(|((_, stats), name)| {
        let (cached, free) = (stats.n_pages_cached as f64, stats.n_pages_free as f64);
        [("held", n_held(stats)), ("cached", cached), ("free", free)]
            .map(|(state, n_pages)| ([name.as_str(), state], n_pages))
    });
    exposition.add("trellis_kv_pages", pages);
}

/// What models have done since the daemon started, however often they were loaded.
fn add_counters(exposition: &mut Exposition, models: &BTreeMap<String, EngineStats>) {
    let mut each = |metric, number: fn(&EngineStats) -> u64| {
        exposition.add(metric, models.iter().map(|(name, stats)| ([name.as_str()], number(stats) as f64)));
    };
    each("trellis_kv_pages_given_up", |stats| stats.n_pages_given_up);
    let swapped = models.iter().flat_map(|(name, stats)| {
        [("out", stats.n_swaps_out), ("in", stats.n_swaps_in)]
            .map(|(direction, n_pages)| ([name.as_str(), direction], n_pages as f64))
    });
    exposition.add("trellis_kv_pages_swapped", swapped);
}

/// Device pages that contexts hold.
fn n_held(stats: &EngineStats) -> f64 {
    (stats.n_pages as u64).saturating_sub(n_pages_free(stats)) as f64
}

fn add_devices(exposition: &mut Exposition, devices: &[DeviceInfo]) {
    let mut each = |metric, number: fn(&DeviceInfo) -> Option<f64>| {
        let numbers = devices.iter().filter_map(|device| Some(([device.name.as_str()], number(device)?)));
        exposition.add(metric, numbers);
    };
    each("trellis_device_open_seconds", |device| Some(device.open_ms as f64 / 1e3));
    each("trellis_device_busy_seconds", |device| Some(device.busy_ms as f64 / 1e3));
    each("trellis_device_memory_bytes", |device| device.memory_bytes.map(|n| n as f64));
    each("trellis_device_memory_used_bytes", |device| device.memory_bytes_used.map(|n| n as f64));
}
