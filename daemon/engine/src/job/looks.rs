//! What is looked at in the places of draws: asked beside them, in the same rows.

use crate::batch::{Output, OutputFault, OutputKind, OutputRequest, Seen, Top};
use crate::sampling::Looks;

impl Looks {
    /// Things that are asked in each place.
    pub(crate) fn n_asked(&self) -> usize {
        usize::from(self.n_top > 0)
    }

    /// What that costs, in rows of logits.
    pub(super) fn n_rows(&self) -> f32 {
        self.n_asked() as f32
    }

    /// What is asked beside a draw after this position.
    pub(super) fn requests(&self, position: usize) -> impl Iterator<Item = OutputRequest<'_>> {
        let top = (self.n_top > 0).then_some(OutputKind::Top { n: self.n_top });
        top.into_iter().map(move |kind| OutputRequest { position, kind })
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
                Output::Failed(failed) => fault = Some(failed),
                other => unreachable!("nobody looks for {other:?}"),
            }
        }
        fault.map_or(Ok(Some(Box::new(seen))), Err)
    }
}
