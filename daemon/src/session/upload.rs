//! The life of one upload: its wait, its bytes, its end.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::unconstrained;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::{Account, HostCharge};
use trellis_wire::{
    CHUNK_BYTES_MAX, ComponentHash, ErrorBody, ErrorCode, Event, Outbox, ServerMessage, Value,
};

use super::actor::Actor;
use super::call::{Ending, panicked, stopped};
use super::control::Control;
use super::service::Service;
use super::uploads::{Uploads, WaitOutcome};
use crate::service::over_host_bytes;

/// What an upload needs of its connection.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) id: u64,
    pub(crate) actor: Actor,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) control: Arc<Control>,
    pub(crate) uploads: Arc<Uploads>,
    /// For what is on its way in.
    pub(crate) account: Arc<Account>,
    /// How long the client may send nothing.
    pub(crate) idle_timeout: Duration,
}

/// A component on its way in.
#[derive(Debug)]
pub(crate) struct Upload {
    hash: ComponentHash,
    n_bytes: u64,
    bytes: Vec<u8>,
    hasher: Box<blake3::Hasher>,
}

impl Upload {
    pub(crate) fn begin(
        hash: ComponentHash,
        n_bytes: u64,
        component_bytes_max: u64,
    ) -> Result<Self, ErrorBody> {
        if n_bytes > component_bytes_max {
            return Err(ErrorBody::over_limit("component bytes", n_bytes, component_bytes_max));
        }
        if n_bytes == 0 {
            let error = ErrorBody::new(ErrorCode::InvalidComponent, "a component has at least one byte");
            return Err(error.about("component bytes").with_value(0));
        }
        // The memory grows with the bytes that come, not with the bytes that are promised.
        Ok(Self { hash, n_bytes, bytes: Vec::new(), hasher: Box::default() })
    }

    /// Adds a chunk; returns whether the component is whole, with the hash that was announced. `charge` is for its bytes.
    fn add(&mut self, chunk: &[u8], charge: &mut HostCharge) -> Result<bool, ErrorBody> {
        if chunk.len() > CHUNK_BYTES_MAX {
            return Err(ErrorBody::over_limit("chunk bytes", chunk.len() as u64, CHUNK_BYTES_MAX as u64));
        }
        let n_bytes = (self.bytes.len() + chunk.len()) as u64;
        if n_bytes > self.n_bytes {
            return Err(ErrorBody::over_limit("uploaded bytes", n_bytes, self.n_bytes));
        }
        // A list that grows may come to twice what is in it.
        charge.resize(2 * n_bytes).map_err(|exceeded| over_host_bytes(&exceeded))?;
        self.hasher.update(chunk);
        self.bytes.extend_from_slice(chunk);
        if n_bytes < self.n_bytes {
            return Ok(false);
        }
        let found = ComponentHash(*self.hasher.finalize().as_bytes());
        if found != self.hash {
            let message = format!("the component was announced as {} and is {found}", self.hash);
            return Err(ErrorBody::new(ErrorCode::HashMismatch, message).about("hash").with_value(found));
        }
        Ok(true)
    }
}

/// Receives a component and hands it to the service, unless another upload brings it meanwhile. `chunks` never waits:
/// what comes is taken before the connection reads on.
pub(crate) async fn run<S: Service>(
    desk: Desk,
    service: Arc<S>,
    upload: Upload,
    chunks: mpsc::UnboundedReceiver<Vec<u8>>,
) -> Ending {
    tokio::select! {
        biased;
        reason = desk.control.stopped() => Err(stopped(reason)).into(),
        result = unconstrained(desk.receive(service, upload, chunks)) => result.map(|()| Value::Done).into(),
    }
}

impl Desk {
    async fn receive<S: Service>(
        &self,
        service: Arc<S>,
        mut upload: Upload,
        mut chunks: mpsc::UnboundedReceiver<Vec<u8>>,
    ) -> Result<(), ErrorBody> {
        let (actor, hash) = (self.actor, upload.hash);
        // It may take long to find out; what comes meanwhile is nobody's to keep.
        tokio::select! {
            biased;
            may = service.may_upload(actor) => may?,
            Some(_) = chunks.recv() => return Err(unwanted()),
        }
        let waiting = self.uploads.enter(actor, hash)?;
        let permit = tokio::select! {
            biased;
            outcome = waiting => match outcome {
                Ok(WaitOutcome::Send(permit)) => permit,
                Ok(WaitOutcome::Stored) => return Ok(()),
                Err(_) => unreachable!("the queue keeps who waits until it has answered"),
            },
            Some(_) = chunks.recv() => return Err(unwanted()),
        };
        if service.has_component(actor, &hash) {
            permit.stored();
            return Ok(());
        }
        let mut charge = HostCharge::none(&self.account);
        let wanted = self.outbox.push(&ServerMessage::Event { id: self.id, event: Event::Wanted });
        debug_assert!(wanted.is_ok(), "an event without fields fits in every frame");
        loop {
            let Ok(chunk) = tokio::time::timeout(self.idle_timeout, chunks.recv()).await else {
                return Err(self.idle());
            };
            // The sender lives as long as the request does.
            let chunk = chunk.unwrap_or_default();
            if upload.add(&chunk, &mut charge)? {
                break;
            }
        }
        // A task of its own, so that the service can neither hold up the connection nor take it down. The permit is
        // held until the component is stored, because its bytes are.
        let store = tokio::spawn(async move {
            // What it is kept by is its length: the list may have room for twice as much.
            let bytes = Bytes::from(upload.bytes.into_boxed_slice());
            service.store_component(actor, hash, bytes).await?;
            drop(charge);
            permit.stored();
            Ok(())
        });
        AbortOnDropHandle::new(store).await.unwrap_or_else(|_| Err(panicked()))
    }

    fn idle(&self) -> ErrorBody {
        let limit_ms = u64::try_from(self.idle_timeout.as_millis()).unwrap_or(u64::MAX);
        let message = format!("no bytes of the upload have come for {limit_ms} ms");
        ErrorBody::new(ErrorCode::LimitExceeded, message).about("upload idle ms").with_limit(limit_ms)
    }
}

/// The error of bytes that come too early.
fn unwanted() -> ErrorBody {
    let message = "the bytes of an upload come after the daemon has said that it wants them";
    ErrorBody::new(ErrorCode::InvalidArgument, message).about("chunk")
}
