//! Requests with one answer.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use trellis_wire::{
    Call, ComponentHash, DaemonInfo, FitInfo, GuestInfo, LimitInfo, LogLines, LogsAsked, ModelInfo,
    ReloadInfo, Room, UpgradeInfo, VERSION_OF_MODELS, Value,
};

use crate::client::Client;
use crate::connection::{Connection, Recipient};
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

    /// Loads a model while others go on: a bundled name, a folder on the daemon's machine, or `shape:NAME`; on a device
    /// of its own (`cpu`, `cuda:1`) if one is named. `progress` hears bytes loaded and bytes in all. For who has the permission
    /// `load`. Dropping the future takes the load back. Returns the name that guests ask for.
    ///
    /// # Errors
    /// The model cannot be loaded or does not fit, this user may not, or the connection is lost.
    pub async fn load_model(
        &self,
        model: &str,
        device: Option<&str>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<String, Error> {
        self.check_version("say what it loaded", VERSION_OF_MODELS)?;
        let connection = self.connection();
        connection.outbox.room(Room::Bulk).await;
        let call = Call::Load { model: model.to_owned(), device: device.map(str::to_owned) };
        let (mut reply, mut states) = Reply::to_long(connection, call)?;
        let mut ending = pin!(reply.await_end());
        loop {
            tokio::select! {
                biased;
                // First: the last state is told also where the end came with it.
                Ok(()) = states.changed() => {
                    let (done, total) = *states.borrow_and_update();
                    progress(done, total);
                }
                ended = &mut ending => return match ended? {
                    Value::Loaded { model } => Ok(model),
                    _ => Err(Error::UnknownAnswer),
                },
            }
        }
    }

    /// Says whether there is room for a model, as for [`Client::load_model`], and loads nothing.
    ///
    /// # Errors
    /// The model cannot be used, this user may not ask, the daemon is of an older version
    /// ([`trellis_wire::ErrorCode::Unsupported`]), or the connection is lost.
    pub async fn fit_model(&self, model: &str, device: Option<&str>) -> Result<FitInfo, Error> {
        let call = Call::Fit { model: model.to_owned(), device: device.map(str::to_owned) };
        match ask(self.connection(), call).await? {
            Value::Fit { fit } => Ok(*fit),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// Unloads a model. New contexts are refused at once; guests that have some open after `drain` (a time of the
    /// daemon's own when `None`) end with [`trellis_wire::ErrorCode::ModelUnloaded`]. Returns once its memory is free.
    /// A model that is on its way out already goes by the sooner of both times. For who has the permission `load`.
    /// Dropping the future does not take it back. Returns the name of the model that is the default now, if there is
    /// one.
    ///
    /// # Errors
    /// No such model is loaded, this user may not, or the connection is lost.
    pub async fn unload_model(&self, model: &str, drain: Option<Duration>) -> Result<Option<String>, Error> {
        self.check_version("say what it unloaded", VERSION_OF_MODELS)?;
        let drain_ms = drain.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        match ask(self.connection(), Call::Unload { model: model.to_owned(), drain_ms }).await? {
            Value::Unloaded { default_model } => Ok(default_model),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// The running guests of this user, and those of others that it may see.
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
            Value::Info { info } => Ok(*info),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// Every limit of the daemon, where its number comes from, and how much this user has in use of it.
    ///
    /// # Errors
    /// The daemon is of an older version ([`trellis_wire::ErrorCode::Unsupported`]), or the connection is lost.
    pub async fn limits(&self) -> Result<Vec<LimitInfo>, Error> {
        match ask(self.connection(), Call::Limits).await? {
            Value::Limits { limits } => Ok(limits),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// The daemon's metrics, of all users together, in the text format 0.0.4 of Prometheus. What limits are
    /// used by others is among them for who may see others.
    ///
    /// # Errors
    /// The daemon is of an older version ([`trellis_wire::ErrorCode::Unsupported`]), or the connection is lost.
    pub async fn metrics(&self) -> Result<String, Error> {
        match ask(self.connection(), Call::Metrics).await? {
            Value::Metrics { text } => Ok(text),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// The newest lines of the daemon's log: so many, or all that it keeps. As many come as fit in an answer; the rest begins at
    /// [`LogLines::next`]. For the user that the daemon runs as, and root.
    ///
    /// # Errors
    /// This user may not, the daemon keeps no log or is of an older version ([`trellis_wire::ErrorCode::Unsupported`]), or the
    /// connection is lost.
    pub async fn logs(&self, n_newest: Option<u64>) -> Result<LogLines, Error> {
        self.ask_for_logs(LogsAsked { n_newest, ..LogsAsked::default() }).await
    }

    /// The lines of the daemon's log from the one of this number on; with `waits`, once there is one.
    ///
    /// # Errors
    /// As [`Self::logs`].
    pub async fn logs_from(&self, number: u64, waits: bool) -> Result<LogLines, Error> {
        self.ask_for_logs(LogsAsked { number: Some(number), n_newest: None, waits }).await
    }

    async fn ask_for_logs(&self, asked: LogsAsked) -> Result<LogLines, Error> {
        match ask(self.connection(), Call::Logs(asked)).await? {
            Value::Logs { logs } => Ok(logs),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// Stops a guest of this user, whichever connection started it, or of another whose guests it may stop.
    ///
    /// # Errors
    /// There is no such guest, the daemon refused, or the connection is lost.
    pub async fn stop(&self, guest_id: u64) -> Result<(), Error> {
        done(ask(self.connection(), Call::Stop { guest_id }).await?)
    }

    /// Has the daemon read its configuration again. For the operator.
    ///
    /// # Errors
    /// The configuration is wrong ([`trellis_wire::ErrorCode::InvalidConfiguration`]) and nothing has changed, this user may not, the
    /// daemon is of an older version ([`trellis_wire::ErrorCode::Unsupported`]), or the connection is lost.
    pub async fn reload(&self) -> Result<ReloadInfo, Error> {
        match ask(self.connection(), Call::Reload).await? {
            Value::Reloaded { info } => Ok(*info),
            _ => Err(Error::UnknownAnswer),
        }
    }

    /// Has the daemon put another program in its place: that of this absolute path, or else what lies where the daemon was started
    /// from. It takes on nothing more from then on; a connection that is made after this is of the next daemon, and waits for it. For
    /// the operator.
    ///
    /// # Errors
    /// The program would not start ([`trellis_wire::ErrorCode::InvalidArgument`], or
    /// [`trellis_wire::ErrorCode::InvalidConfiguration`] where it is the settings that it refuses) and nothing has changed, this
    /// user may not, whoever keeps the daemon's socket upgrades it or it is of an older version
    /// ([`trellis_wire::ErrorCode::Unsupported`]), it is about to go down, or the connection is lost.
    pub async fn upgrade(&self, program: Option<&str>) -> Result<UpgradeInfo, Error> {
        let program = program.map(str::to_owned);
        match ask(self.connection(), Call::Upgrade { program }).await? {
            Value::Upgrading { info } => Ok(*info),
            _ => Err(Error::UnknownAnswer),
        }
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
        let id = connection.request(call, Recipient::Call(reply))?;
        Ok(Self { connection: connection.clone(), id, receiver })
    }

    /// A request that takes long; also returns how far it is.
    fn to_long(
        connection: &Arc<Connection>,
        call: Call,
    ) -> Result<(Self, watch::Receiver<(u64, u64)>), Error> {
        let (reply, receiver) = oneshot::channel();
        let (progress, states) = watch::channel((0, 0));
        let id = connection.request(call, Recipient::Long { reply, progress })?;
        Ok((Self { connection: connection.clone(), id, receiver }, states))
    }

    /// Announces an upload; also returns what is told when the daemon wants the bytes.
    pub(crate) fn to_upload(
        connection: &Arc<Connection>,
        hash: ComponentHash,
        n_bytes: u64,
    ) -> Result<(Self, Arc<Notify>), Error> {
        let (reply, receiver) = oneshot::channel();
        let wanted = Arc::new(Notify::new());
        let recipient = Recipient::Upload { reply, wanted: wanted.clone() };
        let id = connection.request(Call::Upload { hash, n_bytes }, recipient)?;
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
