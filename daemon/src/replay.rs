//! A recorded guest runs again: its calls are compared with the recording and answered from it.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use trellis_engine::account::{Account, ActorId, Budget, SessionId};

use crate::config::Config;
use crate::config::Isolation;
use crate::guest::{
    BroughtBy, GuestEnd, GuestError, GuestHost, GuestHostConfig, GuestIo, GuestLimits, GuestOutput, Launch,
    LoadListener, Tape, Verdict, inbox, output_channel,
};
use crate::models::Models;
use crate::recording::{Begin, Broken, Entry, Reader};

/// A guest about to be replayed.
pub(crate) struct Replay {
    host: Arc<GuestHost>,
    reader: Reader,
    begin: Begin,
}

/// Why a guest cannot be replayed at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    #[error(transparent)]
    Broken(#[from] Broken),
    #[error(transparent)]
    Guest(#[from] Arc<GuestError>),
    #[error("the guest was ended before anything was compared: {0:?}")]
    NotCompared(Box<GuestEnd>),
}

impl From<GuestError> for ReplayError {
    fn from(error: GuestError) -> Self {
        Self::Guest(Arc::new(error))
    }
}

impl Replay {
    /// Sets up the wasm runtime with what the recorded guest might use, for one guest.
    ///
    /// # Errors
    /// The recording is broken at its beginning, or the runtime cannot start.
    pub(crate) fn prepare(
        mut reader: Reader,
        config: &Config,
        cache_dir: PathBuf,
    ) -> Result<Self, ReplayError> {
        let Entry::Begin(begin) = reader.entry()? else {
            return Err(Broken::Changed { number: reader.n_entries(), offset: reader.entry_offset() }.into());
        };
        let own = &config.limits;
        let limits = GuestLimits {
            // What a guest can tell, but no more than it would get here: the recording may be forged.
            memory_bytes: begin.limits.memory_bytes.min(own.memory_bytes),
            n_memories: begin.limits.n_memories.min(own.n_memories),
            n_tables: begin.limits.n_tables.min(own.n_tables),
            n_table_elements: begin.limits.n_table_elements.min(own.n_table_elements),
            n_instances: begin.limits.n_instances.min(own.n_instances),
            call_bytes: begin.limits.call_bytes.min(own.call_bytes),
            n_guests: 1,
            n_guests_per_user: 1,
            ..own.clone()
        };
        let compile_exe = config.compile_exe.clone();
        let host = GuestHostConfig {
            limits,
            cache_dir,
            compile_exe,
            isolation: Isolation::Thread,
            models: Models::new(Vec::new(), Vec::new()),
        };
        Ok(Self { host: GuestHost::for_replays(host)?, reader, begin: *begin })
    }

    /// The hash of the component that was recorded.
    pub(crate) fn recorded_hash(&self) -> blake3::Hash {
        blake3::Hash::from_bytes(self.begin.hash)
    }

    /// Runs the guest and hands over what it sends.
    ///
    /// # Errors
    /// The component cannot be run.
    pub(crate) async fn run(
        self,
        wasm: Bytes,
        name: String,
        mut show: impl FnMut(GuestOutput),
    ) -> Result<Verdict, ReplayError> {
        let user = ActorId(rustix::process::geteuid().as_raw());
        let program = self.host.compile(user, BroughtBy::User, wasm, |_| {}).await?;
        let (output, mut sent) = output_channel(usize::MAX);
        // Messages come from the tape, as everything does.
        let (_, input) = inbox(1, 1);
        let tape = Tape::replay(self.reader, output.clone());
        let launch = Launch {
            program,
            name,
            actor: ActorId(0),
            session: SessionId(0),
            account: Account::new("session", Budget::UNLIMITED, None),
            n_guests_of_user: 1,
            arguments: Vec::new(),
            model: None,
            loads: LoadListener::default(),
            seed: 0,
            deadline_ms: None,
            is_recorded: false,
            is_profiled: false,
        };
        let mut running = self.host.start_with(launch, GuestIo { output, input }, Some(tape.clone()))?;
        let end: GuestEnd = loop {
            tokio::select! {
                biased;
                Some(output) = sent.recv() => show(output),
                end = &mut running.end => break end,
            }
        };
        while let Some(output) = sent.try_recv() {
            show(output);
        }
        // However a guest ends, its tape hears of it; a host that failed before that has compared nothing.
        tape.take_verdict().ok_or(ReplayError::NotCompared(Box::new(end)))
    }
}
