//! What is looked at in the places of draws: asked beside them, in the same rows.

use crate::batch::{Output, OutputFault, OutputKind, OutputRequest, Seen, Top};
use crate::sampling::Looks;

/// What a hidden state costs that leaves the device, in rows of logits: one from between layers, or one beside a draw, whose
/// row of logits there is.
const STATE_ROWS: f32 = 0.25;

/// What the states of one token cost, where nothing is drawn, in rows of logits. One after all layers of the model costs a row
/// itself: the device gathers it for the output projection, and gives back what went in.
pub(super) fn states_rows(n_layers: &[usize], n_layers_max: usize) -> f32 {
    n_layers.iter().map(|&n_layers| if n_layers == n_layers_max { 1.0 } else { STATE_ROWS }).sum()
}

/// What the launches of attention as an output cost in so many layers, in rows of logits. The keys that they read are priced as
/// pages ([`Work::n_pages_beside`](super::Work::n_pages_beside)).
pub(super) fn attention_rows(n_layers: usize) -> f32 {
    STATE_ROWS * n_layers as f32
}

impl Looks {
    /// Things that are asked in each place.
    pub(crate) fn n_asked(&self) -> usize {
        usize::from(self.n_top > 0) + self.hidden.len()
    }

    /// What that costs, in rows of logits.
    pub(super) fn n_rows(&self) -> f32 {
        f32::from(self.n_top > 0) + STATE_ROWS * self.hidden.len() as f32
    }

    /// What is asked beside a draw after this position.
    pub(super) fn requests(&self, position: usize) -> impl Iterator<Item = OutputRequest<'_>> {
        let top = (self.n_top > 0).then_some(OutputKind::Top { n: self.n_top });
        let hidden = self.hidden.iter().map(|&n_layers| OutputKind::Hidden { n_layers });
        top.into_iter().chain(hidden).map(move |kind| OutputRequest { position, kind })
    }

    /// Takes what came of it, and no more; `None` where nothing is looked at.
    pub(crate) fn take(
        &self,
        outputs: &mut impl Iterator<Item = Output>,
    ) -> Result<Option<Box<Seen>>, OutputFault> {
        if self.n_asked() == 0 {
            return Ok(None);
        }
        let mut seen = Seen::default();
        let mut fault = None;
        for output in outputs.take(self.n_asked()) {
            match output {
                Output::Top { candidates, entropy } => seen.top = Some(Top { candidates, entropy }),
                Output::Embedding(state) => seen.hidden.push(state),
                Output::Failed(failed) => fault = Some(failed),
                other => unreachable!("nobody looks for {other:?}"),
            }
        }
        fault.map_or(Ok(Some(Box::new(seen))), Err)
    }
}
