//! The tokens of a context as its caller has them.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::batch::{Token, Tokens};
use crate::segments::Segments;

/// Tokens that forks share as a whole.
const N_SEGMENT_TOKENS: usize = 4096;

/// Forks, and what is saved of them and opened again, share all but the last few thousand tokens.
pub(crate) type History = Segments<Token, N_SEGMENT_TOKENS>;

impl History {
    pub(crate) fn view(&self) -> Tokens<'_> {
        Tokens::shared(self.segments(), self.tail(), N_SEGMENT_TOKENS)
    }
}

impl Serialize for History {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for History {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<Token>::deserialize(deserializer).map(Self::from)
    }
}
