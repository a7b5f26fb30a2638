//! Requests, as vLLM and the conventions of OpenTelemetry for generative models count them.
//!
//! A request is a run: a generation or a stream of a context, whose prompt is the context as it was when the run began. Steps in
//! which a guest draws by itself, beam searches and questions are none.

use std::collections::BTreeMap;

use trellis_engine::{Distribution, EngineStats, RunEnd, RunStats};

use super::exposition::Exposition;

/// vLLM's bounds, in seconds and in tokens.
mod vllm {
    pub(super) const FIRST: &[f64] = &[
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
        40.0, 80.0, 160.0, 640.0, 2560.0,
    ];
    pub(super) const EACH: &[f64] = &[
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
        80.0,
    ];
    pub(super) const WHOLE: &[f64] = &[
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
        480.0, 960.0, 1920.0, 7680.0,
    ];
    pub(super) const TOKENS: &[f64] = &[
        1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5,
        1e6,
    ];
    pub(super) const STEP: &[f64] =
        &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
}

/// The bounds that OpenTelemetry's conventions recommend, in seconds and in tokens.
mod otel {
    pub(super) const FIRST: &[f64] =
        &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
    pub(super) const EACH: &[f64] =
        &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
    pub(super) const WHOLE: &[f64] =
        &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
    pub(super) const TOKENS: &[f64] = &[
        1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0,
        16777216.0, 67108864.0,
    ];
}

/// `gen_ai.operation.name`: a run goes on from the tokens that a context has.
const OPERATION: &str = "text_completion";
/// `gen_ai.provider.name`.
const PROVIDER: &str = "trellis";

/// Ends, and what `error.type` says of them: nothing where all was well.
const ENDS: [(&[RunEnd], &str); 3] =
    [(&[RunEnd::Stop, RunEnd::Length], ""), (&[RunEnd::Abort], "cancelled"), (&[RunEnd::Error], "failed")];

impl Exposition {
    /// Adds what the models of these names have counted of requests.
    pub(crate) fn add_requests(&mut self, models: &BTreeMap<String, EngineStats>) {
        self.add_request_counters(models);
        let runs = |of: fn(&RunStats) -> Distribution| {
            models.iter().map(move |(name, stats)| ([name.as_str()], of(&stats.runs)))
        };
        self.add_observed("vllm:time_to_first_token_seconds", vllm::FIRST, runs(RunStats::first));
        self.add_observed("vllm:inter_token_latency_seconds", vllm::EACH, runs(RunStats::gap));
        self.add_observed("vllm:request_time_per_output_token_seconds", vllm::EACH, runs(RunStats::each));
        let whole = runs(|stats| stats.whole(&RunEnd::ALL));
        self.add_observed("vllm:e2e_request_latency_seconds", vllm::WHOLE, whole);
        self.add_observed("vllm:request_prompt_tokens", vllm::TOKENS, runs(RunStats::n_begun_with));
        self.add_observed("vllm:request_generation_tokens", vllm::TOKENS, runs(RunStats::n_drawn));
        self.add_observed("vllm:iteration_tokens_total", vllm::STEP, runs(RunStats::step));
        let of_otel = |of: fn(&RunStats) -> Distribution| {
            models.iter().map(move |(name, stats)| ([OPERATION, PROVIDER, name.as_str()], of(&stats.runs)))
        };
        let first = of_otel(RunStats::first_of_finished);
        self.add_observed("gen_ai_server_time_to_first_token_seconds", otel::FIRST, first);
        self.add_observed("gen_ai_server_time_per_output_token_seconds", otel::EACH, of_otel(RunStats::each));
        let whole = models.iter().flat_map(|(name, stats)| {
            ENDS.map(|(ends, error)| ([OPERATION, PROVIDER, name.as_str(), error], stats.runs.whole(ends)))
        });
        self.add_observed("gen_ai_server_request_duration_seconds", otel::WHOLE, whole);
        let tokens = models.iter().flat_map(|(name, stats)| {
            [("input", stats.runs.n_begun_with()), ("output", stats.runs.n_drawn())]
                .map(|(kind, tokens)| ([OPERATION, PROVIDER, name.as_str(), kind], tokens))
        });
        self.add_observed("gen_ai_client_token_usage", otel::TOKENS, tokens);
    }
}

impl Exposition {
    fn add_request_counters(&mut self, models: &BTreeMap<String, EngineStats>) {
        let mut each = |metric, number: fn(&EngineStats) -> u64| {
            self.add(metric, models.iter().map(|(name, stats)| ([name.as_str()], number(stats) as f64)));
        };
        // A token of a prompt is looked for in the cache, and computed where it is not there.
        let n_of_prompts = |stats: &EngineStats| stats.n_tokens_of_prompts + stats.n_tokens_cached;
        each("vllm:prompt_tokens", n_of_prompts);
        each("vllm:generation_tokens", |stats| stats.runs.n_tokens_drawn());
        each("vllm:prefix_cache_queries", n_of_prompts);
        each("vllm:prefix_cache_hits", |stats| stats.n_tokens_cached);
        each("vllm:num_preemptions", |stats| stats.n_preempted);
        each("vllm:spec_decode_num_drafts", |stats| stats.n_guesses);
        each("vllm:spec_decode_num_draft_tokens", |stats| stats.n_tokens_guessed);
        each("vllm:spec_decode_num_accepted_tokens", |stats| stats.n_tokens_guessed_right);
        let ended = models.iter().flat_map(|(name, stats)| {
            RunEnd::ALL.map(|end| {
                let n_ended: u64 = stats.runs.whole(&[end]).counts(&[]).iter().sum();
                ([name.as_str(), end.name()], n_ended as f64)
            })
        });
        self.add("vllm:request_success", ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::TextFormat;

    #[test]
    fn both_families_are_told_of_a_model_that_has_run_nothing() {
        let models = BTreeMap::from([("m".to_owned(), EngineStats::default())]);
        let mut exposition = Exposition::default();
        exposition.add_requests(&models);
        let text = exposition.text(TextFormat::Prometheus);
        let of_otel = "gen_ai_operation_name=\"text_completion\",gen_ai_provider_name=\"trellis\",gen_ai_request_model=\"m\"";
        for sample in [
            "vllm:request_success_total{model_name=\"m\",finished_reason=\"abort\"} 0".to_owned(),
            "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"2560\"} 0".to_owned(),
            "vllm:iteration_tokens_total_count{model_name=\"m\"} 0".to_owned(),
            format!("gen_ai_server_request_duration_seconds_count{{{of_otel}}} 0"),
            format!("gen_ai_server_request_duration_seconds_count{{{of_otel},error_type=\"failed\"}} 0"),
            format!("gen_ai_client_token_usage_count{{{of_otel},gen_ai_token_type=\"input\"}} 0"),
        ] {
            assert!(text.contains(&format!("\n{sample}\n")), "{sample} in {text}");
        }
        let first =
            text.lines().filter(|line| line.starts_with("gen_ai_server_time_to_first_token_seconds_bucket"));
        assert_eq!(first.count(), 17, "OpenTelemetry's bounds, not vLLM's");
    }
}
