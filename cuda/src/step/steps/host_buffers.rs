//! What a step under way has in host memory.

use crate::{Event, Pinned};

/// Host memory of one step under way.
#[derive(Debug)]
pub(super) struct HostBuffers {
    pub(super) input: Pinned<u32>,
    pub(super) output: Pinned<u32>,
    /// What late masks bring.
    pub(super) late: Pinned<u32>,
    /// Rows that come back whole.
    pub(super) whole: Pinned<u32>,
    /// Hidden states between layers.
    pub(super) states: Pinned<f32>, // [.., hidden_size]
    pub(super) begun: Event,
    /// The layers are done of a step that waits for masks, and the draws begin.
    pub(super) layered: Event,
    pub(super) drawing: Event,
    pub(super) computed: Event,
    pub(super) done: Event,
}

impl HostBuffers {
    /// A copy to or from them may be under way, and nobody knows until when: nobody else gets them.
    pub(super) fn lose(&mut self) {
        let Self { input, output, late, whole, states, .. } = self;
        [input, output, late, whole].into_iter().for_each(Pinned::lose);
        states.lose();
    }
}
