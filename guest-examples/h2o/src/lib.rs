//! Writes on in the memory of a budget: of all tokens the last few stay, and of those before them the *heavy hitters*, on which
//! the most attention was put so far (Z. Zhang and others, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
//! Language Models", NeurIPS 2023). At the end it says what the budget cost: the perplexity of the text as it was written, and under
//! a context that holds all of it.
//!
//! In the paper each head of each layer chooses for itself and sums from the first token of the prompt on; here a context has one
//! choice, by the mean over all heads and layers, summed from the prompt's last token on. Positions are kept.
//!
//! ```text
//! trellis run h2o "Once upon a time"
//! trellis run h2o --budget 128 --recent 64 --max-tokens 500 --json "Once upon a time"
//! ```

use serde::Serialize;
use trellis_guest::{Args, Context, Model, Positions, Result, Sampler, Token, emit, emit_json, seed, usage};

trellis_guest::main!(run);

const USAGE: &str = "h2o [--budget N] [--recent N] [--max-tokens N] [--temperature T] [--json] TEXT";

#[derive(Serialize)]
struct Report {
    tokens: Vec<Token>,
    /// Which tokens of the whole text were there at the end, by their indices in it.
    kept: Vec<usize>,
    /// The most pages that were held after any token.
    n_pages_most: u64,
    /// Null, as the next one, where no token was written.
    perplexity: f64,
    perplexity_of_all: f64,
}

/// What stays of a context.
struct HeavyHitters {
    n_budget: usize,
    n_recent: usize,
    layers: Vec<u32>,
    /// Of each token that is there: its index in the whole text, and the attention on it so far.
    tokens: Vec<(usize, f64)>,
    n_seen: usize,
}

impl HeavyHitters {
    /// Takes in what the last token looks at, and makes room for one more.
    fn look(&mut self, context: &Context) -> Result {
        let masses = context.attention(&self.layers)?;
        while self.tokens.len() < masses.len() {
            self.tokens.push((self.n_seen, 0.0));
            self.n_seen += 1;
        }
        for ((_, sum), mass) in self.tokens.iter_mut().zip(&masses) {
            *sum += f64::from(*mass);
        }
        while self.tokens.len() >= self.n_budget {
            let others = self.tokens[..self.tokens.len() - self.n_recent].iter().enumerate();
            let least = others.min_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b));
            let (idx, _) = least.expect("the budget is larger than what is recent");
            context.evict(idx as u32, idx as u32 + 1, Positions::Keep)?;
            self.tokens.remove(idx);
        }
        Ok(())
    }
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_budget = args.option("--budget")?.unwrap_or(128usize).max(2);
    let n_recent = args.option("--recent")?.unwrap_or(n_budget / 2).clamp(1, n_budget - 1);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(500);
    let temperature = args.option("--temperature")?.unwrap_or(0.8);
    let text = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(&text)?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let layers = (0..model.info().n_layers).collect();
    let whole = context.fork()?;
    let mut kept = HeavyHitters { n_budget, n_recent, layers, tokens: Vec::new(), n_seen: 0 };

    let (mut tokens, mut logprobs, mut n_pages_most) = (Vec::new(), Vec::new(), 0);
    let mut decoder = model.text_decoder();
    // Positions that are kept take their place in the length of the model.
    for _ in 0..max_tokens.min(context.capacity() - context.length()) {
        kept.look(&context)?;
        let drawn = context.step(&sampler)?;
        tokens.push(drawn.token);
        logprobs.push(drawn.logprob);
        n_pages_most = usage().pages.used.max(n_pages_most);
        if !json {
            emit!("{}", decoder.push(drawn.token)?)?;
        }
    }

    let of_all = if tokens.is_empty() { Vec::new() } else { whole.score(&tokens)? };
    let (perplexity, perplexity_of_all) = (perplexity(&logprobs), perplexity(&of_all));
    if json {
        let kept = kept.tokens.iter().map(|(idx, _)| *idx).collect();
        return emit_json(&Report { tokens, kept, n_pages_most, perplexity, perplexity_of_all });
    }
    emit!("{}\n\n{} tokens, at most {n_pages_most} pages; ", decoder.finish(), tokens.len())?;
    emit!("perplexity {perplexity:.2}, with all of them in sight {perplexity_of_all:.2}\n")
}

fn perplexity(logprobs: &[f32]) -> f64 {
    let sum: f64 = logprobs.iter().map(|&logprob| f64::from(logprob)).sum();
    (-sum / logprobs.len() as f64).exp()
}
