//! A grammar that is compiled where it can do no harm.
//!
//! What compiling takes is not to be told from the text: a thousand patterns of `patternProperties` take two minutes, since each is
//! compared with each, and the library looks at its limits between steps of any size. So whoever compiles what strangers write
//! tries it out first, in a process that is bounded and can be killed: what is compiled there is compiled here with as much, and
//! what is not, is not begun.

use serde::{Deserialize, Serialize};

use super::grammar::check_length;
use super::{ConstraintError, ConstraintLimits, Grammar, Vocabulary};
use crate::batch::Token;
use crate::model_handle::ModelHandle;

/// A grammar, its limits, and what of a vocabulary its compiling depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    grammar: Grammar,
    limits: ConstraintLimits,
    vocab_size: usize,
    stop_tokens: Vec<Token>,
    /// Tokens that grammars name, and how the vocabulary's trie has them.
    named: Vec<(Token, Vec<u8>)>,
}

impl Trial {
    /// That of a grammar for a model, whose vocabulary it works out if that is not done yet.
    ///
    /// # Errors
    /// The grammar is too long, or the vocabulary is too large.
    pub fn new(
        grammar: &Grammar,
        model: &ModelHandle,
        limits: ConstraintLimits,
    ) -> Result<Self, ConstraintError> {
        check_length(grammar, limits)?;
        let vocabulary = model.vocabulary()?;
        Ok(Self {
            grammar: grammar.clone(),
            limits,
            vocab_size: vocabulary.vocab_size,
            stop_tokens: vocabulary.stop_tokens.clone(),
            named: vocabulary.named.clone(),
        })
    }

    /// Compiles it for a vocabulary of single bytes and what grammars name.
    ///
    /// # Errors
    /// The grammar is refused.
    pub fn run(&self) -> Result<(), ConstraintError> {
        let mut words = vec![Vec::new(); self.vocab_size];
        for (token, word) in &self.named {
            if let Some(place) = words.get_mut(*token as usize) {
                place.clone_from(word);
            }
        }
        let unused = words.iter_mut().filter(|word| word.is_empty());
        unused.zip(0..=u8::MAX).for_each(|(word, byte)| word.push(byte));
        let vocabulary = Vocabulary::over(&words, self.stop_tokens.clone())?;
        self.grammar.parser(&vocabulary, self.limits)?;
        Ok(())
    }
}
