//! Requests with one answer.

use std::sync::Arc;

use tokio::sync::{Notify, oneshot};
use trellis_wire::{Call, ComponentHash, DaemonInfo, GuestInfo, ModelInfo, Room, Value};

use crate::client::Client;
use crate::connection::{Connection, Slot};
use crate::error::{Error, Lost};

impl Client {
    /// The loaded models.
    ///
    /// # Errors
    /// The daemon refused, or the connection is lost.
    pub async fn models(&self) -> Result<Vec<ModelInfo>, Error> {
        match ask(self.connection(), Call::Models).await? {
            Value::Models { models } => Ok(models),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// The running guests of this user.
    ///
    /// # Errors
    /// The daemon refused, or the connection is lost.
    pub async fn ps(&self) -> Result<Vec<GuestInfo>, Error> {
        match ask(self.connection(), Call::Guests).await? {
            Value::Guests { guests } => Ok(guests),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// The daemon as a whole.
    ///
    /// # Errors
    /// The daemon refused, or the connection is lost.
    pub async fn info(&self) -> Result<DaemonInfo, Error> {
        match ask(self.connection(), Call::Info).await? {
            Value::Info { info } => Ok(info),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// Stops a guest, whoever of this user started it.
    ///
    /// # Errors
    /// There is no such guest, the daemon refused, or the connection is lost.
    pub async fn stop(&self, guest_id: u64) -> Result<(), Error> {
        done(ask(self.connection(), Call::Stop { guest_id }).await?)
    }

    /// Stops the daemon.
    ///
    /// # Errors
    /// The daemon refused, or the connection was lost before.
    pub async fn shutdown(&self) -> Result<(), Error> {
        done(ask(self.connection(), Call::Shutdown).await?)
    }
}

pub(crate) async fn ask(connection: &Arc<Connection>, call: Call) -> Result<Value, Error> {
    connection.outbox.room(Room::Bulk).await;
    Reply::to(connection, call)?.await_end().await
}

pub(crate) fn done(value: Value) -> Result<(), Error> {
    match value {
        Value::Done => Ok(()),
        _ => Err(Error::UnknownAnswer),
    }
}

/// A request under way; dropping it cancels.
pub(crate) struct Reply {
    connection: Arc<Connection>,
    pub(crate) id: u64,
    receiver: oneshot::Receiver<Result<Value, Error>>,
}

impl Reply {
    pub(crate) fn to(connection: &Arc<Connection>, call: Call) -> Result<Self, Error> {
        let (reply, receiver) = oneshot::channel();
        let id = connection.request(call, Slot::Call(reply))?;
        Ok(Self { connection: connection.clone(), id, receiver })
    }

    /// Announces an upload; also returns what is told when the daemon wants the bytes.
    pub(crate) fn to_upload(
        connection: &Arc<Connection>,
        hash: ComponentHash,
        n_bytes: u64,
    ) -> Result<(Self, Arc<Notify>), Error> {
        let (reply, receiver) = oneshot::channel();
        let wanted = Arc::new(Notify::new());
        let slot = Slot::Upload { reply, wanted: wanted.clone() };
        let id = connection.request(Call::Upload { hash, n_bytes }, slot)?;
        Ok((Self { connection: connection.clone(), id, receiver }, wanted))
    }

    pub(crate) async fn await_end(&mut self) -> Result<Value, Error> {
        // The sender lives in the connection until the end, and answers when the connection is lost.
        (&mut self.receiver).await.unwrap_or(Err(Error::ConnectionLost(Lost::Closed)))
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.connection.cancel(self.id);
    }
}
