//! The machine's users and groups.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fmt;
use std::fs;
use std::io;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

/// What a number or a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    User,
    Group,
}

impl Kind {
    /// The name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Group => "group",
        }
    }
}

/// Where users and groups are known.
pub(super) trait Directory: fmt::Debug + Send + Sync {
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
pub(super) struct Machine;

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
