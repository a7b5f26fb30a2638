//! What compiled code is found by.

use trellis_engine::account::ActorId;

/// Who brings a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BroughtBy {
    /// The operator: its code is there for all users.
    Operator,
    /// The user who starts it: nobody else finds its code, or learns by how long a start takes that it is there.
    User,
}

/// The component that somebody wants to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) actor: ActorId,
    /// BLAKE3 of the component.
    pub(super) hash: blake3::Hash,
    /// By which its code is kept in memory and on disk, and by which those wait for each other who want it at once.
    pub(super) key: blake3::Hash,
}

impl Wanted {
    pub(super) fn new(actor: ActorId, brought: BroughtBy, hash: blake3::Hash) -> Self {
        let key = match brought {
            BroughtBy::Operator => hash,
            BroughtBy::User => blake3::keyed_hash(hash.as_bytes(), &actor.0.to_le_bytes()),
        };
        Self { actor, hash, key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_a_key_of_his_own_and_all_have_the_operators() {
        let [one, other] = ["one", "other"].map(|name| blake3::hash(name.as_bytes()));
        let key = |user, brought, hash| Wanted::new(ActorId(user), brought, hash).key;
        let keys = [
            key(1, BroughtBy::User, one),
            key(2, BroughtBy::User, one),
            key(1, BroughtBy::User, other),
            key(1, BroughtBy::Operator, one),
        ];
        for (idx, key) in keys.iter().enumerate() {
            assert!(!keys[..idx].contains(key), "{idx}");
        }
        assert_eq!(key(1, BroughtBy::Operator, one), key(2, BroughtBy::Operator, one));
        assert_eq!(key(1, BroughtBy::User, one), keys[0], "it is the same at any time");
    }
}
