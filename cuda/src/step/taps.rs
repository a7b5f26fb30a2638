//! Hidden states between layers, copied to the host while a step is launched: each layer's are gone with the next one.
//!
//! A step with such copies is launched call by call. The host does not wait for them; the stream comes to each behind its
//! layer, some thousandths of a millisecond for a state.

use trellis_engine::batch::{OutputKind, OutputRequest};

/// States of consecutive tokens, copied together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tap {
    /// Layers before them.
    pub(crate) n_layers: usize,
    /// The first token among those of the step.
    pub(crate) token: usize,
    pub(crate) n_tokens: usize,
    /// The first one's place among all states of the step that come back.
    pub(crate) state: usize,
}

/// All of a step.
#[derive(Debug, Default)]
pub(crate) struct Taps {
    pub(crate) taps: Vec<Tap>,
    n_states: usize,
    /// Requests of one row; kept for its memory.
    order: Vec<usize>,
}

impl Taps {
    pub(crate) fn clear(&mut self) {
        self.taps.clear();
        self.n_states = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.taps.is_empty()
    }

    /// States that come back.
    pub(crate) fn n_states(&self) -> usize {
        self.n_states
    }

    /// Takes in what the requests of a row ask for between layers, of which there are `n_layers_max`: those of each
    /// layer lie behind each other. The token at position `start` is the step's `first_token`-th. Says for each request
    /// which state that is.
    pub(crate) fn push(
        &mut self,
        requests: &[OutputRequest<'_>],
        n_layers_max: usize,
        (start, first_token): (usize, usize),
        mut place: impl FnMut(usize, usize),
    ) {
        let layers_of = |request_idx: &usize| match requests[*request_idx].kind {
            OutputKind::Hidden { n_layers } if n_layers < n_layers_max => Some(n_layers),
            _ => None,
        };
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend((0..requests.len()).filter(|idx| layers_of(idx).is_some()));
        order.sort_by_key(|idx| (layers_of(idx), requests[*idx].position));
        for &request_idx in &order {
            let n_layers = layers_of(&request_idx).expect("it was kept for that");
            let token = first_token + requests[request_idx].position - start;
            let state = self.n_states;
            self.n_states += 1;
            place(request_idx, state);
            match self.taps.last_mut() {
                Some(last) if last.n_layers == n_layers && last.token + last.n_tokens == token => {
                    last.n_tokens += 1;
                }
                _ => self.taps.push(Tap { n_layers, token, n_tokens: 1, state }),
            }
        }
        self.order = order;
    }

    /// Those of the states after so many layers.
    pub(crate) fn after(&self, n_layers: usize) -> impl Iterator<Item = &Tap> {
        self.taps.iter().filter(move |tap| tap.n_layers == n_layers)
    }
}
