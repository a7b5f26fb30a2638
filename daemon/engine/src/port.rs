//! How operations and completions travel between guests and their engine.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::account::BESIDE_OTHERS;

/// The way between the guests of an engine and its thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Port {
    /// Values are handed over as they are.
    #[default]
    Direct,
    /// Each is turned into bytes and back on its way, as it would be between processes: what is not data does not come
    /// through. For tests.
    Encoded,
}

impl Port {
    /// What travels.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn bytes_of<T: Serialize>(value: &T) -> Vec<u8> {
        rmp_serde::to_vec_named(value).expect("what travels is plain data")
    }

    /// What has come, if it is anything.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn value_of<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
        rmp_serde::from_slice(bytes).ok()
    }

    /// Brings one value to the other side.
    pub(crate) fn carry<T: Serialize + DeserializeOwned>(self, value: T) -> T {
        match self {
            Self::Direct => value,
            Self::Encoded => {
                let bytes = rmp_serde::to_vec_named(&value).expect("what travels is plain data");
                rmp_serde::from_slice(&bytes).expect("it was written so")
            }
        }
    }
}

/// A constant of the program in a field of an error. By its own name, so that `serde` does not take it for borrowed.
pub(crate) type Name = &'static str;

/// How a [`Name`] travels.
pub(crate) mod names {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(name: &&'static str, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(name)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<&'static str, D::Error> {
        String::deserialize(deserializer).map(super::known_name)
    }
}

/// How the names of a budget travel: there are no others, whatever arrives.
pub(crate) mod names_of_budgets {
    use serde::{Deserialize, Deserializer};

    pub(crate) use super::names::serialize;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<&'static str, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(super::of_budget(&name).unwrap_or(super::NO_NAME))
    }
}

/// Of budgets: the resources by their names, and the levels.
const OF_BUDGETS: [&str; 10] = [
    "tokens",
    "pages",
    "pages in host memory",
    "contexts",
    "bytes of host memory",
    "guest",
    "session",
    "user",
    BESIDE_OTHERS,
    "daemon",
];

/// What arrives under a name that is not known.
const NO_NAME: &str = "something without a name";

fn of_budget(name: &str) -> Option<&'static str> {
    OF_BUDGETS.into_iter().find(|known| *known == name)
}

/// The most names that are held for what has arrived, and the bytes of the longest.
const N_NAMES_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 128;

/// The constant of this text. There are as many as errors have names for things; of a sender that makes up others no more
/// are held than that.
fn known_name(name: String) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    if let Some(known) = of_budget(&name) {
        return known;
    }
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name.as_str()) {
        return known;
    }
    if names.len() >= N_NAMES_MAX || name.len() > NAME_BYTES_MAX {
        return NO_NAME;
    }
    let name: &'static str = name.leak();
    names.insert(name);
    name
}

/// Values that are shared on one side, and travel as what they are.
pub(crate) mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

/// As [`shared`], where there may be none.
pub(crate) mod shared_option {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Option<Arc<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_deref().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Arc<T>>, D::Error> {
        Ok(Option::<T>::deserialize(deserializer)?.map(Arc::new))
    }
}

/// As [`shared`], for lists.
pub(crate) mod shared_list {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Arc<[T]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<[T]>, D::Error> {
        Vec::<T>::deserialize(deserializer).map(Arc::from)
    }
}

/// As [`shared`], for each of a list.
pub(crate) mod shared_list_of {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        values: &[Arc<T>],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(Arc::as_ref))
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Arc<T>>, D::Error> {
        Ok(Vec::<T>::deserialize(deserializer)?.into_iter().map(Arc::new).collect())
    }
}
