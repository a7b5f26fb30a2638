//! What a process of guests has to know of a loaded model.

use serde::{Deserialize, Serialize};

use crate::backend::{Limits, WeightsInfo};
use crate::command::ModelId;
use crate::sampling::OperatorData;

/// A loaded model as its engine knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelFacts {
    pub(crate) id: ModelId,
    pub(crate) limits: Limits,
    pub(crate) weights: WeightsInfo,
    pub(crate) device: String,
    pub(crate) operator: Option<OperatorData>,
}

impl ModelFacts {
    /// Whether it has the place of another on their engine, which is gone.
    #[must_use]
    pub fn replaces(&self, other: &Self) -> bool {
        self.id.replaces(other.id)
    }
}
