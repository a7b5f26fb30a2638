//! Guesses of a smaller model.

use trellis_guest::{Candidate, Context, Error, GuessTree, Model, Result, Sampler, Token};

/// A context of the smaller model that holds the same tokens as the larger one's. It draws with the same sampler at the
/// same positions: so it often draws the same, at any temperature.
pub(crate) struct Draft {
    context: Context,
    sampler: Sampler,
    /// What it guessed last; its context holds it.
    guess: Vec<Token>,
}

impl Draft {
    /// # Errors
    /// The models do not share a tokenizer.
    pub(crate) fn new(model: &Model, draft: &Model, context: &Context, sampler: &Sampler) -> Result<Self> {
        check_tokenizers(model, draft)?;
        let guesses = draft.context()?;
        guesses.append(&context.tokens())?;
        Ok(Self { context: guesses, sampler: sampler.with_seed(trellis_guest::seed()), guess: Vec::new() })
    }

    /// What it draws, and in the place of each token what else it finds likely, `width` tokens in all.
    pub(crate) fn guess(&mut self, n: usize, width: usize) -> Result<GuessTree> {
        let n_free = self.context.capacity() - self.context.length();
        let mut tree = GuessTree::new();
        self.guess.clear();
        let n = n_free.min(n as u32);
        if n == 0 {
            return Ok(tree);
        }
        // What ends an answer is guessed like any other token.
        let drawn = self.context.generate(&self.sampler).stop_tokens(&[]).max_tokens(n);
        let drawn = if width > 1 { drawn.top(width as u32).run()? } else { drawn.run()? };
        let mut behind = None;
        for (idx, &token) in drawn.tokens.iter().enumerate() {
            let next = tree.add(behind, token);
            let others = drawn.tops.get(idx).into_iter().flat_map(|top| &top.candidates);
            for other in others.filter(|other| other.token != token).take(width - 1) {
                tree.add(behind, other.token);
            }
            behind = Some(next);
        }
        self.guess = drawn.tokens;
        Ok(tree)
    }

    pub(crate) fn follow(&mut self, drawn: &[Candidate]) -> Result {
        let n_right =
            self.guess.iter().zip(drawn).take_while(|(guess, drawn)| **guess == drawn.token).count();
        let n_wrong = (self.guess.len() - n_right) as u32;
        if n_wrong > 0 {
            self.context.truncate(self.context.length() - n_wrong)?;
        }
        let rest: Vec<Token> = drawn[n_right..].iter().map(|drawn| drawn.token).collect();
        // Once it is full there are no more guesses.
        let n_free = self.context.capacity() - self.context.length();
        self.context.append(&rest[..rest.len().min(n_free as usize)])
    }
}

/// Tokens of one model say nothing to another that counts them otherwise.
fn check_tokenizers(model: &Model, draft: &Model) -> Result {
    let (ours, theirs) = (model.info(), draft.info());
    if (&ours.tokenizer, ours.vocab_size) == (&theirs.tokenizer, theirs.vocab_size) {
        return Ok(());
    }
    Err(Error::ModelMismatch { left: ours.name.clone(), right: theirs.name.clone() })
}
