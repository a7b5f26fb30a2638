//! What a mix showed, for people and for programs.

use serde::Serialize;
use trellis_engine::Cause;

use super::file::Mix;
use super::load::{Kind, Load};
use super::phase::{EngineDelta, LoadSeen, Seen};
use super::tally::Gaps;
use crate::cli::bench::speed::ms;
use crate::cli::table::{Align, Table};

/// All phases, and on what they were run.
#[derive(Debug, Serialize)]
pub(super) struct MixReport {
    pub(super) mix: String,
    pub(super) about: String,
    pub(super) device: String,
    pub(super) model: String,
    pub(super) dtype: &'static str,
    pub(super) step_rows: usize,
    pub(super) step_tokens: usize,
    pub(super) measure_s: f64,
    /// Greedy tokens that are compared in each phase.
    pub(super) n_verified: usize,
    pub(super) phases: Vec<PhaseReport>,
}

/// One phase.
#[derive(Debug, Serialize)]
pub(super) struct PhaseReport {
    pub(super) name: String,
    /// Greedy tokens that were the same beside the loads as alone.
    n_equal: usize,
    pub(super) loads: Vec<LoadReport>,
    /// For several loads that are each held against themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    sum_of_shares: Option<f64>,
    engine: EngineReport,
}

/// One load in one phase.
#[derive(Debug, Serialize)]
pub(super) struct LoadReport {
    pub(super) name: String,
    kind: &'static str,
    count: usize,
    n_prompt: usize,
    /// All members together: of decoding the median over the windows, of prompts the mean.
    pub(super) tokens_per_s: f64,
    tokens_per_s_of_windows: Vec<f64>,
    /// From one token of a member, or of a hypothesis, to its next, or of a prompt to the next of its tokens.
    ms_per_token: f64,
    /// Between tokens where they are pulled; of prompts, from sending one to the token after it.
    pub(super) gaps: Option<Gaps>,
    /// A member's or a hypothesis's rate over that of one of its measure alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) share: Option<f64>,
    /// By how much the mean gap is longer than that of its measure alone, in µs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) us_more: Option<f64>,
    /// The median gap over that of its measure alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    gap_ratio: Option<f64>,
    /// The gap at the 99th percentile over the median gap of its measure alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_ratio: Option<f64>,
}

/// What the engine did. What it does not tell is absent.
#[derive(Debug, Serialize)]
struct EngineReport {
    seconds: f64,
    n_steps: u64,
    ms_per_step: f64,
    n_tokens: u64,
    tokens_per_step: f64,
    /// Tokens computed for each that was pulled, where all loads decode.
    computed_per_pulled: Option<f64>,
    n_tokens_cached: u64,
    n_tokens_in_vain: u64,
    n_tokens_again: u64,
    n_swaps_out: u64,
    rows_per_step: f64,
    n_rows_in_vain: u64,
    n_rows_sat_out: u64,
    device_idle_share: f64,
    /// What a step takes of the device, without what the device waits for between two.
    device_ms_per_step: f64,
}

impl EngineReport {
    fn of(seen: &Seen) -> Self {
        let EngineDelta { elapsed, begin, end } = &seen.stats;
        let causes = end.causes.combined(&begin.causes, |end, begin| end - begin);
        let n_steps = end.n_steps - begin.n_steps;
        let n_tokens = end.n_tokens - begin.n_tokens;
        let n_pulled: Option<usize> = seen.loads.iter().map(|load| load.n_pulled).sum();
        let per_step = |n: f64| n / n_steps.max(1) as f64;
        // A step may begin before the measured time and be counted within it.
        let busy_s = (end.device_busy - begin.device_busy).as_secs_f64();
        Self {
            seconds: elapsed.as_secs_f64(),
            n_steps,
            ms_per_step: per_step(elapsed.as_secs_f64() * 1e3),
            n_tokens,
            tokens_per_step: per_step(n_tokens as f64),
            computed_per_pulled: n_pulled
                .filter(|&n_pulled| n_pulled > 0)
                .map(|n_pulled| n_tokens as f64 / n_pulled as f64),
            n_tokens_cached: end.n_tokens_cached - begin.n_tokens_cached,
            n_tokens_in_vain: causes.n_tokens_in_vain(),
            n_tokens_again: end.n_tokens_again - begin.n_tokens_again,
            n_swaps_out: end.n_swaps_out - begin.n_swaps_out,
            rows_per_step: per_step((end.n_rows - begin.n_rows) as f64),
            n_rows_in_vain: causes.n_rows_in_vain(),
            n_rows_sat_out: causes[Cause::RowsSatOut],
            device_idle_share: (1.0 - busy_s / elapsed.as_secs_f64()).max(0.0),
            device_ms_per_step: per_step(busy_s * 1e3),
        }
    }

