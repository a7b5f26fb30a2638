//! Times of others, to compare with.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use trellis_engine::model::Dtype;

use super::report::Case;
use crate::cli::bench::BenchError;
use crate::cli::error::CliError;

/// How much longer than the best peer one of our times may be.
pub(super) const RATIO_MAX: f64 = 1.15;

/// The best time of each row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Peers {
    path: PathBuf,
    best: HashMap<String, Peer>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Peer {
    ms: f64,
    /// Tokens of each context before it is decoded.
    context_len: Option<usize>,
}

#[derive(Deserialize)]
struct Line {
    what: String,
    ms: f64,
    context: Option<usize>,
}

impl Peers {
    /// # Errors
    /// The file cannot be read, or a line is none.
    pub(super) fn load(path: &Path) -> Result<Self, CliError> {
        let doing = || format!("read {}", path.display());
        let text = std::fs::read_to_string(path).map_err(CliError::io(doing()))?;
        Ok(Self::parse(&text, path)?)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, BenchError> {
        let mut best: HashMap<String, Peer> = HashMap::new();
        for (idx, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let parsed = serde_json::from_str(line);
            let Line { what, ms, context } = parsed.map_err(|source| BenchError::Peers {
                path: path.to_owned(),
                line: idx + 1,
                source,
            })?;
            let peer = Peer { ms, context_len: context };
            best.entry(what)
                .and_modify(|best| {
                    if ms < best.ms {
                        *best = peer
                    }
                })
                .or_insert(peer);
        }
        Ok(Self { path: path.to_owned(), best })
    }

    pub(super) fn ms(&self, what: &str) -> Option<f64> {
        self.best.get(what).map(|peer| peer.ms)
    }

    /// Whether the times are for what is about to be measured.
    ///
    /// # Errors
    /// They are for another type or for longer contexts, or there is none for any of the cases.
    pub(super) fn check(&self, model: &str, dtype: Dtype, cases: &[Case]) -> Result<(), BenchError> {
        if dtype == Dtype::F32 {
            return Err(BenchError::PeersOfOtherDtype);
        }
        let rows: Vec<String> = cases.iter().map(|case| case.name(model)).collect();
        for (case, what) in cases.iter().zip(&rows) {
            let needed = self.best.get(what).and_then(|peer| peer.context_len);
            if let (&Case::Decode { n_prompt: context_len, .. }, Some(needed)) = (case, needed)
                && context_len < needed
            {
                return Err(BenchError::ShorterThanPeer { what: what.clone(), context_len, needed });
            }
        }
        if rows.iter().any(|what| self.best.contains_key(what)) {
            return Ok(());
        }
        Err(BenchError::NoPeers { path: self.path.clone(), rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODE: Case = Case::Decode { n_contexts: 256, n_prompt: 128 };
    const PREFILL: Case = Case::Prefill { n_prompt: 2048 };
    const NAME: &str = "llama-3.2-1b-b256-decode";

    fn parse(text: &str) -> Peers {
        Peers::parse(text, Path::new("peers")).expect("lines")
    }

    #[test]
    fn the_best_of_each_row_counts() {
        let text = format!(
            "{{\"what\":\"{NAME}\",\"ms\":1.46,\"by\":\"x\"}}\n\n{{\"what\":\"{NAME}\",\"ms\":1.29}}\n"
        );
        let peers = parse(&text);
        assert_eq!(peers.ms(NAME), Some(1.29));
        assert_eq!(peers.ms("llama-3.1-8b-b256-decode"), None);
        let error = Peers::parse("\nms: 3\n", Path::new("peers")).expect_err("not JSON");
        assert!(error.to_string().starts_with("peers, line 2: expected {\"what\""), "{error}");
    }

    #[test]
    fn only_like_is_compared_with_like() {
        let peers = parse(&format!("{{\"what\":\"{NAME}\",\"ms\":9,\"context\":1216}}"));
        let check =
            |model, dtype, cases: &[Case]| peers.check(model, dtype, cases).map_err(|e| e.to_string());
        let error = check("Llama-3.2-1B", Dtype::Bf16, &[PREFILL, DECODE]).expect_err("shorter contexts");
        assert!(error.starts_with(NAME) && error.ends_with("rerun with --context 1216"), "{error}");
        let long = Case::Decode { n_contexts: 256, n_prompt: 1216 };
        assert_eq!(check("llama-3.2-1b", Dtype::F16, &[PREFILL, long]), Ok(()));
        let error = check("llama-3.2-1b", Dtype::F32, &[long]).expect_err("another type");
        assert!(error.contains("f32"), "{error}");
        for (model, case) in [("llama-3.2-1b", PREFILL), ("llama-3.1-8b", DECODE), ("other-1b", DECODE)] {
            let error = peers.check(model, Dtype::Bf16, &[case]).expect_err("no such row");
            assert!(error.to_string().ends_with(&case.name(model)), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
