//! What is looked at in the places of draws, for streams and generations.

use std::sync::Arc;

use trellis_engine::ModelHandle;
use trellis_engine::account::{Account, BudgetExceeded, HostCharge};
use trellis_engine::asked::{N_LAYERS_LOOKED_AT_MAX, N_TOP_LOOKED_AT_MAX};
use trellis_engine::batch::{Candidate, Seen};
use trellis_engine::sampling::{Looks, Sampler};

use super::convert::{candidate, invalid};
use super::types::HostError;
use crate::guest::bindings::trellis::host::decoding::Distribution;

/// Places in which a stream holds what it saw: 16 decoded ahead, 16 of a guess, and the last.
const N_PLACES_AHEAD: usize = 33;

/// What a place takes of host memory beside its candidates.
const PLACE_BYTES: usize = 32;

/// Layers as the engine counts them.
///
/// # Errors
/// More than there may be.
pub(super) fn layers(layers: Vec<u32>) -> Result<Vec<usize>, HostError> {
    if layers.len() > N_LAYERS_LOOKED_AT_MAX {
        return Err(invalid("layers", layers.len(), format!("at most {N_LAYERS_LOOKED_AT_MAX}")));
    }
    Ok(layers.into_iter().map(|n_layers| n_layers as usize).collect())
}

/// Has what draws by a sampler report what is looked at: so many candidates, and the hidden states of these layers.
///
/// # Errors
/// More candidates or layers than there may be.
pub(super) fn put_on(
    sampler: &mut Arc<Sampler>,
    model: &ModelHandle,
    n_top: u32,
    hidden: Vec<u32>,
) -> Result<(), HostError> {
    if n_top as usize > N_TOP_LOOKED_AT_MAX {
        return Err(invalid("top", n_top, format!("at most {N_TOP_LOOKED_AT_MAX}")));
    }
    let looks = Looks { n_top: n_top as usize, hidden: layers(hidden)? };
    model.check_layers(&looks.hidden)?;
    if sampler.looks != looks {
        Arc::make_mut(sampler).looks = looks;
    }
    Ok(())
}

/// The host memory of what is looked at in so many places.
pub(super) fn n_bytes(looks: &Looks, n_places: usize) -> usize {
    match looks.n_top {
        0 => 0,
        n_top => (n_top * size_of::<Candidate>() + PLACE_BYTES) * n_places,
    }
}

/// The host memory of what a stream looks at: in the places that are decoded ahead, in those of a guess, and in the one that
/// its guest looks at.
///
/// # Errors
/// There is not so much left.
pub(super) fn charge_ahead(
    account: &Arc<Account>,
    looks: &Looks,
    hidden_size: usize,
) -> Result<Option<HostCharge>, BudgetExceeded> {
    if looks.n_top == 0 && looks.hidden.is_empty() {
        return Ok(None);
    }
    let state_bytes = hidden_size * size_of::<f32>();
    let of_place = PLACE_BYTES + looks.n_top * size_of::<Candidate>() + looks.hidden.len() * state_bytes;
    HostCharge::new(account, (N_PLACES_AHEAD * of_place) as u64).map(Some)
}

/// The most probable tokens that were seen.
pub(super) fn top_of(seen: Option<Box<Seen>>) -> Option<Distribution> {
    let top = seen?.top?;
    let candidates = top.candidates.into_iter().map(candidate).collect();
    Some(Distribution { candidates, entropy: top.entropy })
}
