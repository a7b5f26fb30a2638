//! Which class a user is in: what it has of the devices and the processors beside others, whose pages make room for its work, and how
//! much it may have at most.
//!
//! - Comes in: the classes of the configuration, the machine's users and groups, an actor as the kernel names it.
//! - Goes out: a class, with the priority and the limits that the user's account has for as long as the daemon runs.
//! - A user is looked for among the users of all classes first, then its groups among theirs. Groups are those that the machine
//!   has for the user; one that it does not know is in none. So the class does not depend on how a client was started.
//! - Where the machine does not say which groups a user is in, it has no more than it has in any case ([`Classes::in_any_case`]);
//!   what it has kept on disk before is not removed for that.
//! - Must not happen: a name that stands for nobody and is passed over; a user in two classes; a better class by what a client says,
//!   or because a look-up fails; a look-up for an actor whose class is known, or where no class has groups.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;

use trellis_engine::account::{Budget, Priority};
use trellis_wire::ClassInfo;

use crate::config::{ClassLimits, ClassSettings, ClassTable, DEFAULT_CLASS, NameOrId, WrongClass, classes};
use crate::directory::{Directory, Kind, Machine, NotKnown, number};
use crate::session::Actor;

/// A class of users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    name: Arc<str>,
    priority: Priority,
    limits: ClassLimits,
    /// Whether its user is in it because nobody knows better: it has no more than anybody.
    is_least: bool,
}

impl Class {
    fn new(name: &str, settings: &ClassSettings) -> Self {
        let share = NonZeroU32::new(settings.share).expect("the configuration was checked");
        let priority = Priority { share, rank: settings.rank };
        Self { name: name.into(), priority, limits: settings.limits, is_least: false }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn priority(&self) -> Priority {
        self.priority
    }

    /// What a user of it may have where each user may have `most`.
    pub(crate) fn budget(&self, most: Budget) -> Budget {
        let own = self.limits.over(most);
        match self.is_least {
            false => own,
            true => Budget {
                n_tokens: own.n_tokens.min(most.n_tokens),
                n_pages: own.n_pages.min(most.n_pages),
                n_contexts: own.n_contexts.min(most.n_contexts),
                host_bytes: own.host_bytes.min(most.host_bytes),
            },
        }
    }

    /// How many guests a user of it may run at once where each user may run `most`.
    pub(crate) fn n_guests(&self, most: u32) -> u32 {
        let own = self.limits.n_guests.unwrap_or(most);
        if self.is_least { own.min(most) } else { own }
    }

    /// What it sets of the limit of this name, which is a user's.
    pub(crate) fn limit(&self, name: &str, most: u64) -> Option<u64> {
        let own = self.limits.named().find(|(_, limit, _)| *limit == name).map(|(.., own)| own)?;
        Some(if self.is_least { own.min(most) } else { own })
    }

    pub(crate) fn info(&self) -> ClassInfo {
        let Priority { share, rank } = self.priority;
        let limits = self.limits.named().map(|(field, _, most)| (field.to_owned(), most)).collect();
        ClassInfo { name: self.name.to_string(), share: share.get(), rank: rank.into(), limits }
    }
}

impl Default for Class {
    fn default() -> Self {
        Self::new(DEFAULT_CLASS, &ClassSettings::default())
    }
}

/// Classes whose members cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum ClassError {
    /// What can be told without this machine.
    #[error(transparent)]
    Wrong(#[from] WrongClass),
    /// A name that stands for nobody.
    #[error("classes.{class}: {source}")]
    NotKnown {
        /// The class.
        class: String,
        /// The name, and why.
        source: NotKnown,
    },
    /// A user or a group in two classes.
    #[error("classes.{second}: the {what} {member} is in classes.{first} already")]
    InTwo {
        /// `user` or `group`.
        what: &'static str,
        /// Its name or number, as it was given last.
        member: NameOrId,
        /// One class.
        first: String,
        /// The other.
        second: String,
    },
}

/// The classes, and who is in them.
#[derive(Debug)]
pub(crate) struct Classes {
    default: Class,
    users: HashMap<u32, Class>,
    /// The class that decides first.
    groups: Vec<(u32, Class)>,
    directory: Arc<dyn Directory>,
}

impl Default for Classes {
    fn default() -> Self {
        let (users, groups) = (HashMap::new(), Vec::new());
        Self { default: Class::default(), users, groups, directory: Arc::new(Machine) }
    }
}

impl Classes {
    /// The classes of a configuration on this machine.
    ///
    /// # Errors
    /// A name stands for nobody, or for somebody who is in another class as well.
    pub(crate) fn of(settings: &ClassTable) -> Result<Self, ClassError> {
        Self::in_directory(settings, Arc::new(Machine))
    }

