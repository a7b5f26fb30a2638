//! Whether a user may get at a file, by the modes on the way to it: for one that this process is not.
//!
//! Where an access control list stands beside a mode it decides, and is not read here: such a file passes. Whoever opens it hears.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

/// The attribute that holds an access control list.
const ACL: &str = "system.posix_acl_access";

/// A user with its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    name: String,
    uid: u32,
    gids: Vec<u32>,
}

/// What is wanted of a file, as the bits that others have of its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// To look into a folder for a name that is known.
    Search = 0o1,
    Write = 0o2,
    Read = 0o4,
    /// To list a folder and open what is in it.
    List = 0o5,
    ReadWrite = 0o6,
}

/// A file or a folder that a user is kept from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Closed {
    pub(super) path: PathBuf,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
    wanted: Wanted,
}

/// The number of a user who is not there yet; it is no user's.
const STRANGER: u32 = u32::MAX - 1;

impl Identity {
    /// Who this process runs as.
    pub(super) fn this_process() -> Self {
        let gids = rustix::process::getgroups().unwrap_or_default();
        let gids = gids.into_iter().chain([rustix::process::getegid()]).map(|gid| gid.as_raw()).collect();
        let uid = rustix::process::geteuid().as_raw();
        Self { name: user_name(uid), uid, gids }
    }

    /// A user who is not there yet, and will be in no group that files are of.
    pub(super) fn stranger(name: &str) -> Self {
        Self { name: name.to_owned(), uid: STRANGER, gids: Vec::new() }
    }

    /// A user by its number.
    #[cfg(test)]
    pub(super) fn new(uid: u32, gids: Vec<u32>) -> Self {
        Self { name: user_name(uid), uid, gids }
    }

    /// A user of this machine, with all groups that it has by the machine's name service; none if there is no such user.
    ///
    /// # Errors
    /// It cannot be looked up.
    pub(super) fn of_user(name: &str) -> io::Result<Option<Self>> {
        let Some(user) = User::from_name(name)? else { return Ok(None) };
        let c_name = std::ffi::CString::new(name).map_err(io::Error::other)?;
        let gids = getgrouplist(&c_name, user.gid)?.into_iter().map(Gid::as_raw).collect();
        Ok(Some(Self { name: name.to_owned(), uid: user.uid.as_raw(), gids }))
    }

    /// Whether this user may do that with such a file.
    fn may(&self, metadata: &Metadata, wanted: Wanted) -> bool {
        let mode = metadata.mode();
        let bits = match (self.uid == metadata.uid(), self.gids.contains(&metadata.gid())) {
            (true, _) => mode >> 6,
            (false, true) => mode >> 3,
            (false, false) => mode,
        };
        let is_root = self.uid == 0 && (!metadata.is_file() || wanted != Wanted::Search);
        is_root || bits & wanted as u32 == wanted as u32
    }

    /// The first thing on the way to a file, or the file itself, that this user is kept from. Links are followed; nothing where
    /// the way ends before the file.
    pub(super) fn kept_from(&self, path: &Path, wanted: Wanted) -> Option<Closed> {
        let real = path.canonicalize().ok();
        let ways = [Some(path), real.as_deref()].into_iter().flatten();
        let mut folders: Vec<&Path> = ways.flat_map(|way| way.ancestors().skip(1)).collect();
        folders.retain(|folder| !folder.as_os_str().is_empty());
        folders.sort_by_key(|folder| folder.components().count());
        let folders = folders.into_iter().map(|folder| (folder, Wanted::Search));
        folders.chain([(path, wanted)]).find_map(|(path, wanted)| self.closed(path, wanted))
    }

    fn closed(&self, path: &Path, wanted: Wanted) -> Option<Closed> {
        let metadata = fs::metadata(path).ok()?;
        let is_closed = !self.may(&metadata, wanted) && !has_acl(path);
        let (uid, gid, mode) = (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777);
        is_closed.then(|| Closed { path: path.to_owned(), uid, gid, mode, wanted })
    }

    /// The user's number.
    pub(super) fn uid(&self) -> u32 {
        self.uid
    }

    /// The user's name, or its number where it has none.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Closed {
    /// A file of this owner and group that has this mode.
    #[cfg(test)]
    pub(super) fn of_file(path: &Path, (uid, gid): (u32, u32), mode: u32, wanted: Wanted) -> Self {
        Self { path: path.to_owned(), uid, gid, mode, wanted }
    }

    /// The group that is let in, if one is.
    pub(super) fn group(&self) -> Option<String> {
        let bits = (self.mode >> 3) & self.wanted as u32;
        (bits == self.wanted as u32 && self.gid != 0).then(|| group_name(self.gid))
    }

    /// `for ada and the group models`
    pub(super) fn whose(&self) -> String {
        let owner = user_name(self.uid);
        match self.group() {
            Some(group) => format!("for {owner} and the group {group}"),
            None => format!("for {owner} alone"),
        }
    }