    fn render(&self) -> String {
        format!(
            "engine    {} steps of {} ms, {:.1} tokens each{}; tokens in vain {}, cached {}; again {}, pages \
             moved out {}\n          rows a step {:.1}; rows in vain {}, sat out {}; device idle {:.1}%, at work {} ms a step\n",
            self.n_steps,
            ms(self.ms_per_step),
            self.tokens_per_step,
            self.computed_per_pulled.map_or(String::new(), |n| format!(", {n:.3} computed for each pulled")),
            self.n_tokens_in_vain,
            self.n_tokens_cached,
            self.n_tokens_again,
            self.n_swaps_out,
            self.rows_per_step,
            self.n_rows_in_vain,
            self.n_rows_sat_out,
            self.device_idle_share * 100.0,
            ms(self.device_ms_per_step),
        )
    }
}

impl Load {
    fn kind_name(&self) -> &'static str {
        match self.kind {
            Kind::Streams(_) => "streams",
            Kind::Prompts(_) => "prompts",
            Kind::Stepping(_) => "stepping",
            Kind::Speculation(_) => "speculation",
            Kind::Beams(_) => "beams",
            Kind::Clients(_) => "clients",
            Kind::Loads(_) => "loads",
        }
    }
}

impl MixReport {
    /// Adds the phases of a mix, in their order.
    pub(super) fn extend(&mut self, mix: &Mix, all: &[Seen]) {
        for (phase, seen) in mix.phases.iter().zip(all) {
            let loads: Vec<LoadReport> = seen.loads.iter().map(|load| report(load, mix, all, seen)).collect();
            // Shares of different wholes have no sum.
            let is_own = |load: &LoadSeen| mix.loads[load.idx].against.is_none();
            let shares: Option<Vec<f64>> = match seen.loads.iter().all(is_own) {
                true => loads.iter().map(|load| load.share).collect(),
                false => None,
            };
            self.phases.push(PhaseReport {
                name: phase.name.clone(),
                n_equal: seen.n_equal,
                sum_of_shares: shares.filter(|shares| shares.len() > 1).map(|shares| shares.iter().sum()),
                engine: EngineReport::of(seen),
                loads,
            });
        }
    }

    pub(super) fn render(&self) -> String {
        let mut text = format!(
            "device    {}\nmodel     {}, {}\nmix       {}: {}\nsteps     of at most {} rows and {} tokens\n",
            self.device, self.model, self.dtype, self.mix, self.about, self.step_rows, self.step_tokens
        );
        for phase in &self.phases {
            text.push_str(&phase.render(self));
        }
        text
    }
}

/// What a load showed, held against its measure: the first phase in which that load was alone.
fn report(load: &LoadSeen, mix: &Mix, all: &[Seen], seen: &Seen) -> LoadReport {
    let Load { name, count, n_prompt, against, .. } = &mix.loads[load.idx];
    let measure_name = against.as_ref().unwrap_or(name);
    let measure = all.iter().find(|other| {
        let is_alone = other.loads.len() == 1 && mix.loads[other.loads[0].idx].name == *measure_name;
        is_alone && !std::ptr::eq(*other, seen)
    });
    let measure = measure.map(|other| &other.loads[0]);
    let both_gaps = measure.and_then(|measure| Some((load.gaps?, measure.gaps?)));
    let n_streams = if mix.loads[load.idx].is_decoding() { mix.loads[load.idx].n_streams() } else { 1 };
    let pace = |load: &LoadSeen| load.tokens_per_s / mix.loads[load.idx].n_streams() as f64;
    LoadReport {
        name: name.clone(),
        kind: mix.loads[load.idx].kind_name(),
        count: *count,
        n_prompt: *n_prompt,
        tokens_per_s: load.tokens_per_s,
        tokens_per_s_of_windows: load.rates.clone(),
        ms_per_token: n_streams as f64 * 1e3 / load.tokens_per_s,
        gaps: load.gaps,
        share: measure.map(|measure| pace(load) / pace(measure)),
        us_more: both_gaps.map(|(own, measure)| (own.mean_ms - measure.mean_ms) * 1e3),
        gap_ratio: both_gaps.map(|(own, measure)| own.p50_ms / measure.p50_ms),
        p99_ratio: both_gaps.map(|(own, measure)| own.p99_ms / measure.p50_ms),
    }
}

