//! Keys of the prefix cache.

use crate::account::ActorId;
use crate::backend::PAGE_LEN;
use crate::batch::Token;

/// Names the KV of one full page: a 256-bit hash over everything that determines its bytes, that is the model,
/// all tokens up to the end of the page (and with them its position), what is added to them, and the scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PrefixKey([u8; 32]);

/// Between which guests the prefix cache shares prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixScope {
    /// A user finds only what its own guests computed, so that no user can time another's prompts.
    #[default]
    Actor,
    /// All users share one cache.
    Shared,
}

impl PrefixKey {
    /// What precedes the first page of a user's contexts.
    pub(crate) fn root(model_fingerprint: &[u8; 32], scope: PrefixScope, actor: ActorId) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("trellis prefix cache 1");
        hasher.update(model_fingerprint);
        match scope {
            PrefixScope::Actor => hasher.update(&[1]).update(&actor.0.to_le_bytes()),
            PrefixScope::Shared => hasher.update(&[0]),
        };
        Self(*hasher.finalize().as_bytes())
    }

    /// The key of the page that follows.
    pub(crate) fn next(&self, tokens: &[Token]) -> Self {
        assert_eq!(tokens.len(), PAGE_LEN, "only full pages are cached");
        let mut bytes = [0; 32 + 4 * PAGE_LEN];
        bytes[..32].copy_from_slice(&self.0);
        for (chunk, token) in bytes[32..].chunks_exact_mut(4).zip(tokens) {
            chunk.copy_from_slice(&token.to_le_bytes());
        }
        Self(*blake3::hash(&bytes).as_bytes())
    }

    /// The key of the same page where its tokens from this number on are steered.
    pub(crate) fn steered(&self, fingerprint: &[u8; 32], start: usize) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("trellis prefix cache 1: steered");
        hasher.update(&self.0).update(fingerprint).update(&(start as u64).to_le_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_depends_on_model_user_and_every_token() {
        let tokens: Vec<Token> = (0..PAGE_LEN as u32).collect();
        let key = |model: u8, scope, actor, tokens: &[Token]| {
            PrefixKey::root(&[model; 32], scope, ActorId(actor)).next(tokens)
        };
        let base = key(1, PrefixScope::Actor, 1, &tokens);
        assert_eq!(base, key(1, PrefixScope::Actor, 1, &tokens));
        assert_ne!(base, key(2, PrefixScope::Actor, 1, &tokens));
        assert_ne!(base, key(1, PrefixScope::Actor, 2, &tokens));
        assert_eq!(key(1, PrefixScope::Shared, 1, &tokens), key(1, PrefixScope::Shared, 2, &tokens));
        let mut other = tokens.clone();
        other[PAGE_LEN - 1] += 1;
        assert_ne!(base, key(1, PrefixScope::Actor, 1, &other));
        assert_ne!(base.next(&tokens), base);
        let steered = base.steered(&[1; 32], 3);
        assert_eq!(steered, base.steered(&[1; 32], 3));
        for other in [base, base.steered(&[2; 32], 3), base.steered(&[1; 32], 4)] {
            assert_ne!(steered, other);
        }
    }
}
