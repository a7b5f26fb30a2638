//! What was measured, for people and for programs.

use serde::Serialize;
use trellis_cuda::DeviceLimits;

use super::decode::Agreement;
use super::guest::GuestCost;
use super::peers::{Peers, RATIO_MAX};
use crate::cli::bench::BenchError;
use crate::cli::bench::samples::{quantile, sorted};
use crate::cli::output::bytes;
use crate::cli::table::{Align, Table};

/// What the device can do at most.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Limits {
    pub(super) read_bytes_per_s: f64,
    pub(super) copy_bytes_per_s: f64,
    pub(super) product_flops: f64,
    pub(super) host_to_device_bytes_per_s: f64,
}

impl From<DeviceLimits> for Limits {
    fn from(limits: DeviceLimits) -> Self {
        let DeviceLimits { read_bytes_per_s, copy_bytes_per_s, product_flops, host_to_device_bytes_per_s } =
            limits;
        Self { read_bytes_per_s, copy_bytes_per_s, product_flops, host_to_device_bytes_per_s }
    }
}

impl Limits {
    pub(super) fn render(&self) -> String {
        format!(
            "limits    {:.2} TB/s read, {:.2} TB/s copied, {:.0} TFLOP/s bf16, {:.1} GB/s from the host\n",
            self.read_bytes_per_s / 1e12,
            self.copy_bytes_per_s / 1e12,
            self.product_flops / 1e12,
            self.host_to_device_bytes_per_s / 1e9,
        )
    }
}

/// What a step has to do at least, and by what that is bound.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Bound {
    Bytes(f64),
    Operations(f64),
}

impl Bound {
    fn floor_ms(self, limits: &Limits) -> f64 {
        match self {
            Self::Bytes(n) => n / limits.read_bytes_per_s * 1e3,
            Self::Operations(n) => n / limits.product_flops * 1e3,
        }
    }

    fn rate(self, ms: f64) -> f64 {
        let (Self::Bytes(n) | Self::Operations(n)) = self;
        n / ms * 1e3
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Bytes(_) => "B/s",
            Self::Operations(_) => "FLOP/s",
        }
    }
}

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(super) enum Case {
    /// A token for each context.
    Decode { n_contexts: usize, n_prompt: usize },
    /// A prompt, and the token after it.
    Prefill { n_prompt: usize },
}

impl Case {
    /// `llama-3.1-8b-b32-decode`, `llama-3.1-8b-p2048-prefill`
    pub(super) fn name(self, model: &str) -> String {
        let model = model.to_lowercase();
        match self {
            Self::Decode { n_contexts, .. } => format!("{model}-b{n_contexts}-decode"),
            Self::Prefill { n_prompt } => format!("{model}-p{n_prompt}-prefill"),
        }
    }

    fn title(self) -> String {
        match self {
            Self::Decode { n_contexts: 1, n_prompt } => format!("decode, 1 context of {n_prompt} and more"),
            Self::Decode { n_contexts, n_prompt } => {
                format!("decode, {n_contexts} contexts of {n_prompt} and more")
            }
            Self::Prefill { n_prompt } => format!("prompt of {n_prompt}, to its first token"),
        }
    }

    fn n_tokens(self) -> usize {
        match self {
            Self::Decode { n_contexts, .. } => n_contexts,
            Self::Prefill { n_prompt } => n_prompt,
        }
    }
}

/// One case, as programs get it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// As `--peers` names it.
    what: String,
    #[serde(flatten)]
    case: Case,
    /// Of a step, or of a prompt; the median.
    ms: f64,
    /// Between which half of the samples lie.
    quartiles_ms: [f64; 2],
    n_samples: usize,
    tokens_per_s: f64,
    needed: Bound,
    reached_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_ms: Option<f64>,
    /// The floor over the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    share_of_floor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_ms: Option<f64>,
    /// Our time over the peer's.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agreement: Option<Agreement>,
}

/// All rows, and on what they were taken.
#[derive(Debug, Serialize)]
pub(super) struct SpeedReport {
    pub(super) device: String,
    pub(super) model: String,
    pub(super) dtype: &'static str,
    pub(super) weight_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) limits: Option<Limits>,
    pub(super) rows: Vec<Row>,
    pub(super) guests: Vec<GuestCost>,
    #[serde(skip)]
    pub(super) peers: Option<Peers>,
}

