//! Beam searches.

use super::{Data, Mismatch, Value};
use crate::guest::bindings::trellis::host::beams::{
    BeamSettings, EarlyStopping, FinishedHypothesis, KeptHypothesis, LiveHypothesis,
};

records! {
    BeamSettings {
        n_beams, n_groups, diversity_penalty, length_penalty, early_stopping, max_tokens, stop_tokens,
    }
    FinishedHypothesis { tokens, score }
    KeptHypothesis { continues, tokens, logprob }
    LiveHypothesis { parent, token, n_tokens, logprob, group }
}

cases! {
    EarlyStopping { Heuristic, AtOnce, Never }
}
