//! The right name that is near to a wrong one, for errors.

use std::fmt;

/// The end of an error: the right name that is near to what was written, if there is one.
#[derive(Debug)]
pub(crate) struct Hint(Option<String>);

impl Hint {
    /// No name.
    pub(crate) const NONE: Self = Self(None);

    /// Exactly this name.
    pub(crate) fn of(name: impl Into<String>) -> Self {
        Self(Some(name.into()))
    }

    /// Whether there is no name.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |name| write!(f, "; did you mean {name:?}?"))
    }
}

/// The nearest of these names, if it takes no more than an edit for every three letters to come by it, or if one begins with the
/// other and is no more than twice as long: `alias` for `aliases`.
pub(crate) fn hint<'a>(written: &str, names: impl IntoIterator<Item = &'a str>) -> Hint {
    let near = names.into_iter().filter_map(|name| {
        let n_edits = strsim::damerau_levenshtein(written, name);
        let is_near = 3 * n_edits <= written.chars().count().max(3) || is_beginning(written, name);
        is_near.then_some((n_edits, name))
    });
    Hint(near.min_by_key(|&(n_edits, _)| n_edits).map(|(_, name)| name.to_owned()))
}

/// Letters from which on a beginning tells what was meant.
const N_BEGUN_MIN: usize = 3;

fn is_beginning(one: &str, other: &str) -> bool {
    let (short, long) = if one.len() < other.len() { (one, other) } else { (other, one) };
    long.starts_with(short) && short.len() >= N_BEGUN_MIN && 2 * short.len() >= long.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_near_is_suggested() {
        let names = ["one-long", "wide", "chat"];
        assert_eq!(hint("one-lnog", names).to_string(), "; did you mean \"one-long\"?");
        assert_eq!(hint("widr", names).to_string(), "; did you mean \"wide\"?");
        assert_eq!(hint("alias", ["path", "aliases"]).to_string(), "; did you mean \"aliases\"?");
        assert_eq!(hint("pathname", ["path", "aliases"]).to_string(), "; did you mean \"path\"?");
        for far in ["nosuch", "long", "house", "wi", "chat-and-more", ""] {
            assert_eq!(hint(far, names).to_string(), "", "{far}");
        }
        assert_eq!(hint("wide", []).to_string(), "");
    }
}
