//! What a connection's buffers hold, on the account of its session.

use std::sync::Arc;

use trellis_engine::account::{Account, HostCharge};
use trellis_wire::Payer;

/// Pays for one buffer.
#[derive(Debug)]
pub(super) struct BufferCharge(HostCharge);

impl BufferCharge {
    /// Nothing, on this account.
    pub(super) fn new(account: &Arc<Account>) -> Box<Self> {
        Box::new(Self(HostCharge::none(account)))
    }
}

impl Payer for BufferCharge {
    fn hold(&mut self, n_bytes: usize) -> Result<(), String> {
        self.0.resize(n_bytes as u64).map_err(|exceeded| exceeded.to_string())
    }
}