impl SpeedReport {
    /// Adds a case.
    ///
    /// # Panics
    /// There is no sample.
    pub(super) fn push(
        &mut self,
        case: Case,
        samples_ms: Vec<f64>,
        needed: Bound,
        agreement: Option<Agreement>,
    ) {
        let samples_ms = sorted(samples_ms);
        let ms = quantile(&samples_ms, 0.5);
        let what = case.name(&self.model);
        let floor_ms = self.limits.map(|limits| needed.floor_ms(&limits));
        let peer_ms = self.peers.as_ref().and_then(|peers| peers.ms(&what));
        self.rows.push(Row {
            what,
            case,
            ms,
            quartiles_ms: [quantile(&samples_ms, 0.25), quantile(&samples_ms, 0.75)],
            n_samples: samples_ms.len(),
            tokens_per_s: case.n_tokens() as f64 / ms * 1e3,
            needed,
            reached_per_s: needed.rate(ms),
            floor_ms,
            share_of_floor: floor_ms.map(|floor_ms| floor_ms / ms),
            peer_ms,
            peer_ratio: peer_ms.map(|peer_ms| ms / peer_ms),
            agreement,
        });
    }

    /// # Errors
    /// A row is slower than its peer by more than is allowed.
    pub(super) fn check_peers(&self) -> Result<(), BenchError> {
        let is_slow = |row: &&Row| row.peer_ratio.is_some_and(|ratio| ratio.is_nan() || ratio > RATIO_MAX);
        let show = |row: &Row| format!("{} ({:.2})", row.what, row.peer_ratio.unwrap_or(f64::NAN));
        let rows: Vec<String> = self.rows.iter().filter(is_slow).map(show).collect();
        if rows.is_empty() { Ok(()) } else { Err(BenchError::SlowerThanPeers { rows, limit: RATIO_MAX }) }
    }

    pub(super) fn render(&self) -> String {
        let mut text = format!(
            "device    {}\nmodel     {}, {}, {} of weights\n",
            self.device,
            self.model,
            self.dtype,
            bytes(self.weight_bytes)
        );
        text.extend(self.limits.map(|limits| limits.render()));
        for row in &self.rows {
            text.extend(row.agreement.map(|agreement| row.verified(agreement)));
        }
        let mut table = Table::new([
            ("WHAT", Align::Left),
            ("MS", Align::Right),
            ("QUARTILES", Align::Right),
            ("TOKENS/S", Align::Right),
            ("REACHED", Align::Right),
            ("FLOOR MS", Align::Right),
            ("SHARE", Align::Right),
        ]);
        for row in &self.rows {
            table.push([
                row.case.title(),
                ms(row.ms),
                format!("{} to {}", ms(row.quartiles_ms[0]), ms(row.quartiles_ms[1])),
                format!("{:.0}", row.tokens_per_s),
                rate(row.reached_per_s, row.needed.unit()),
                row.floor_ms.map_or(String::new(), ms),
                row.share_of_floor.map_or(String::new(), percent),
            ]);
        }
        if !self.rows.is_empty() {
            text.push_str(&format!("\n{}", table.render()));
        }
        for part in [self.render_peers(), self.render_guests()].into_iter().flatten() {
            text.push_str(&format!("\n{part}"));
        }
        text
    }

    fn render_peers(&self) -> Option<String> {
        let mut table = Table::new([
            ("AGAINST PEERS", Align::Left),
            ("MS", Align::Right),
            ("BEST PEER MS", Align::Right),
            ("RATIO", Align::Right),
        ]);
        self.peers.as_ref()?;
        for row in &self.rows {
            let (peer, ratio) = match (row.peer_ms, row.peer_ratio) {
                (Some(peer_ms), Some(ratio)) => (ms(peer_ms), format!("{ratio:.2}")),
                _ => ("no peer".to_owned(), String::new()),
            };
            table.push([row.what.clone(), ms(row.ms), peer, ratio]);
        }
        Some(table.render())
    }

    fn render_guests(&self) -> Option<String> {
        if self.guests.is_empty() {
            return None;
        }
        let mut table = Table::new([
            ("STREAMS OF GUESTS", Align::Left),
            ("ENGINE µs", Align::Right),
            ("GUESTS µs", Align::Right),
            ("MORE µs", Align::Right),
            ("MORE", Align::Right),
            ("SAME TOKENS", Align::Right),
        ]);
        for cost in &self.guests {
            table.push([
                if cost.n_contexts == 1 {
                    "1 guest".to_owned()
                } else {
                    format!("{} guests", cost.n_contexts)
                },
                format!("{:.1}", cost.engine_us),
                format!("{:.1}", cost.guest_us),
                format!("{:.1}", cost.difference_us),
                format!("{:.1}%", cost.difference_percent),
                format!("{} of {}", cost.n_equal, cost.n_tokens),
            ]);
        }
        Some(table.render())
    }
}

impl Row {
    fn verified(&self, agreement: Agreement) -> String {
        let Agreement { n_tokens, n_equal, mean, p99, regret } = agreement;
        let Case::Decode { n_contexts, .. } = self.case else { return String::new() };
        let place = if n_contexts == 1 { "again" } else { &format!("in a batch of {n_contexts}") };
        let differences = match mean == 0.0 && regret == 0.0 {
            true => String::new(),
            false => format!(
                "; log-probabilities differ by {mean:.3} nat in the mean, {p99:.3} at the 99th percentile, choices by \
                 {regret:.3}"
            ),
        };
        format!(
            "verified  {n_equal} of {n_tokens} greedy tokens are the same alone and {place}{differences}\n"
        )
    }
}

