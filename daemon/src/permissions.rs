//! Who may do what.
//!
//! - Comes in: `[permissions]` of the configuration, the machine's users and groups, an actor as the kernel names it.
//! - Goes out: that the actor may, or an error that names the permission which it lacks and who gives it. Nothing else in the daemon
//!   decides what one user may do and another may not.
//! - The operator, root and the user that the daemon runs as, may do everything. What is theirs alone is [`Permission::Operate`],
//!   which no configuration gives to anybody else.
//! - Groups are those that the machine has for a user ([`Groups`]). Where it does not say, nobody is told that it lacks a permission,
//!   but that it may try again.
//! - Must not happen: a name that stands for nobody and is passed over; a look-up where the user by itself, or everybody, may, or no
//!   group is named.

use std::collections::HashSet;
use std::sync::Arc;

use trellis_wire::{ErrorBody, ErrorCode};

use crate::config::{PermissionSettings, Who};
use crate::directory::{Directory, Kind, Machine, NotKnown, number};
use crate::groups::Groups;
use crate::session::Actor;

/// What somebody may do or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Run guests.
    Run,
    /// Bring components.
    Upload,
    /// Load and unload models.
    Load,
    /// See what is of others.
    SeeOthers,
    /// Stop guests of others.
    StopOthers,
    /// Stop the daemon, put another program in its place, have it read its configuration again, read its log, and know where its files are.
    Operate,
}

impl Permission {
    const ALL: [Self; 6] =
        [Self::Run, Self::Upload, Self::Load, Self::SeeOthers, Self::StopOthers, Self::Operate];

    /// The name, which is that of the setting where there is one.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Upload => "upload",
            Self::Load => "load",
            Self::SeeOthers => "see_others",
            Self::StopOthers => "stop_others",
            Self::Operate => "operate",
        }
    }

    /// What it is to do that.
    fn deed(self) -> &'static str {
        match self {
            Self::Run => "run guests",
            Self::Upload => "bring components of its own, and runs those that are registered",
            Self::Load => "load and unload models, or ask about others than those that are loaded on demand",
            Self::SeeOthers => "see the guests of others",
            Self::StopOthers => "stop the guests of others",
            Self::Operate => "stop, upgrade or reload the daemon, or read its log",
        }
    }

    fn given(self, settings: &PermissionSettings) -> &[Who] {
        match self {
            Self::Run => &settings.run,
            Self::Upload => &settings.upload,
            Self::Load => &settings.load,
            Self::SeeOthers => &settings.see_others,
            Self::StopOthers => &settings.stop_others,
            Self::Operate => &[],
        }
    }
}

/// Permissions that are given to nobody known.
#[derive(Debug, thiserror::Error)]
#[error("permissions.{permission}: {source}")]
pub struct PermissionError {
    permission: &'static str,
    source: NotKnown,
}

/// To whom a permission is given.
#[derive(Debug, Default)]
struct Given {
    everybody: bool,
    users: HashSet<u32>,
    groups: HashSet<u32>,
}

/// Who may do what, and which groups users are in.
#[derive(Debug)]
pub(crate) struct Permissions {
    given: [Given; Permission::ALL.len()],
    groups: Groups,
}

/// Whether an actor is root, or the user that the daemon runs as.
pub(crate) fn is_operator(actor: Actor) -> bool {
    actor.uid == 0 || actor.uid == Actor::this_process().uid
}

impl Permissions {
    /// Those of a configuration on this machine.
    ///
    /// # Errors
    /// A name stands for nobody.
    pub(crate) fn of(settings: &PermissionSettings) -> Result<Self, PermissionError> {
        Self::in_directory(settings, Arc::new(Machine))
    }

    fn in_directory(
        settings: &PermissionSettings,
        directory: Arc<dyn Directory>,
    ) -> Result<Self, PermissionError> {
        let mut given: [Given; Permission::ALL.len()] = Default::default();
        for (given, permission) in given.iter_mut().zip(Permission::ALL) {
            let known = |kind, member| {
                let wrong = |source| PermissionError { permission: permission.name(), source };
                number(&*directory, kind, member).map_err(wrong)
            };
            for who in permission.given(settings) {
                match who {
                    Who::Everybody => given.everybody = true,
                    Who::User(user) => drop(given.users.insert(known(Kind::User, user)?)),
                    Who::Group(group) => drop(given.groups.insert(known(Kind::Group, group)?)),
                }
            }
        }
        Ok(Self { given, groups: Groups::of_directory(directory) })
    }

    /// Says whether an actor may do that.
    ///
    /// # Errors
    /// It may not: which permission it lacks, and who gives it. Or that cannot be found out now.
    pub(crate) async fn check(&self, actor: Actor, permission: Permission) -> Result<(), ErrorBody> {
        if self.has(actor, permission).await? { Ok(()) } else { Err(lacks(actor, permission)) }
    }

    /// Whether an actor may do that.
    ///
    /// # Errors
    /// It depends on the actor's groups, which cannot be looked up now.
    pub(crate) async fn has(&self, actor: Actor, permission: Permission) -> Result<bool, ErrorBody> {
        match self.at_hand(actor, permission) {
            Some(has) => Ok(has),
            None => Ok(self.is_given(permission, &self.groups.of(actor.uid).await?)),
        }
    }

