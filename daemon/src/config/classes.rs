//! Classes of users, as the file has them: `[classes.NAME]`.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::ClassLimits;

/// The class of whoever is in no other.
pub const DEFAULT_CLASS: &str = "default";

/// Shares that a class may have.
pub const SHARES: RangeInclusive<u32> = 1..=100;

/// Ranks that a class may have.
pub const RANKS: RangeInclusive<u8> = 0..=100;

/// Classes by their names. That of the name `default` is the class of whoever is in no other; its share is 1 and its rank 0
/// where the file does not say.
pub type ClassTable = BTreeMap<String, ClassSettings>;

/// Users who have more or less of the device than others, and whose pages make room for whom. Each user of a class has its share
/// by itself: a class of many users has as many shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ClassSettings {
    /// Users of the class, by name or number. They come before groups; no user may be in two classes.
    pub users: Vec<NameOrId>,
    /// Groups whose members are of the class, by name or number; supplementary groups count. Who is in groups of several
    /// classes is in that of the highest rank, then of the highest share, then in the first by name.
    pub groups: Vec<NameOrId>,
    /// How much of the device and of the processors each user of the class has beside a user with a share of 1, while both
    /// have enough to do: from 1 to 100.
    pub share: u32,
    /// Pages of users of a lower rank make room first, and go to host memory: from 0 to 100.
    pub rank: u8,
    /// How much each user of the class may have, where that is not as much as each user of any class.
    pub limits: ClassLimits,
}

impl Default for ClassSettings {
    fn default() -> Self {
        Self { users: Vec::new(), groups: Vec::new(), share: 1, rank: 0, limits: ClassLimits::default() }
    }
}

/// A user or a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum NameOrId {
    /// By its number.
    Id(u32),
    /// By its name.
    Name(String),
}

impl fmt::Display for NameOrId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

/// A class with a number outside its range, or with members that it may not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongClass {
    /// A share outside its range.
    #[error("classes.{class}.share is {share}, expected {} to {}", SHARES.start(), SHARES.end())]
    Share {
        /// The class.
        class: String,
        /// Its share.
        share: u32,
    },
    /// A rank outside its range.
    #[error("classes.{class}.rank is {rank}, expected {} to {}", RANKS.start(), RANKS.end())]
    Rank {
        /// The class.
        class: String,
        /// Its rank.
        rank: u8,
    },
    /// Members of the class of those who are in no other.
    #[error("classes.default.{field} is set: in this class is whoever is in no other")]
    MembersOfDefault {
        /// `users` or `groups`.
        field: &'static str,
    },
}

/// Checks what can be told without the machine's users and groups.
///
/// # Errors
/// A number is outside its range, or the class of those in no other has members.
pub(crate) fn check(classes: &ClassTable) -> Result<(), WrongClass> {
    for (class, settings) in classes {
        let ClassSettings { users, groups, share, rank, limits: _ } = settings;
        let (class, share, rank) = (class.clone(), *share, *rank);
        if !SHARES.contains(&share) {
            return Err(WrongClass::Share { class, share });
        }
        if !RANKS.contains(&rank) {
            return Err(WrongClass::Rank { class, rank });
        }
        for (field, members) in [("users", users), ("groups", groups)] {
            if class == DEFAULT_CLASS && !members.is_empty() {
                return Err(WrongClass::MembersOfDefault { field });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_their_ranges_and_members_of_the_default_are_refused() {
        let checked = |text: &str| check(&toml::from_str(text).expect("it parses"));
        assert_eq!(
            checked("[research]\nusers = ['ada', 1001]\ngroups = ['lab']\nshare = 100\nrank = 2"),
            Ok(())
        );
        assert_eq!(checked("[default]\nshare = 2\nrank = 1"), Ok(()));
        for (text, message) in [
            ("[a]\nshare = 0", "classes.a.share is 0, expected 1 to 100"),
            ("[a]\nshare = 101", "classes.a.share is 101, expected 1 to 100"),
            ("[b]\nrank = 101", "classes.b.rank is 101, expected 0 to 100"),
            (
                "[default]\nusers = ['ada']",
                "classes.default.users is set: in this class is whoever is in no other",
            ),
            (
                "[default]\ngroups = [7]",
                "classes.default.groups is set: in this class is whoever is in no other",
            ),
        ] {
            assert_eq!(checked(text).expect_err(text).to_string(), message);
        }
    }
}