/// Four digits that mean something.
pub(crate) fn ms(ms: f64) -> String {
    match ms.abs() {
        0.0..1.0 => format!("{ms:.4}"),
        1.0..10.0 => format!("{ms:.3}"),
        10.0..100.0 => format!("{ms:.2}"),
        _ => format!("{ms:.1}"),
    }
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Three digits, with the prefix that they need.
pub(super) fn rate(per_s: f64, unit: &str) -> String {
    let (scaled, prefix) = if per_s >= 1e12 { (per_s / 1e12, 'T') } else { (per_s / 1e9, 'G') };
    let digits = match scaled {
        0.0..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    format!("{scaled:.digits$} {prefix}{unit}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn report(peers: Option<Peers>) -> SpeedReport {
        let limits = Limits {
            read_bytes_per_s: 3e12,
            copy_bytes_per_s: 2.9e12,
            product_flops: 8e14,
            host_to_device_bytes_per_s: 5e10,
        };
        SpeedReport {
            device: "a card".to_owned(),
            model: "llama-3.1-8b".to_owned(),
            dtype: "bf16",
            weight_bytes: 16_060_522_496,
            limits: Some(limits),
            rows: Vec::new(),
            guests: Vec::new(),
            peers,
        }
    }

    #[test]
    fn rows_are_held_against_their_floors() {
        let mut report = report(None);
        let agreement = Agreement { n_tokens: 512, n_equal: 500, mean: 0.01, p99: 0.05, regret: 0.02 };
        let decode = Case::Decode { n_contexts: 32, n_prompt: 128 };
        report.push(decode, vec![8.0, 6.0, 7.0], Bound::Bytes(15e9), Some(agreement));
        report.push(Case::Prefill { n_prompt: 2048 }, vec![50.0], Bound::Operations(30e12), None);
        assert_eq!(report.rows[0].what, "llama-3.1-8b-b32-decode");
        assert_eq!((report.rows[0].ms, report.rows[0].floor_ms), (7.0, Some(5.0)));
        assert_eq!(report.rows[1].share_of_floor, Some(0.75));
        let text = report.render();
        for part in [
            "3.00 TB/s read",
            "decode, 32 contexts of 128 and more",
            "7.000",
            "4571",
            "2.14 TB/s",
            "5.000",
            "71%",
            "prompt of 2048",
            "600 TFLOP/s",
            "75%",
            "500 of 512",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("PEER"));
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!(json["rows"][0]["kind"], "decode");
        assert_eq!(json["rows"][1]["needed"]["operations"], 30e12);
        assert!(json["rows"][0].get("peer_ms").is_none());
        report.check_peers().expect("no peers, no loss");
    }

    #[test]
    fn who_is_slower_than_a_peer_is_named() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let lines = "{\"what\":\"llama-3.1-8b-b1-decode\",\"ms\":6.0}\n{\"what\":\"llama-3.1-8b-p2048-prefill\",\"ms\":60}\n";
        std::fs::write(file.path(), lines).expect("written");
        let mut report = report(Some(Peers::load(file.path()).expect("peers")));
        report.push(Case::Decode { n_contexts: 1, n_prompt: 128 }, vec![6.6], Bound::Bytes(15e9), None);
        report.check_peers().expect("within 1.15");
        report.push(Case::Prefill { n_prompt: 2048 }, vec![72.0], Bound::Operations(30e12), None);
        let error = report.check_peers().expect_err("1.2 times");
        assert_eq!(
            error.to_string(),
            "slower than 1.15 times the best peer: llama-3.1-8b-p2048-prefill (1.20)"
        );
        assert_eq!(error.exit_code(), 1);
        assert!(report.render().contains("1.20") && !report.render().contains("no peer"));
        report.push(Case::Prefill { n_prompt: 8192 }, vec![1e3], Bound::Operations(30e12), None);
        assert!(report.render().contains("no peer"));
        assert!(Peers::load(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn guests_are_shown_beside_the_engine() {
        let mut report = report(None);
        report.guests.push(GuestCost {
            n_contexts: 1,
            engine_us: 1290.0,
            guest_us: 1310.5,
            difference_us: 20.5,
            difference_percent: 1.6,
            n_equal: 128,
            n_tokens: 128,
        });
        let text = report.render();
        assert!(text.contains("1 guest") && text.contains("20.5") && text.contains("1.6%"), "{text}");
    }

    #[test]
    fn numbers_keep_the_digits_that_mean_something() {
        assert_eq!([0.5, 1.2345, 12.345, 268.04].map(ms), ["0.5000", "1.234", "12.35", "268.0"]);
        assert_eq!(rate(3.1e12, "B/s"), "3.10 TB/s");
        assert_eq!(rate(528e9, "B/s"), "528 GB/s");
    }
}
