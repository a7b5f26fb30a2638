//! What is measured, as the command line says it.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::report::Case;
use crate::cli::connect::DtypeArg;
use crate::cli::error::CliError;
use crate::cli::output::to_json;

/// Batches that a decoder is used with: one person, a few, a service.
const BATCHES: [u32; 3] = [1, 32, 256];
/// Those of `--ops`: also the largest that takes the products for few rows.
const OPS_BATCHES: [u32; 4] = [1, 16, 32, 256];
/// A long question, and a document.
const PROMPTS: [u32; 2] = [2048, 8192];
const CONTEXT: u32 = 128;
/// Long enough that attention shows.
const OPS_CONTEXT: u32 = 1280;

/// Measuring batches and prompts against what the device can do.
#[derive(Clone, Debug, Default, Args)]
#[group(id = "speed", multiple = true)]
pub(crate) struct SpeedArgs {
    /// Measure a published shape with random weights, such as llama-3.1-8b
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    pub(super) shape: Option<String>,
    /// Type of weights and KV cache; by default that of the model
    #[arg(long, value_enum)]
    pub(super) dtype: Option<DtypeArg>,
    /// Decode so many contexts at once
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) batch: Vec<u32>,
    /// Tokens of each context before it is decoded; 128, or 1280 with --ops
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) context: Option<u32>,
    /// Compute prompts of so many tokens
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) prompt: Vec<u32>,
    /// Decode also through guests, in turn with the engine alone, and show the difference
    #[arg(long)]
    pub(super) guest: bool,
    /// Measure each kernel alone instead, on the model's shapes
    #[arg(long, conflicts_with_all = ["guest", "peers"])]
    pub(super) ops: bool,
    /// Compare with these times of others: one {"what": "llama-3.1-8b-b1-decode", "ms": 6.05, "context":
    /// 128} a line. Fails when one of ours is more than 1.15 times as long
    #[arg(long, value_name = "FILE")]
    pub(super) peers: Option<PathBuf>,
    /// Write all numbers to a file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) save: Option<PathBuf>,
}

/// Sizes to measure with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) batches: Vec<usize>,
    pub(super) context_len: usize,
    pub(super) prompts: Vec<usize>,
}

impl Sizes {
    /// What is measured, in this order.
    pub(super) fn cases(&self) -> Vec<Case> {
        let decode = |&n_contexts| Case::Decode { n_contexts, n_prompt: self.context_len };
        let prefill = |&n_prompt| Case::Prefill { n_prompt };
        self.batches.iter().map(decode).chain(self.prompts.iter().map(prefill)).collect()
    }
}

impl SpeedArgs {
    /// Whether this is what was asked for, and not the targets.
    pub(crate) fn is_asked(&self) -> bool {
        let Self { shape, dtype, batch, context, prompt, guest, ops, peers, save } = self;
        let is_named = shape.is_some() || dtype.is_some() || peers.is_some() || save.is_some();
        is_named || !batch.is_empty() || context.is_some() || !prompt.is_empty() || *guest || *ops
    }

    /// Writes a report to the file that was asked for, if one was.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn save(&self, report: &impl Serialize) -> Result<(), CliError> {
        let Some(path) = &self.save else { return Ok(()) };
        let text = to_json(report) + "\n";
        std::fs::write(path, text).map_err(CliError::io(format!("write {}", path.display())))
    }

    /// The sizes for a model whose contexts have up to `n_positions`: the batches or the prompts that were asked for, both where
    /// neither was.
    pub(super) fn sizes(&self, n_positions: usize) -> Sizes {
        let is_open = self.batch.is_empty() && self.prompt.is_empty();
        let numbers = |asked: &[u32], usual: &[u32]| -> Vec<usize> {
            let usual = if is_open { usual } else { &[] };
            let chosen = if asked.is_empty() { usual } else { asked };
            chosen.iter().map(|&n| n as usize).collect()
        };
        let (batches, context) =
            if self.ops { (&OPS_BATCHES[..], OPS_CONTEXT) } else { (&BATCHES[..], CONTEXT) };
        let mut prompts = numbers(&self.prompt, &PROMPTS);
        if self.prompt.is_empty() {
            prompts.retain(|&n_tokens| n_tokens < n_positions);
        }
        let context_len = self.context.unwrap_or(context.min(n_positions as u32 / 2)) as usize;
        Sizes { batches: numbers(&self.batch, batches), context_len, prompts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_one_gets_one() {
        let all = SpeedArgs::default();
        assert!(!all.is_asked());
        let sizes = all.sizes(131_072);
        assert_eq!(sizes, Sizes { batches: vec![1, 32, 256], context_len: 128, prompts: vec![2048, 8192] });
        assert_eq!(all.sizes(4096).prompts, [2048]);
        assert_eq!(all.sizes(100).context_len, 50);

        let batch = SpeedArgs { batch: vec![4], ..SpeedArgs::default() };
        assert!(batch.is_asked());
        assert_eq!(batch.sizes(4096), Sizes { batches: vec![4], context_len: 128, prompts: vec![] });
        let prompt = SpeedArgs { prompt: vec![9000], context: Some(7), ..SpeedArgs::default() };
        assert_eq!(prompt.sizes(4096), Sizes { batches: vec![], context_len: 7, prompts: vec![9000] });
        let ops = SpeedArgs { ops: true, ..SpeedArgs::default() };
        let sizes = ops.sizes(131_072);
        assert_eq!((sizes.batches.as_slice(), sizes.context_len), (&[1, 16, 32, 256][..], 1280));
    }
}