    pub(crate) fn in_directory(
        settings: &ClassTable,
        directory: Arc<dyn Directory>,
    ) -> Result<Self, ClassError> {
        classes::check(settings)?;
        let (mut users, mut groups) = (HashMap::new(), HashMap::new());
        for (name, of_class) in settings {
            let class = Class::new(name, of_class);
            let members = [(Kind::User, &of_class.users), (Kind::Group, &of_class.groups)];
            for (kind, members) in members {
                let known = if kind == Kind::User { &mut users } else { &mut groups };
                for member in members {
                    let id = number(&*directory, kind, member)
                        .map_err(|source| ClassError::NotKnown { class: name.clone(), source })?;
                    let earlier: Option<Class> = known.insert(id, class.clone());
                    if let Some(first) = earlier.filter(|first| *first != class) {
                        return Err(ClassError::InTwo {
                            what: kind.name(),
                            member: member.clone(),
                            first: first.name().to_owned(),
                            second: name.clone(),
                        });
                    }
                }
            }
        }
        let mut groups: Vec<(u32, Class)> = groups.into_iter().collect();
        groups.sort_by_key(|(gid, class)| {
            let Priority { share, rank } = class.priority;
            (Reverse((rank, share)), class.name.clone(), *gid)
        });
        let default = settings.get(DEFAULT_CLASS).map(|settings| Class::new(DEFAULT_CLASS, settings));
        Ok(Self { default: default.unwrap_or_default(), users, groups, directory })
    }

    /// The class of an actor, unless its groups have to be looked up.
    pub(crate) fn at_hand(&self, actor: Actor) -> Option<Class> {
        let of_user = self.users.get(&actor.uid);
        of_user.or_else(|| self.groups.is_empty().then_some(&self.default)).cloned()
    }

    /// The class of an actor. May wait for the machine's directory of users.
    ///
    /// # Errors
    /// The directory does not answer.
    pub(crate) fn look_up(&self, actor: Actor) -> io::Result<Class> {
        if let Some(class) = self.at_hand(actor) {
            return Ok(class);
        }
        Ok(self.of_groups(&self.directory.groups_of(actor.uid)?.unwrap_or_default()))
    }

    /// What an actor has where the machine does not say which groups it is in: it goes as a stranger, with the least share, the least
    /// rank and the least limits of all classes that it may be in, and of nothing more than everybody.
    pub(crate) fn in_any_case(&self, actor: Actor) -> Class {
        self.at_hand(actor).unwrap_or_else(|| {
            let of_groups = self.groups.iter().map(|(_, class)| class);
            of_groups.fold(Class { is_least: true, ..self.default.clone() }, |least, of_group| {
                let (one, other) = (least.priority, of_group.priority);
                let priority = Priority { share: one.share.min(other.share), rank: one.rank.min(other.rank) };
                Class { priority, limits: least.limits.least(&of_group.limits), ..least }
            })
        })
    }

    fn of_groups(&self, gids: &[u32]) -> Class {
        let mut classes = self.groups.iter();
        classes.find(|(gid, _)| gids.contains(gid)).map_or(&self.default, |(_, class)| class).clone()
    }
}

#[cfg(test)]
mod tests;
