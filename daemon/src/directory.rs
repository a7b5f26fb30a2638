//! The machine's users and groups, for settings that name some.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fmt;
use std::fs;
use std::io;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

use crate::config::NameOrId;
use crate::nearest::hint;
use crate::session::Actor;

/// What a number or a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    User,
    Group,
}

impl Kind {
    /// The name in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Group => "group",
        }
    }
}

/// Where users and groups are known.
pub(crate) trait Directory: fmt::Debug + Send + Sync {
    /// The number of a user or a group.
    ///
    /// # Errors
    /// It cannot be looked up.
    fn id(&self, kind: Kind, name: &str) -> io::Result<Option<u32>>;

    /// Names, for the one that was probably meant: not always all.
    fn names(&self, kind: Kind) -> BTreeSet<String>;

    /// The groups of a user, its own and those that it is in beside that; none for a user who is not known.
    ///
    /// # Errors
    /// They cannot be looked up.
    fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>>;
}

/// This machine, by its name service: files, LDAP or whatever it is set up for.
#[derive(Debug)]
pub(crate) struct Machine;

impl Directory for Machine {
    fn id(&self, kind: Kind, name: &str) -> io::Result<Option<u32>> {
        Ok(match kind {
            Kind::User => User::from_name(name)?.map(|user| user.uid.as_raw()),
            Kind::Group => Group::from_name(name)?.map(|group| group.gid.as_raw()),
        })
    }

    /// Those in the machine's own files.
    fn names(&self, kind: Kind) -> BTreeSet<String> {
        let path = match kind {
            Kind::User => "/etc/passwd",
            Kind::Group => "/etc/group",
        };
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
    }

    fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>> {
        let Some(user) = User::from_uid(Uid::from_raw(uid))? else { return Ok(None) };
        let name = CString::new(user.name).map_err(io::Error::other)?;
        Ok(Some(getgrouplist(&name, user.gid)?.into_iter().map(Gid::as_raw).collect()))
    }
}

/// A user or a group that a setting names, and of which no number is known.
#[derive(Debug, thiserror::Error)]
pub enum NotKnown {
    /// The machine has none of that name.
    #[error("this machine has no {what} {name:?}{hint}")]
    Unknown {
        /// `user` or `group`.
        what: &'static str,
        /// The name.
        name: String,
        /// The right one that is near to it.
        hint: String,
    },
    /// The machine does not say.
    #[error("the {what} {name:?} cannot be looked up: {source}")]
    LookUp {
        /// `user` or `group`.
        what: &'static str,
        /// The name.
        name: String,
        /// Why.
        source: io::Error,
    },
}

/// The number of a user or a group that a setting names.
///
/// # Errors
/// Nobody has that name, or the machine does not say.
pub(crate) fn number(directory: &dyn Directory, kind: Kind, member: &NameOrId) -> Result<u32, NotKnown> {
    let name = match member {
        NameOrId::Id(id) => return Ok(*id),
        NameOrId::Name(name) => name.clone(),
    };
    let what = kind.name();
    match directory.id(kind, &name) {
        Ok(Some(id)) => Ok(id),
        Ok(None) => {
            let names = directory.names(kind);
            let near = hint(&name, names.iter().map(String::as_str));
            Err(NotKnown::Unknown { what, name, hint: near.to_string() })
        }
        Err(source) => Err(NotKnown::LookUp { what, name, source }),
    }
}

/// The groups of an actor: those that the machine has for the user, and that of its connection where it knows no such user. So
/// they do not depend on how a client was started. May wait for the machine's directory of users.
pub(crate) fn groups_of(directory: &dyn Directory, actor: Actor) -> Vec<u32> {
    match directory.groups_of(actor.uid) {
        Ok(Some(gids)) => gids,
        Ok(None) => vec![actor.gid],
        Err(error) => {
            tracing::warn!(uid = actor.uid, %error, "the groups of a user cannot be looked up");
            vec![actor.gid]
        }
    }
}

/// A village for tests.
#[cfg(test)]
pub(crate) mod village {
    use super::*;

    /// Two users: ada in staff and lab, bob in staff. Nobody knows uid 9.
    #[derive(Debug)]
    pub(crate) struct Village;

    impl Directory for Village {
        fn id(&self, kind: Kind, name: &str) -> io::Result<Option<u32>> {
            Ok(match (kind, name) {
                (Kind::User, "ada") => Some(1),
                (Kind::User, "bob") => Some(2),
                (Kind::Group, "staff") => Some(10),
                (Kind::Group, "lab") => Some(11),
                (_, "slow") => return Err(io::ErrorKind::TimedOut.into()),
                _ => None,
            })
        }

        fn names(&self, kind: Kind) -> BTreeSet<String> {
            let names = if kind == Kind::User { ["ada", "bob"] } else { ["lab", "staff"] };
            names.map(str::to_owned).into()
        }

        fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>> {
            match uid {
                1 => Ok(Some(vec![10, 11])),
                2 => Ok(Some(vec![10])),
                3 => Err(io::ErrorKind::TimedOut.into()),
                _ => Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_knows_root_and_its_group() {
        let machine = Machine;
        assert_eq!(machine.id(Kind::User, "root").expect("it answers"), Some(0));
        assert_eq!(machine.id(Kind::User, "no such user").expect("it answers"), None);
        let groups = machine.groups_of(0).expect("it answers").expect("root is known");
        assert!(groups.contains(&0), "{groups:?}");
        assert_eq!(machine.groups_of(u32::MAX - 7).expect("it answers"), None);
        assert!(machine.names(Kind::User).contains("root"));
    }
}
