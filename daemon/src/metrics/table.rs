//! Every metric: its name, what it counts, and what it means.

/// What the numbers of a metric are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number that goes up and down.
    Gauge,
    /// A number that only grows while the daemon runs. Its samples have the ending `_total`.
    Counter,
    /// How many observations lie up to each of some bounds, and their sum.
    Histogram,
}

impl Kind {
    /// As the text formats call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, that of its family: samples of a counter have `_total` behind it.
    pub name: &'static str,
    /// What its numbers are.
    pub kind: Kind,
    /// The labels that tell its samples apart.
    pub labels: &'static [&'static str],
    /// What it means, in a sentence or two.
    pub about: &'static str,
}

impl Metric {
    /// Its unit, which its name ends with, where it has one.
    #[must_use]
    pub fn unit(&self) -> Option<&'static str> {
        ["seconds", "bytes"].into_iter().find(|unit| self.name.ends_with(&format!("_{unit}")))
    }

    /// As a query names its samples.
    #[must_use]
    pub fn sample_name(&self) -> String {
        let ending = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{}{ending}", self.name)
    }
}

const fn gauge(name: &'static str, labels: &'static [&'static str], about: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, about }
}

const fn counter(name: &'static str, labels: &'static [&'static str], about: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, labels, about }
}

const fn histogram(name: &'static str, labels: &'static [&'static str], about: &'static str) -> Metric {
    Metric { name, kind: Kind::Histogram, labels, about }
}

/// The labels of what OpenTelemetry's conventions for generative models name.
const OTEL_LABELS: [&str; 3] = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"];

/// All of them, in the order in which they are told.
pub const METRICS: &[Metric] = &[
    gauge("trellis_build_info", &["version"], "1, with the version of the daemon."),
    gauge("trellis_uptime_seconds", &[], "Since the daemon began to start."),
    gauge("process_resident_memory_bytes", &[], "Of the daemon's process that is in memory."),
    gauge("trellis_sessions", &[], "Open connections."),
    gauge("trellis_guests", &["state"], "Guests by what they are doing: running or waiting."),
    counter(
        "trellis_guests_ended",
        &["reason"],
        "Guests that ran and have ended: finished, or the error code that their client was told.",
    ),
    histogram(
        "trellis_guest_duration_seconds",
        &["reason"],
        "From a start to its end, compiling and a wait for a place included: finished, or the error code that the client was \
         told. A start that the session itself turns away, as beyond its limits or while the daemon drains, is not there.",
    ),
    gauge(
        "trellis_compiles",
        &[],
        "Components that are being compiled or read from the cache, or wait for that.",
    ),
    gauge("trellis_programs", &[], "Compiled components that are ready to start."),
    gauge(
        "trellis_host_memory_charged_bytes",
        &[],
        "Of host memory that is charged to the budgets of guests, sessions and users; not for who may not see others, nor over HTTP.",
    ),
    gauge(
        "trellis_saved_contexts_bytes",
        &[],
        "On disk of contexts that guests saved; not where none are kept on disk, nor for who may not see others, nor over HTTP.",
    ),
    counter(
        "trellis_memory_pressure_events",
        &[],
        "Times at which the machine, or the daemon's control group, was short of memory, and the daemon let go of what it could.",
    ),
    counter(
        "trellis_memory_pressure_released_bytes",
        &["what"],
        "Of host memory that went then: kv, computed again when it is needed, or programs, read from the cache again.",
    ),
    gauge("trellis_models_loading", &[], "Models that are being loaded."),
    histogram(
        "trellis_model_load_duration_seconds",
        &["outcome"],
        "From a request for a model to its end: loaded, failed, or given_up. What is loaded before the daemon serves is not \
         among it.",
    ),
    gauge(
        "trellis_model_weights_bytes",
        &["model_name", "device", "dtype"],
        "Of a loaded model's weights on its device.",
    ),
    gauge("trellis_contexts", &["model_name"], "Open contexts."),
    gauge("trellis_contexts_saved", &["model_name"], "Saved contexts that are in memory with their model."),
    gauge(
        "trellis_kv_pages",
        &["model_name", "state"],
        "KV pages on the device: held by contexts, cached for prefixes alone and given up when pages are needed, or free.",
    ),
    gauge(
        "trellis_kv_pages_on_host",
        &["model_name"],
        "KV pages that made room for others and are in host memory.",
    ),
    counter(
        "trellis_kv_pages_swapped",
        &["model_name", "direction"],
        "KV pages moved out to host memory, or back in.",
    ),
    counter(
        "trellis_kv_pages_given_up",
        &["model_name"],
        "KV pages whose contents were given up, host memory being full; they are computed again.",
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        &["model_name"],
        "The part of the KV pages that contexts hold, from 0 to 1; pages that only prefixes have count as free.",
    ),
    gauge(
        "trellis_contexts_waiting",
        &["model_name"],
        "Contexts with work that the last step had no room for, or no pages, and that wait for the next.",
    ),
    gauge(
        "vllm:num_requests_running",
        &["model_name"],
        "Requests, which are generations and streams, that have a right to the pages that they need.",
    ),
    gauge(
        "vllm:num_requests_waiting",
        &["model_name"],
        "Requests that wait for pages, or for their first step.",
    ),
    counter(
        "vllm:prompt_tokens",
        &["model_name"],
        "Tokens of prompts, as guests append them: computed, or found in the prefix cache.",
    ),
    counter("vllm:generation_tokens", &["model_name"], "Tokens that requests drew."),
    counter(
        "vllm:prefix_cache_queries",
        &["model_name"],
        "Tokens of prompts that the prefix cache was asked for.",
    ),
    counter(
        "vllm:prefix_cache_hits",
        &["model_name"],
        "Tokens of prompts that the prefix cache had, and that were not computed.",
    ),
    counter(
        "vllm:num_preemptions",
        &["model_name"],
        "Times at which a request had had its term and gave the right to its pages up to who waited.",
    ),
    counter("vllm:spec_decode_num_drafts", &["model_name"], "Guesses that the model verified."),
    counter("vllm:spec_decode_num_draft_tokens", &["model_name"], "Tokens of those guesses."),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        &["model_name"],
        "Tokens of those guesses that were right.",
    ),
    counter(
        "vllm:request_success",
        &["model_name", "finished_reason"],
        "Requests that have ended: stop, length, abort if their guests went on otherwise, or error.",
    ),
    histogram(
        "vllm:time_to_first_token_seconds",
        &["model_name"],
        "From the turn in which the engine takes up a request to its first token: the wait for a place in a step is in it, and \
         what is left to compute of the prompt. Requests that fail or are given up later are there.",
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        &["model_name"],
        "From one token to the next, of generations that run to their end without their guests in between. Tokens that come \
         together count as one.",
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        &["model_name"],
        "Of such generations that have ended well, the mean time of a token after the first.",
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        &["model_name"],
        "From the turn in which the engine takes up a request to its end, of whatever kind. The pace of a stream is its guest's.",
    ),
    histogram(
        "vllm:request_prompt_tokens",
        &["model_name"],
        "Tokens of the context when the request began, whether computed for it, before it, or found.",
    ),
    histogram("vllm:request_generation_tokens", &["model_name"], "Tokens that a request drew."),
    histogram("vllm:iteration_tokens_total", &["model_name"], "Tokens computed in a step."),
    histogram(
        "gen_ai_server_request_duration_seconds",
        &["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type"],
        "As vllm:e2e_request_latency_seconds: with error_type cancelled where the guest went on otherwise, failed where it \
         failed, and without one where all was well.",
    ),
    histogram(
        "gen_ai_server_time_to_first_token_seconds",
        &OTEL_LABELS,
        "As vllm:time_to_first_token_seconds, of requests that have ended well.",
    ),
    histogram(
        "gen_ai_server_time_per_output_token_seconds",
        &OTEL_LABELS,
        "As vllm:request_time_per_output_token_seconds.",
    ),
    histogram(
        "gen_ai_client_token_usage",
        &["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_token_type"],
        "As vllm:request_prompt_tokens, of type input, and vllm:request_generation_tokens, of type output.",
    ),
    gauge("trellis_device_open_seconds", &["device"], "Since a device was opened."),
    counter(
        "trellis_device_busy_seconds",
        &["device"],
        "For which a device has computed; time between steps does not count.",
    ),
    gauge(
        "trellis_device_memory_bytes",
        &["device"],
        "That models may take of a device; not where that is not known.",
    ),
    gauge(
        "trellis_device_memory_used_bytes",
        &["device"],
        "That models use of a device: their weights, and KV pages that contexts hold.",
    ),
    counter(
        "trellis_steps",
        &[],
        "Steps computed, of all models since the daemon started, those that are gone included.",
    ),
    counter("trellis_rows", &[], "Rows of those steps: one for each context in a step."),
    counter(
        "trellis_rows_in_vain",
        &["cause"],
        "Rows computed in vain: given_up by their guest, past_end, or failed.",
    ),
    counter("trellis_rows_sat_out", &[], "Rows that drew nothing because their masks had not come."),
    counter(
        "trellis_tokens",
        &[],
        "Tokens computed, those of prompts, those in vain and those computed again included.",
    ),
    counter(
        "trellis_tokens_in_vain",
        &["cause"],
        "Tokens computed in vain: decoded ahead of a guest that gave_up on them, or guessed_wrong.",
    ),
    counter(
        "trellis_tokens_again",
        &[],
        "Tokens computed again, after their KV had been given up for want of pages.",
    ),
    counter(
        "trellis_steps_waited",
        &["cause"],
        "Steps that went by while a context could have been in them, summed over contexts: to_decode, with_prompt, for_pages, \
         or for_masks.",
    ),
];

/// The metric of this name.
///
/// # Panics
/// A mistake of ours: the table has none.
pub(super) fn metric(name: &str) -> &'static Metric {
    METRICS
        .iter()
        .find(|metric| metric.name == name)
        .unwrap_or_else(|| panic!("the table has no metric {name}"))
}
