//! Long work in parts, between which it gives way to others, and ends when nobody wants it any more.

use std::fmt;
use std::sync::Arc;

/// Work was given up between two of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the work was given up")]
pub struct GivenUp;

/// What long work comes to between its parts. A part takes a few milliseconds at most, most take microseconds.
#[derive(Clone, Default)]
pub struct YieldPoint(Option<Arc<dyn Fn() -> Result<(), GivenUp> + Send + Sync>>);

impl fmt::Debug for YieldPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("YieldPoint").field(&self.0.is_some()).finish()
    }
}

impl YieldPoint {
    /// That of work which goes on to its end.
    pub const NONE: Self = Self(None);

    /// One where this is called, which may block for as long as others have their turn.
    pub fn new(reached: impl Fn() -> Result<(), GivenUp> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(reached)))
    }

    /// To be called between two parts of the work.
    ///
    /// # Errors
    /// Nobody wants the work any more.
    pub fn reach(&self) -> Result<(), GivenUp> {
        self.0.as_ref().map_or(Ok(()), |reached| reached())
    }
}
