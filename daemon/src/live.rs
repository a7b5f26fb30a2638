//! What holds for everybody and may be replaced while the daemon runs.

use std::sync::{Arc, PoisonError, RwLock};

/// A value that is replaced as a whole: whoever has begun with one goes on with it.
#[derive(Debug, Default)]
pub(crate) struct Live<T>(RwLock<Arc<T>>);

impl<T> Live<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(RwLock::new(Arc::new(value)))
    }

    /// The value that holds now.
    pub(crate) fn get(&self) -> Arc<T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has another hold from now on.
    pub(crate) fn set(&self, value: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
    }
}
