//! Diverse beam search: the beams are in groups, and from the log-probability of a token the penalty is taken off as many times as
//! groups before go on with it in the same step, so that the groups say different things (A. K. Vijayakumar and others,
//! "Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models", 2018). The first group searches as it would
//! alone.
//!
//! Of the paper's measures of diversity it is that which does best there, Hamming: tokens of the same step. The results are those
//! of Hugging Face transformers. The engine searches, without a call from the guest for each token.
//!
//! ```text
//! trellis run diverse-beam "Tell me a short story."
//! trellis run diverse-beam --groups 3 --beams 6 --diversity 2 --json "Name a colour."
//! ```

use serde::Serialize;
use trellis_guest::{Args, Chat, Finished, Model, Result, Token, emit, emit_json};

trellis_guest::main!(run);

const USAGE: &str =
    "diverse-beam [--groups N] [--beams N] [--diversity PENALTY] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Sequence {
    text: String,
    tokens: Vec<Token>,
    /// The mean log-probability of a token, less what the penalties took off.
    score: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_groups = args.option("--groups")?.unwrap_or(4);
    let n_beams = args.option("--beams")?.unwrap_or(n_groups);
    let diversity = args.option("--diversity")?.unwrap_or(0.5);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(40);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(&prompt))?;
    let n_free = context.capacity() - context.length();
    let search = context.beams(n_beams).groups(n_groups, diversity).max_tokens(max_tokens.min(n_free));
    let best = search.run(n_beams)?;

    let sequences = best
        .into_iter()
        .map(|Finished { tokens, score }| Ok(Sequence { text: model.decode(&tokens)?, tokens, score }));
    let sequences = sequences.collect::<Result<Vec<_>>>()?;
    if json {
        return emit_json(&sequences);
    }
    sequences.iter().try_for_each(|Sequence { text, score, .. }| emit!("{score:9.5}  {text}\n"))
}
