//! How a guest is started, and which request runs it: after an upload that is another one than at first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Notify, mpsc, watch};
use trellis_wire::Call;

use crate::connection::{Connection, News, Recipient};
use crate::error::{Error, Lost};
use crate::upload::Component;

/// A guest's start, or a detached guest's reading. Which request runs it and whether it is cancelled are changed by the connection alone, under its
/// lock.
#[derive(Debug)]
pub(crate) struct Launch {
    call: Call,
    component: Mutex<Option<Component>>,
    phase: watch::Sender<Phase>,
    is_cancelled: AtomicBool,
    /// Heard by the upload between two requests.
    cancelled: Notify,
}

#[derive(Clone, Debug)]
enum Phase {
    Waiting {
        id: Option<u64>,
    },
    Started {
        id: u64,
    },
    Ended,
    /// What ended it may be tried again: the daemon was about to end, for one.
    Cut(Error),
    /// It may have ended or not: the connection was lost before the daemon said.
    Lost(Lost),
}

impl Phase {
    fn id(&self) -> Option<u64> {
        match self {
            Self::Waiting { id } => *id,
            Self::Started { id } => Some(*id),
            Self::Ended | Self::Cut(_) | Self::Lost(_) => None,
        }
    }

    fn is_over(&self) -> bool {
        matches!(self, Self::Ended | Self::Cut(_) | Self::Lost(_))
    }
}

impl Launch {
    pub(crate) fn new(call: Call, component: Option<Component>) -> Arc<Self> {
        Arc::new(Self {
            call,
            component: Mutex::new(component),
            phase: watch::Sender::new(Phase::Waiting { id: None }),
            is_cancelled: AtomicBool::new(false),
            cancelled: Notify::new(),
        })
    }

    /// Asks the daemon for the guest.
    ///
    /// # Errors
    /// The connection is lost, the arguments do not fit in a frame, or the client has given the guest up.
    pub(crate) fn start(
        self: &Arc<Self>,
        connection: &Connection,
        news: &mpsc::UnboundedSender<News>,
    ) -> Result<(), Error> {
        let recipient = Recipient::Guest { news: news.clone(), launch: self.clone() };
        connection.request(self.call.clone(), recipient).map(|_| ())
    }

    pub(crate) fn take_component(&self) -> Option<Component> {
        self.component.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// A request for the guest is about to leave. Ids only grow: one that is noted late is not the guest's.
    pub(crate) fn asked(&self, id: u64) {
        self.phase.send_if_modified(|phase| {
            let is_news = !phase.is_over() && phase.id().is_none_or(|known| known < id);
            if is_news {
                *phase = Phase::Waiting { id: Some(id) };
            }
            is_news
        });
    }

    pub(crate) fn started(&self, id: u64) {
        self.phase.send_replace(Phase::Started { id });
    }

    /// The guest is over, with that error or well.
    pub(crate) fn ended(&self, error: Option<&Error>) {
        self.phase.send_replace(match error {
            Some(Error::ConnectionLost(lost)) => Phase::Lost(lost.clone()),
            Some(error) if error.is_retryable() => Phase::Cut(error.clone()),
            _ => Phase::Ended,
        });
    }

    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::SeqCst);
        self.cancelled.notify_one();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }

    pub(crate) async fn cancelled(&self) {
        self.cancelled.notified().await;
    }

    /// The request that runs the guest, or is to run it.
    pub(crate) fn request_id(&self) -> Option<u64> {
        self.phase.borrow().id()
    }

    /// The request that runs the guest, once it runs.
    ///
    /// # Errors
    /// The guest has ended, and with what, if that may be tried again; or the connection was lost before it did.
    pub(crate) async fn running(&self) -> Result<u64, Error> {
        let mut phase = self.phase.subscribe();
        let phase = phase.wait_for(|phase| !matches!(phase, Phase::Waiting { .. })).await;
        match phase.as_deref() {
            Ok(Phase::Started { id }) => Ok(*id),
            Ok(Phase::Lost(lost)) => Err(Error::ConnectionLost(lost.clone())),
            Ok(Phase::Cut(error)) => Err(error.clone()),
            _ => Err(Error::GuestEnded),
        }
    }
}

#[cfg(test)]
mod tests {
    use trellis_wire::{ErrorBody, ErrorCode, Program, Start};

    use super::*;

    fn launch() -> Arc<Launch> {
        let program = Program::Named { name: "guest".to_owned() };
        let start = Start {
            program,
            arguments: Vec::new(),
            model: None,
            seed: None,
            credit_bytes: 0,
            deadline_ms: None,
            label: None,
            is_recorded: false,
            is_profiled: false,
        };
        Launch::new(Call::Start(start), None)
    }

    /// The thread of the first start may be so late that the second one has left before it goes on.
    #[test]
    fn a_request_that_is_noted_late_is_not_the_guests() {
        let launch = launch();
        launch.asked(3);
        launch.asked(1);
        assert_eq!(launch.request_id(), Some(3));
        launch.started(3);
        launch.asked(1);
        assert_eq!(launch.request_id(), Some(3));
        launch.ended(None);
        launch.asked(5);
        assert_eq!(launch.request_id(), None);
    }

    #[tokio::test]
    async fn who_sends_to_a_guest_that_was_cut_hears_that_it_may_try_again() {
        let error = |code| Error::Daemon(Box::new(ErrorBody::new(code, "no")));
        for (code, is_retryable) in [(ErrorCode::ShuttingDown, true), (ErrorCode::GuestFailed, false)] {
            let launch = launch();
            launch.started(1);
            launch.ended(Some(&error(code)));
            let told = launch.running().await.expect_err("it is over");
            assert_eq!(
                (told.is_retryable(), told.code().is_some()),
                (is_retryable, is_retryable),
                "{told:?}"
            );
        }
    }
}
