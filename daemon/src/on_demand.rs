//! Models that are loaded when a guest asks for them: by which names, and how a guest comes to one, whether it runs in the
//! daemon or in a process of its user's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use trellis_engine::ModelHandle;
use trellis_engine::account::{ActorId, GuestId};

use crate::config::Config;

/// The names under which guests find models that may not be loaded yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Declared {
    /// The name of the model, by that and by each of its aliases.
    names: BTreeMap<String, String>,
    /// What a guest gets that names none, if that is such a model.
    default: Option<String>,
}

impl Declared {
    /// Those of these settings.
    pub(crate) fn of(config: &Config) -> Self {
        let all = config.catalog.iter().flat_map(|(name, model)| {
            model.aliases.iter().chain([name]).map(move |alias| (alias.clone(), name.clone()))
        });
        let names: BTreeMap<String, String> = all.collect();
        let default = match config.models.first() {
            Some(first) => names.get(first).cloned(),
            None if config.catalog.len() == 1 => config.catalog.keys().next().cloned(),
            None => None,
        };
        Self { names, default }
    }

    /// The name of the model that is meant by a name, if there is such a model.
    pub(crate) fn resolve(&self, name: &str) -> Option<&str> {
        self.names.get(name).map(String::as_str)
    }

    /// The model that guests get when they name none, if it is one of these.
    pub(crate) fn default_model(&self) -> Option<&str> {
        self.default.as_deref()
    }

    /// The names of the models.
    pub(crate) fn models(&self) -> impl Iterator<Item = &str> {
        self.names.iter().filter(|(alias, name)| alias == name).map(|(_, name)| name.as_str())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

/// On whose behalf a model is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    pub(crate) guest: GuestId,
    pub(crate) user: ActorId,
    /// Of the guest's client.
    pub(crate) loads: LoadListener,
}

/// What is done with the name of a model, bytes that are done, and bytes in all.
type Hear = dyn Fn(&str, u64, u64) + Send + Sync;

/// Hears how far the load is for which a guest waits: the name of the model, bytes that are done, and bytes in all.
#[derive(Clone)]
pub struct LoadListener(Arc<Hear>);

impl LoadListener {
    /// One that does this with what it hears; it must not block.
    pub fn new(hear: impl Fn(&str, u64, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hear))
    }

    pub(crate) fn hear(&self, model: &str, done_bytes: u64, total_bytes: u64) {
        (self.0)(model, done_bytes, total_bytes);
    }
}

impl Default for LoadListener {
    /// One that hears nothing.
    fn default() -> Self {
        Self::new(|_, _, _| {})
    }
}

impl fmt::Debug for LoadListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadListener")
    }
}

/// Keeps a model for a guest that holds it, until it is dropped.
pub(crate) trait Claim: fmt::Debug + Send + Sync {}

/// A model that a guest asked for.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) model: ModelHandle,
    /// The model is not unloaded to make room as long as the guest has this.
    pub(crate) claim: Box<dyn Claim>,
}

/// Why a guest does not get a model that it may ask for. The daemon's log may say more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NotLoaded {
    /// For the guest and its client, whatever user that is.
    pub(crate) reason: String,
    pub(crate) again: Again,
}

/// Whether somebody may ask again for what he did not get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Again {
    /// That would come to the same.
    Never,
    /// After a while.
    Later,
    /// This daemon ends.
    NextDaemon,
}

/// Loads what is asked for.
pub(crate) trait Opener: fmt::Debug + Send + Sync {
    /// The model of this name, loaded if it was not; all that ask for it meanwhile wait for one load. If the future is dropped, its
    /// guest does not wait any more.
    fn open(&self, name: &str, asker: Asker) -> BoxFuture<'static, Result<Opened, NotLoaded>>;

    /// Forgets what a guest's user has saved under a name of models that are not loaded; whether there was anything.
    fn forget(&self, name: &str, asker: Asker) -> BoxFuture<'static, bool>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_found_by_its_name_and_its_aliases() {
        let declared = |text: &str| Declared::of(&Config::parse(text).expect("valid"));
        let catalog = "[catalog.small]\npath = 'draft'\naliases = ['s']\n[catalog.large]\npath = 'tiny'";
        let all = declared(&format!("models = ['small']\n{catalog}"));
        assert_eq!(
            [all.resolve("s"), all.resolve("small"), all.resolve("draft")],
            [Some("small"), Some("small"), None]
        );
        assert_eq!(all.models().collect::<Vec<_>>(), ["large", "small"]);
        assert_eq!(all.default_model(), Some("small"));
        assert_eq!(declared(&format!("models = []\n{catalog}")).default_model(), None, "there are two");
        assert_eq!(declared("models = []\n[catalog.one]\npath = 'tiny'").default_model(), Some("one"));
        assert_eq!(
            declared("[catalog.one]\npath = 'draft'").default_model(),
            None,
            "it is `tiny`, which stays"
        );
        assert!(declared("").is_empty());
    }
}