    /// The names of all that an actor may do, by one look-up at most.
    ///
    /// # Errors
    /// As [`Self::has`].
    pub(crate) async fn names(&self, actor: Actor) -> Result<Vec<String>, ErrorBody> {
        let depends = Permission::ALL.into_iter().any(|permission| self.at_hand(actor, permission).is_none());
        let gids = if depends { self.groups.of(actor.uid).await? } else { Arc::default() };
        let has = |permission: &Permission| {
            self.at_hand(actor, *permission).unwrap_or_else(|| self.is_given(*permission, &gids))
        };
        Ok(Permission::ALL.into_iter().filter(has).map(|permission| permission.name().to_owned()).collect())
    }

    /// Whether an actor may do that, unless it depends on its groups.
    fn at_hand(&self, actor: Actor, permission: Permission) -> Option<bool> {
        let given = &self.given[permission as usize];
        if is_operator(actor) || given.everybody || given.users.contains(&actor.uid) {
            return Some(true);
        }
        given.groups.is_empty().then_some(false)
    }

    /// Whether one of these groups may do that.
    fn is_given(&self, permission: Permission, gids: &[u32]) -> bool {
        gids.iter().any(|gid| self.given[permission as usize].groups.contains(gid))
    }
}

fn lacks(actor: Actor, permission: Permission) -> ErrorBody {
    let (uid, own, name, deed) = (actor.uid, Actor::this_process().uid, permission.name(), permission.deed());
    let operator = match own {
        0 => "root".to_owned(),
        own => format!("root or user {own}, who runs it"),
    };
    let message = match permission {
        Permission::Operate => format!("user {uid} may not {deed}: that is for {operator}"),
        _ => format!(
            "user {uid} may not {deed}: it lacks the permission {name:?} of this daemon, which its operator ({operator}) \
             gives in [permissions] of the configuration"
        ),
    };
    ErrorBody::new(ErrorCode::PermissionDenied, message).about(name).with_value(uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::village::Village;

    const EVERYTHING: [&str; 6] = ["run", "upload", "load", "see_others", "stop_others", "operate"];

    fn permissions(text: &str) -> Result<Permissions, PermissionError> {
        Permissions::in_directory(&toml::from_str(text).expect("it parses"), Arc::new(Village))
    }

    async fn names(permissions: &Permissions, uid: u32, gid: u32) -> Vec<String> {
        permissions.names(Actor { uid, gid }).await.expect("the village answers")
    }

    #[tokio::test]
    async fn by_default_everybody_runs_and_uploads_and_the_operator_may_all() {
        let permissions = Permissions::of(&PermissionSettings::default()).expect("there are no names in it");
        assert_eq!(names(&permissions, u32::MAX - 9, 7).await, ["run", "upload"]);
        assert_eq!(names(&permissions, 0, 7).await, EVERYTHING);
        assert_eq!(permissions.names(Actor::this_process()).await.expect("at hand"), EVERYTHING);
        assert!(permissions.groups.is_empty(), "nothing was looked up");
    }

    #[tokio::test]
    async fn users_have_what_is_given_to_them_to_their_groups_and_to_everybody() {
        let text =
            "run = ['@staff']\nupload = ['ada', 7]\nload = ['@lab']\nsee_others = ['*']\nstop_others = []";
        let permissions = permissions(text).expect("all are known");
        assert_eq!(names(&permissions, 1, 99).await, ["run", "upload", "load", "see_others"]);
        assert_eq!(names(&permissions, 2, 99).await, ["run", "see_others"]);
        // The machine knows no such user: the group of its connection gives nothing.
        assert_eq!(names(&permissions, 7, 11).await, ["upload", "see_others"]);
        // And where it does not answer, it is not said that a user may not.
        let silent = Actor { uid: 3, gid: 10 };
        assert!(permissions.names(silent).await.expect_err("it does not say").code.is_retryable());
        let error = permissions.check(silent, Permission::Run).await.expect_err("it does not say");
        assert!(error.code.is_retryable(), "{error:?}");
        assert!(permissions.has(silent, Permission::SeeOthers).await.expect("everybody may"));
        assert!(!permissions.has(silent, Permission::StopOthers).await.expect("nobody may"));
    }

    #[tokio::test]
    async fn who_may_not_is_told_what_is_lacking_and_who_gives_it() {
        let permissions = permissions("run = []").expect("nobody is named");
        let refused = async |permission| {
            permissions.check(Actor { uid: 2, gid: 2 }, permission).await.expect_err("it may not")
        };
        let error = refused(Permission::Run).await;
        assert_eq!(
            (error.code, error.name.as_deref(), error.value.as_deref()),
            (ErrorCode::PermissionDenied, Some("run"), Some("2"))
        );
        let start = "user 2 may not run guests: it lacks the permission \"run\" of this daemon, which its operator (root";
        assert!(error.message.starts_with(start), "{}", error.message);
        assert!(error.message.ends_with("gives in [permissions] of the configuration"), "{}", error.message);
        let error = refused(Permission::Operate).await;
        assert!(error.message.starts_with(
            "user 2 may not stop, upgrade or reload the daemon, or read its log: that is for root"
        ));
    }

    #[test]
    fn names_of_nobody_are_errors_that_name_the_nearest() {
        for (text, message) in [
            ("load = ['adda']", "permissions.load: this machine has no user \"adda\"; did you mean \"ada\"?"),
            (
                "see_others = ['@stuff']",
                "permissions.see_others: this machine has no group \"stuff\"; did you mean \"staff\"?",
            ),
            ("run = ['@slow']", "permissions.run: the group \"slow\" cannot be looked up: timed out"),
        ] {
            assert_eq!(permissions(text).expect_err(text).to_string(), message);
        }
    }
}
