//! Models that are loaded when somebody asks for them.

use std::collections::BTreeMap;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::Device;

/// Models that are declared, by their names.
pub type Catalog = BTreeMap<String, CatalogModel>;

/// A model that any user may cause to be loaded, by asking for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct CatalogModel {
    /// Where it is from: the name of a bundled model (`tiny`, `draft`), a folder in the Hugging Face layout, a folder of the Hugging Face
    /// cache as it lies there (`models--ORG--NAME`, of which the snapshot of `refs/main` is taken), a GGUF file, or `shape:NAME`. It has to be set.
    pub path: String,
    /// What runs it; what runs the daemon's other models when absent.
    pub device: Option<Device>,
    /// Whether it stays once it is loaded. One that is not makes room for others that somebody asks for, once no guest has anything of
    /// it: the one that was used longest ago goes first, and where saved contexts are not kept on disk what guests have saved of it.
    pub is_pinned: bool,
    /// Milliseconds without a guest that has anything of it after which it is unloaded, at least 1; never when absent.
    pub idle_unload_ms: Option<u64>,
    /// Other names under which guests find it.
    pub aliases: Vec<String>,
}

/// A catalog that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongCatalog {
    /// A model from nowhere.
    #[error("catalog.{model}.path is not set")]
    NoPath {
        /// The model.
        model: String,
    },
    /// A name that is none.
    #[error("catalog.{model} has an empty name or alias")]
    NoName {
        /// The model.
        model: String,
    },
    /// A name that stands for two models.
    #[error("catalog.{model}.aliases has {alias:?}, which is a name of catalog.{other} as well")]
    Ambiguous {
        /// The model.
        model: String,
        /// The name.
        alias: String,
        /// The other model.
        other: String,
    },
    /// A model that would go before anybody can use it.
    #[error(
        "catalog.{model}.idle_unload_ms is 0: it would go as soon as it comes; leave it out for a model that stays"
    )]
    IdleAtOnce {
        /// The model.
        model: String,
    },
    /// A model that is to stay and to go.
    #[error("catalog.{model} sets idle_unload_ms, and is_pinned, which keeps it loaded")]
    PinnedAndIdle {
        /// The model.
        model: String,
    },
}

/// Checks what can be told without looking at any folder.
///
/// # Errors
/// A path is missing, a name stands for two models, or a model is pinned and to be unloaded, or to be unloaded at once.
pub(super) fn check(catalog: &Catalog) -> Result<(), WrongCatalog> {
    let mut names: BTreeMap<&str, &str> = catalog.keys().map(|name| (name.as_str(), name.as_str())).collect();
    for (model, CatalogModel { path, is_pinned, idle_unload_ms, aliases, .. }) in catalog {
        if path.is_empty() {
            return Err(WrongCatalog::NoPath { model: model.clone() });
        }
        if model.is_empty() || aliases.iter().any(String::is_empty) {
            return Err(WrongCatalog::NoName { model: model.clone() });
        }
        if *is_pinned && idle_unload_ms.is_some() {
            return Err(WrongCatalog::PinnedAndIdle { model: model.clone() });
        }
        if *idle_unload_ms == Some(0) {
            return Err(WrongCatalog::IdleAtOnce { model: model.clone() });
        }
        for alias in aliases {
            if let Some(other) = names.insert(alias, model) {
                let (model, alias, other) = (model.clone(), alias.clone(), other.to_owned());
                return Err(WrongCatalog::Ambiguous { model, alias, other });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_from_nowhere_and_a_name_of_two_are_refused() {
        let checked = |text: &str| check(&toml::from_str(text).expect("it parses"));
        let well = "[small]\npath = 'draft'\naliases = ['s', 'little']\nidle_unload_ms = 60000\n\
                    [large]\npath = '/models/large'\ndevice = 'cuda:1'\nis_pinned = true\naliases = ['l']";
        assert_eq!(checked(well), Ok(()));
        for (text, message) in [
            ("[small]\naliases = ['s']", "catalog.small.path is not set"),
            ("[small]\npath = 'draft'\naliases = ['']", "catalog.small has an empty name or alias"),
            (
                "[a]\npath = 'draft'\naliases = ['s']\n[b]\npath = 'tiny'\naliases = ['s']",
                "catalog.b.aliases has \"s\", which is a name of catalog.a as well",
            ),
            (
                "[a]\npath = 'draft'\naliases = ['b']\n[b]\npath = 'tiny'",
                "catalog.a.aliases has \"b\", which is a name of catalog.b as well",
            ),
            (
                "[a]\npath = 'draft'\nis_pinned = true\nidle_unload_ms = 1",
                "catalog.a sets idle_unload_ms, and is_pinned, which keeps it loaded",
            ),
            (
                "[a]\npath = 'draft'\nidle_unload_ms = 0",
                "catalog.a.idle_unload_ms is 0: it would go as soon as it comes; leave it out for a model that stays",
            ),
        ] {
            assert_eq!(checked(text).expect_err(text).to_string(), message);
        }
    }
}
