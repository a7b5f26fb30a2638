//! The sockets at which connections are tried, for who waits for one and is given only a future that makes it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

tokio::task_local! {
    static NOTED: Sockets;
}

/// Those that were tried, in that order, each once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sockets(Arc<Mutex<Vec<PathBuf>>>);

impl Sockets {
    /// Does something, and takes in the sockets at which that tries to connect, as far as it does so itself: what it has other tasks do
    /// is not seen.
    pub(crate) async fn noting<F: Future>(&self, what: F) -> F::Output {
        NOTED.scope(self.clone(), what).await
    }

    /// Those so far.
    pub(crate) fn get(&self) -> Vec<PathBuf> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// This one alone, if any.
    pub(crate) fn set(&self, socket: Option<&Path>) {
        let sockets = socket.map(Path::to_owned).into_iter().collect();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = sockets;
    }

    fn add(&self, socket: &Path) {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !sockets.iter().any(|known| known == socket) {
            sockets.push(socket.to_owned());
        }
    }
}

/// A connection to this socket is tried.
pub(crate) fn note(socket: &Path) {
    // Where nobody waits in that way, nobody asks.
    let _ = NOTED.try_with(|sockets| sockets.add(socket));
}
