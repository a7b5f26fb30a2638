//! A model's vocabulary as grammars see it.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::ConstraintError;
use crate::batch::Token;
use crate::model::Model;

/// The longest token that a trie holds. Published vocabularies have tokens of up to 1,024 spaces.
const TOKEN_BYTES_MAX: usize = 1 << 10;

/// Nodes of a trie, at most; a token has at most one for each of its bytes.
const N_NODES_MAX: usize = 1 << 22;

/// A trie of all tokens, and the sets of tokens that grammars ask for most, worked out once for a model.
pub(crate) struct Vocabulary {
    pub(super) factory: ParserFactory,
    pub(super) stop_tokens: Vec<Token>,
    pub(super) vocab_size: usize,
    /// Tokens that a grammar names, and how the trie has them.
    pub(super) named: Vec<(Token, Vec<u8>)>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// That of a model. Takes a tenth of a second for 128,000 tokens.
    ///
    /// A special token, and one that ends a text, is none of the bytes of its name: a grammar gets at it by naming it.
    pub(crate) fn of(model: &Model) -> Result<Self, ConstraintError> {
        let vocab_size = model.config.vocab_size;
        let tokenizer = &model.tokenizer;
        let word = |token: Token| -> Vec<u8> {
            let Some(bytes) = tokenizer.token_bytes(token).filter(|bytes| bytes.len() < TOKEN_BYTES_MAX)
            else {
                return Vec::new();
            };
            let is_named = tokenizer.is_special(token) || model.stop_tokens.contains(&token);
            let marker = is_named.then_some(TokTrie::SPECIAL_TOKEN_MARKER);
            marker.into_iter().chain(bytes.iter().copied()).collect()
        };
        let words: Vec<Vec<u8>> = (0..vocab_size as Token).map(word).collect();
        Self::over(&words, model.stop_tokens.clone())
    }

    /// That of tokens by their bytes; those that a grammar names begin with the library's marker.
    pub(super) fn over(words: &[Vec<u8>], stop_tokens: Vec<Token>) -> Result<Self, ConstraintError> {
        let vocab_size = words.len();
        let n_bytes: usize = words.iter().map(Vec::len).sum();
        if n_bytes >= N_NODES_MAX {
            return Err(ConstraintError::Vocabulary { n_bytes, n_bytes_max: N_NODES_MAX });
        }
        let first_stop = stop_tokens.first().copied().unwrap_or(toktrie::INVALID_TOKEN);
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, first_stop), words);
        let trie = match &*stop_tokens {
            [] => trie,
            tokens => trie.with_eos_tokens(tokens),
        };
        // It cuts texts greedily, and so forces no tokens: every way to spell what the grammar allows is allowed.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .expect("the slices are the library's own");
        factory.quiet();
        let is_named = |word: &&Vec<u8>| word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        let named =
            (0..).zip(words).filter(|(_, word)| is_named(word)).map(|(token, word)| (token, word.clone()));
        Ok(Self { factory, stop_tokens, vocab_size, named: named.collect() })
    }
}
