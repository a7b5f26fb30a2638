//! What an instance of the policy can reach.
#![expect(unreachable_pub, reason = "the generated bindings re-export the tokenizer")]

use std::sync::Arc;

use trellis_engine::model::{SpecialTokens, Tokenizer};
use wasmtime::component::{Resource, ResourceTable};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

use super::bindings::trellis::host::policies;
use crate::guest::io::{LogLevel, OutputReceiver};
use crate::guest::log::{LogSink, PANICKED};
use crate::guest::memory::{MemoryGauge, MemoryLimiter};

/// A model's tokenizer, in the policy's hands during one call.
pub struct PolicyTokenizer(pub(super) Arc<Tokenizer>);

/// The state of one instance.
pub(super) struct PolicyState {
    pub(super) table: ResourceTable,
    pub(super) wasi: WasiCtx,
    pub(super) memory: MemoryLimiter,
    pub(super) gauge: Arc<MemoryGauge>,
    pub(super) log: Arc<LogSink>,
    /// Lines on their way to the daemon's log.
    pub(super) lines: OutputReceiver,
    /// Ticks of the call under way in which the instance computed.
    pub(super) n_ticks: u64,
    /// The most of them.
    pub(super) n_ticks_max: u64,
}

impl WasiView for PolicyState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

impl policies::Host for PolicyState {
    fn log(&mut self, line: String) -> wasmtime::Result<()> {
        // What `trellis_guest::policy!` leaves of a panic is the reason of the trap that follows.
        let level = if line.starts_with(PANICKED) { LogLevel::Error } else { LogLevel::Info };
        self.log.write(level, &line);
        Ok(())
    }
}

impl policies::HostTokenizer for PolicyState {
    fn encode(&mut self, tokenizer: Resource<PolicyTokenizer>, text: String) -> wasmtime::Result<Vec<u32>> {
        Ok(self.table.get(&tokenizer)?.0.encode(&text, SpecialTokens::AsText)?)
    }

    fn vocabulary(&mut self, tokenizer: Resource<PolicyTokenizer>) -> wasmtime::Result<Vec<Vec<u8>>> {
        let tokenizer = &self.table.get(&tokenizer)?.0;
        let bytes = |token| match tokenizer.token_bytes(token) {
            Some(bytes) if !tokenizer.is_special(token) => bytes.to_vec(),
            _ => Vec::new(),
        };
        Ok((0..tokenizer.vocab_size() as u32).map(bytes).collect())
    }

    fn drop(&mut self, tokenizer: Resource<PolicyTokenizer>) -> wasmtime::Result<()> {
        self.table.delete(tokenizer)?;
        Ok(())
    }
}
