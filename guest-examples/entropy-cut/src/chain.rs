//! Texts that are drawn anew from a place on.

use trellis_guest::programs::{Definition, Source, library};
use trellis_guest::{Context, Random, Result, Sampler, generate_all};

/// A text after a prompt.
#[derive(Debug)]
pub(crate) struct Text {
    /// The prompt and the text.
    pub(crate) context: Context,
    /// Of the model's distributions in the place of each token of the text, in nats.
    pub(crate) entropies: Vec<f32>,
    /// Σ ln Z over its tokens; see [`power`].
    pub(crate) log_normalizers: f64,
}

impl Text {
    /// An empty one.
    pub(crate) fn new(prompt: &Context) -> Result<Self> {
        Ok(Self { context: prompt.fork()?, entropies: Vec::new(), log_normalizers: 0.0 })
    }

    /// Whether its last token ended it.
    pub(crate) fn is_whole(&self) -> bool {
        let last = self.context.tokens_from(self.context.length() - self.entropies.len().min(1) as u32);
        last.first().is_some_and(|&token| self.context.model().is_stop(token))
    }
}

/// Draws at temperature 1/α, of the k most probable tokens where there is a k: token v with probability `p(v)^α / Z`, where
/// `Z = Σ p(v)^α`. The first parameter is α. The sum of all ln Z so far goes along with the context as state, through forks
/// and truncations, and is reported.
pub(crate) fn power(top_k: Option<u32>) -> Definition {
    Definition::build(|b| {
        let logits = top_k.map_or(b.logits(), |k| library::top_k(b.logits(), k as f32));
        let powers = logits.log_softmax() * b.parameter(0);
        let state = b.state(0.0);
        let sum = state.get() + powers.log_sum_exp();
        state.set(sum);
        b.report(sum);
        powers.draw(Source::SEED)
    })
}

/// Each text as it goes on anew after so many tokens, to its end or to `n_most` tokens: all in one batch.
pub(crate) fn redraw(
    cuts: Vec<(&Text, usize)>,
    n_most: u32,
    sampler: &Sampler,
    random: &mut Random,
) -> Result<Vec<Text>> {
    let begin = |&(text, cut): &(&Text, usize)| {
        let fork = text.context.fork()?;
        fork.truncate(fork.length() - (text.entropies.len() - cut) as u32)?;
        Ok(fork)
    };
    let begun = cuts.iter().map(begin).collect::<Result<Vec<_>>>()?;
    let requests = begun.iter().zip(&cuts).map(|(fork, (_, cut))| {
        // A draw depends on seed, position and what comes before: with the same seed it would be the same text.
        fork.generate(sampler).seed(random.bits()).max_tokens(n_most - *cut as u32).top(1)
    });
    let drawn = generate_all(requests)?;
    let texts = begun.into_iter().zip(drawn).zip(cuts).map(|((context, drawn), (text, cut))| Text {
        log_normalizers: f64::from(context.reports()[0]),
        entropies: [&text.entropies[..cut], &drawn.tops.iter().map(|top| top.entropy).collect::<Vec<_>>()]
            .concat(),
        context,
    });
    Ok(texts.collect())
}