    /// What lets this user in, as a command.
    pub(super) fn remedy(&self, who: &Identity) -> String {
        let (user, path) = (who.name(), self.path.display());
        match self.group() {
            Some(group) if is_member(user, self.gid) => {
                format!(
                    "log in again: this login is older than the membership of {group} (`newgrp {group}` for one shell)"
                )
            }
            Some(group) => format!("`sudo usermod -aG {group} {user}`, and log in again"),
            None => {
                let bits = match self.wanted {
                    Wanted::Search => "x",
                    Wanted::Write => "w",
                    Wanted::Read => "r",
                    Wanted::List => "rx",
                    Wanted::ReadWrite => "rw",
                };
                match who.uid {
                    STRANGER => format!("`sudo chmod o+{bits} {path}`"),
                    _ => format!("`sudo setfacl -m u:{user}:{bits} {path}`"),
                }
            }
        }
    }

    /// `/srv/models: mode 700, owner ada, group ada`
    pub(super) fn details(&self) -> String {
        let (owner, group) = (user_name(self.uid), group_name(self.gid));
        format!("{}: mode {:o}, owner {owner}, group {group}", self.path.display(), self.mode)
    }
}

/// Whether the machine's name service has the user in the group, whatever the groups of this login.
fn is_member(user: &str, gid: u32) -> bool {
    let found = Identity::of_user(user).ok().flatten();
    found.is_some_and(|found| found.gids.contains(&gid))
}

fn has_acl(path: &Path) -> bool {
    rustix::fs::getxattr(path, ACL, &mut [0u8; 0]).is_ok_and(|n_bytes| n_bytes > 0)
}

/// The name of a user, or its number where it has none.
pub(super) fn user_name(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// The name of a group, or its number where it has none.
pub(super) fn group_name(gid: u32) -> String {
    let group = Group::from_gid(Gid::from_raw(gid)).ok().flatten();
    group.map_or_else(|| gid.to_string(), |group| group.name)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_user_is_kept_from_what_the_modes_on_the_way_close() {
        let root = tempfile::tempdir().expect("a folder");
        let (folder, file) = (root.path().join("models"), root.path().join("models/config.json"));
        fs::create_dir(&folder).expect("made");
        fs::write(&file, "{}").expect("written");
        let set =
            |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
        set(root.path(), 0o755);
        set(&folder, 0o750);
        set(&file, 0o644);
        let metadata = fs::metadata(&folder).expect("it is there");
        let (uid, gid) = (metadata.uid(), metadata.gid());
        let other = Identity::new(uid + 4321, vec![gid + 4321]);
        let member = Identity::new(uid + 4321, vec![7, gid]);
        let owner = Identity::new(uid, Vec::new());

        let closed = other.kept_from(&file, Wanted::Read).expect("the folder is closed");
        assert_eq!((closed.path.as_path(), closed.mode), (folder.as_path(), 0o750));
        assert_eq!(member.kept_from(&file, Wanted::Read), None);
        assert_eq!(owner.kept_from(&file, Wanted::ReadWrite), None);
        assert!(closed.details().contains("mode 750"), "{}", closed.details());
        set(&folder, 0o755);
        assert_eq!(other.kept_from(&file, Wanted::Read), None);
        assert!(
            other
                .kept_from(&file, Wanted::Write)
                .expect("it is not writable")
                .remedy(&other)
                .contains("setfacl")
        );
        set(&folder, 0o744);
        assert_eq!(other.kept_from(&folder, Wanted::Read), None);
        assert_eq!(other.kept_from(&folder, Wanted::List).expect("not to be searched").path, folder);

        // By a link, the way on the other side counts as well.
        let (link, hidden) = (root.path().join("link"), root.path().join("hidden"));
        fs::create_dir(&hidden).expect("made");
        fs::write(hidden.join("blob"), "").expect("written");
        set(&hidden.join("blob"), 0o644);
        set(&hidden, 0o700);
        std::os::unix::fs::symlink(hidden.join("blob"), &link).expect("made");
        assert_eq!(other.kept_from(&link, Wanted::Read).expect("behind the link").path, hidden);
        set(&hidden, 0o755);
        assert_eq!(other.kept_from(&link, Wanted::Read), None);
    }

    #[test]
    fn a_group_that_is_let_in_is_named_and_roots_is_not() {
        let closed =
            |mode, gid| Closed::of_file(Path::new("/dev/nvidia0"), (0, gid), mode, Wanted::ReadWrite);
        let who = Identity::new(4_000_000, Vec::new());
        let gid = 3_999_999;
        assert_eq!(closed(0o660, gid).group().as_deref(), Some("3999999"));
        assert_eq!(closed(0o660, gid).remedy(&who), "`sudo usermod -aG 3999999 4000000`, and log in again");
        assert_eq!(closed(0o660, gid).whose(), "for root and the group 3999999");
        assert_eq!(closed(0o640, gid).group(), None);
        assert_eq!(closed(0o660, 0).group(), None);
        assert!(closed(0o660, 0).whose().starts_with("for root alone"));
    }
}
