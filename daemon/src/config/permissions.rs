//! Who may do what, as the file has it: `[permissions]`.

use std::fmt;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::NameOrId;

/// What stands for everybody.
const EVERYBODY: &str = "*";

/// What stands before the name or the number of a group.
const GROUP: char = '@';

/// Who may do what: users by name or number, groups as `"@NAME"` (supplementary ones count), and `"*"` for everybody who may open the
/// socket. The operator, root and the user that the daemon runs as, may do all of it, and alone stop, upgrade and reload the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct PermissionSettings {
    /// Who may run guests: users by name or number, groups as `"@NAME"`, `"*"` for everybody who may open the socket. The operator, root
    /// and the user that the daemon runs as, may do whatever stands in this table. Models of the catalog are loaded for whoever may
    /// run a guest that asks for one.
    pub run: Vec<Who>,
    /// Who may bring components of their own. Others run the guests of `guests_dir`.
    pub upload: Vec<Who>,
    /// Who may load and unload models, from any folder that the daemon can read.
    pub load: Vec<Who>,
    /// Who sees the guests of others, and what all users together have in use of limits.
    pub see_others: Vec<Who>,
    /// Who may stop the guests of others.
    pub stop_others: Vec<Who>,
}

impl Default for PermissionSettings {
    fn default() -> Self {
        let (everybody, nobody) = (|| vec![Who::Everybody], Vec::new);
        Self {
            run: everybody(),
            upload: everybody(),
            load: nobody(),
            see_others: nobody(),
            stop_others: nobody(),
        }
    }
}

/// Whom a permission is given to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NameOrId", into = "NameOrId")]
pub enum Who {
    /// Whoever may open the socket.
    Everybody,
    /// A user.
    User(NameOrId),
    /// Those who are in a group.
    Group(NameOrId),
}

/// What names nobody.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names nobody: there are users (\"ada\", 1001), groups (\"@lab\", \"@2001\") and \"*\" for everybody"
)]
pub struct NamesNobody(String);

impl TryFrom<NameOrId> for Who {
    type Error = NamesNobody;

    fn try_from(text: NameOrId) -> Result<Self, NamesNobody> {
        let name = match text {
            NameOrId::Id(_) => return Ok(Self::User(text)),
            NameOrId::Name(name) => name,
        };
        match name.strip_prefix(GROUP) {
            _ if name == EVERYBODY => Ok(Self::Everybody),
            Some("") => Err(NamesNobody(name)),
            Some(group) => Ok(Self::Group(match group.parse() {
                Ok(gid) => NameOrId::Id(gid),
                Err(_) => NameOrId::Name(group.to_owned()),
            })),
            None if name.is_empty() || name.contains(EVERYBODY) => Err(NamesNobody(name)),
            None => Ok(Self::User(NameOrId::Name(name))),
        }
    }
}

impl From<Who> for NameOrId {
    fn from(who: Who) -> Self {
        match who {
            Who::Everybody => Self::Name(EVERYBODY.to_owned()),
            Who::User(user) => user,
            Who::Group(Self::Id(gid)) => Self::Name(format!("{GROUP}{gid}")),
            Who::Group(Self::Name(name)) => Self::Name(format!("{GROUP}{name}")),
        }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        NameOrId::from(self.clone()).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_groups_and_everybody_are_told_apart_and_written_as_they_were_read() {
        let text = "run = [\"ada\", 1001, \"@lab\", \"@2001\", \"*\"]";
        let settings: PermissionSettings = toml::from_str(text).expect("valid");
        let name = |name: &str| NameOrId::Name(name.to_owned());
        assert_eq!(
            settings.run,
            [
                Who::User(name("ada")),
                Who::User(NameOrId::Id(1001)),
                Who::Group(name("lab")),
                Who::Group(NameOrId::Id(2001)),
                Who::Everybody
            ]
        );
        assert!(toml::to_string(&settings).expect("it serialises").contains(text));
        let PermissionSettings { upload, load, see_others, stop_others, .. } = settings;
        assert!(upload == [Who::Everybody] && load.is_empty());
        assert!(see_others.is_empty() && stop_others.is_empty());
    }

    #[test]
    fn what_names_nobody_is_refused() {
        for text in ["run = ['']", "run = ['@']", "run = ['*.lab']", "run = 'ada'", "run = [-1]"] {
            assert!(toml::from_str::<PermissionSettings>(text).is_err(), "{text}");
        }
    }
}