impl PhaseReport {
    fn render(&self, report: &MixReport) -> String {
        let mut table = Table::new([
            ("LOAD", Align::Left),
            ("TOKENS/S", Align::Right),
            ("MS A TOKEN", Align::Right),
            ("GAP MEAN MS", Align::Right),
            ("P50", Align::Right),
            ("P90", Align::Right),
            ("P99", Align::Right),
            ("LONGEST", Align::Right),
            ("SHARE OF PACE", Align::Right),
            ("MORE THAN ALONE US", Align::Right),
            ("P50 OF ALONE", Align::Right),
            ("P99 OF P50 ALONE", Align::Right),
        ]);
        let ratio = |ratio: Option<f64>| ratio.map_or(String::new(), |ratio| format!("{ratio:.2} x"));
        for load in &self.loads {
            let gap = |of: fn(&Gaps) -> f64| load.gaps.as_ref().map_or(String::new(), |gaps| ms(of(gaps)));
            table.push([
                format!("{}: {} {} of {}", load.name, load.count, load.kind, load.n_prompt),
                format!("{:.1}", load.tokens_per_s),
                ms(load.ms_per_token),
                load.gaps.as_ref().map_or(String::new(), |gaps| format!("{:.4}", gaps.mean_ms)),
                gap(|gaps| gaps.p50_ms),
                gap(|gaps| gaps.p90_ms),
                gap(|gaps| gaps.p99_ms),
                gap(|gaps| gaps.longest_ms),
                load.share.map_or(String::new(), |share| format!("{:.1}%", share * 100.0)),
                load.us_more.map_or(String::new(), |us| format!("{us:+.1}")),
                ratio(load.gap_ratio),
                ratio(load.p99_ratio),
            ]);
        }
        let sum = self.sum_of_shares.map(|sum| format!("shares    {sum:.3} in all\n"));
        format!(
            "\n== {}\nverified  {} of {} greedy tokens are the same beside these loads as alone\n{}{}{}",
            self.name,
            self.n_equal,
            report.n_verified,
            table.render(),
            sum.unwrap_or_default(),
            self.engine.render()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use trellis_engine::{Causes, EngineStats};

    use super::*;
    use crate::cli::bench::mix::tally::Mark;

    /// A load that gave a token every so many µs, 100 times, in one window.
    fn seen_every(idx: usize, us: u64) -> Seen {
        let begin = Instant::now();
        let gap = Duration::from_micros(us);
        let marks: Vec<Mark> = (0..100).map(|i| Mark { at: begin + i * gap, gap: Some(gap) }).collect();
        let gaps = Gaps::of(&marks, &[begin, begin + 100 * gap]);
        let tokens_per_s = 1e6 / us as f64;
        let load = LoadSeen { idx, rates: vec![tokens_per_s], tokens_per_s, n_pulled: Some(100), gaps };
        let elapsed = 100 * gap;
        let stats = EngineDelta { elapsed, begin: EngineStats::default(), end: EngineStats::default() };
        Seen { loads: vec![load], stats, n_equal: 16 }
    }

    #[test]
    fn a_microsecond_more_a_token_is_seen() {
        let load = |name: &str, more: &str| {
            format!("[[load]]\nkind = \"streams\"\nname = \"{name}\"\nprompt = 8\n{more}")
        };
        let text =
            format!("together = false\n{}{}", load("plain", ""), load("costly", "against = \"plain\"\n"));
        let mix = Mix::parse(&text).expect("valid");
        let mut report = MixReport {
            mix: "x".to_owned(),
            about: String::new(),
            device: "cpu".to_owned(),
            model: "tiny".to_owned(),
            dtype: "f32",
            step_rows: 1,
            step_tokens: 1,
            measure_s: 1.0,
            n_verified: 16,
            phases: Vec::new(),
        };
        report.extend(&mix, &[seen_every(0, 123_456), seen_every(1, 123_457)]);
        let json = serde_json::to_value(&report).expect("JSON");
        let costly = &json["phases"][1]["loads"][0];
        let us_more = costly["us_more"].as_f64().expect("a number");
        assert!((us_more - 1.0).abs() < 1e-6, "{costly}");
        assert!((costly["gaps"]["mean_ms"].as_f64().expect("a number") - 123.457).abs() < 1e-9, "{costly}");
        assert!(json["phases"][0]["loads"][0].get("us_more").is_none(), "nothing is more than itself");
        let text = report.render();
        for shown in ["MORE THAN ALONE US", "123.4560", "123.4570", "+1.0"] {
            assert!(text.contains(shown), "{shown} in {text}");
        }
    }

    #[test]
    fn rows_in_vain_and_rows_that_sat_out_are_those_of_the_measured_time() {
        let stats = |n_rows, n_in_vain, n_sat_out| {
            let mut causes = Causes::default();
            causes.add(Cause::RowsPastEnd, n_in_vain);
            causes.add(Cause::RowsSatOut, n_sat_out);
            EngineStats { n_rows, causes, ..EngineStats::default() }
        };
        let (begin, mut end) = (stats(100, 30, 50), stats(200, 33, 57));
        (end.n_steps, end.device_busy) = (10, Duration::from_millis(900));
        let stats = EngineDelta { elapsed: Duration::from_secs(1), begin, end };
        let report = EngineReport::of(&Seen { loads: Vec::new(), stats, n_equal: 0 });
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!((&json["n_rows_in_vain"], &json["n_rows_sat_out"]), (&3.into(), &7.into()), "{json}");
        let text = report.render();
        assert!(
            text.contains("rows in vain 3, sat out 7; device idle 10.0%, at work 90.00 ms a step"),
            "{text}"
        );
    }
}
