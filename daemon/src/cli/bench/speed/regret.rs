//! What it costs to choose another token than the reference did.

use trellis_engine::batch::{Candidate, Token};
use trellis_engine::{Answer, Ask, Context, ModelHandle};

use super::decode::Tolerance;
use crate::cli::bench::{BenchError, engine};

/// Where two streams begin to differ, and the tokens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) idx: usize,
    pub(super) expected: Token,
    pub(super) found: Token,
}

impl Difference {
    pub(super) fn first(expected: &[Token], found: &[Token]) -> Option<Self> {
        let mut pairs = expected.iter().copied().zip(found.iter().copied()).enumerate();
        pairs.find(|(_, (expected, found))| expected != found).map(|(idx, (expected, found))| Self {
            idx,
            expected,
            found,
        })
    }

    /// How much more probable the reference's token is than the one found, in nats: both scored by a context that is
    /// alone, after the tokens up to the difference.
    ///
    /// # Errors
    /// The engine failed.
    pub(super) async fn regret(
        self,
        model: &ModelHandle,
        prompt: &[Token],
        expected: &[Token],
    ) -> Result<f64, BenchError> {
        let mut context = Context::create(model, engine::owner()).await?;
        context.append(prompt).await?;
        context.append(&expected[..self.idx]).await?;
        let answer = context.ask(Ask::Scores(vec![self.expected, self.found])).await?.answer().await?;
        let Answer::Scores(scores) = answer else { unreachable!("scores are answered with scores") };
        Ok(f64::from(scores[0]) - f64::from(scores[1]))
    }
}

/// The tokens of what was drawn.
pub(super) fn tokens(drawn: &[Candidate]) -> Vec<Token> {
    drawn.iter().map(|drawn| drawn.token).collect()
}

/// Checks streams that should be as `expected`, and returns how many tokens are at least the same.
///
/// # Errors
/// One has another number of tokens, or leaves the reference by more than the tolerance allows.
pub(crate) async fn check_streams(
    model: &ModelHandle,
    prompt: &[Token],
    expected: &[Token],
    streams: &[Vec<Token>],
    place: &str,
    tolerance: Tolerance,
) -> Result<usize, BenchError> {
    let mut known: Vec<Difference> = Vec::new();
    for found in streams {
        if found.len() != expected.len() {
            return Err(BenchError::Short { wanted: expected.len(), got: found.len() });
        }
        let Some(difference) = Difference::first(expected, found) else { continue };
        if known.contains(&difference) {
            continue;
        }
        known.push(difference);
        let Difference { idx, expected: best, found } = difference;
        let place = place.to_owned();
        if tolerance == Tolerance::NONE {
            return Err(BenchError::Mismatch { place, idx, expected: best, found });
        }
        let regret = difference.regret(model, prompt, expected).await?;
        let regret_max = tolerance.tail_max;
        // NaN is not within it either.
        if regret <= regret_max {
            continue;
        }
        return Err(BenchError::Regret { place, idx, expected: best, found, regret, regret_max });
    }
    Ok(known.iter().map(|difference| difference.idx).min().unwrap_or(expected.len()))
}
