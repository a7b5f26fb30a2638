//! The connections of a scene, as clients come to make them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::JoinHandle;
use trellis::session::{Actor, SessionError, Sessions};

use super::draws::Draws;
use super::network::{End, Link};
use super::notes::Notes;
use super::scene::{CutKind, LinkScene};
use super::service::SimService;

/// The serving of a connection.
pub(super) type Serving = JoinHandle<Result<(), SessionError>>;

/// Where clients connect.
pub(super) struct Lines {
    sessions: Arc<Sessions<SimService>>,
    service: Arc<SimService>,
    notes: Arc<Notes>,
    made: Mutex<Made>,
}

struct Made {
    draws: Draws,
    links: Vec<Link>,
    /// With whether the connection may fall silent, of which nobody tells the daemon.
    serving: Vec<(bool, Serving)>,
    has_crashed: bool,
}

impl Lines {
    pub(super) fn new(sessions: Arc<Sessions<SimService>>, service: Arc<SimService>, draws: Draws) -> Self {
        let made = Made { draws, links: Vec::new(), serving: Vec::new(), has_crashed: false };
        let notes = service.notes.clone();
        Self { sessions, service, notes, made: Mutex::new(made) }
    }

    fn lock(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection of this user. Where the daemon's sessions were dropped nobody is at its other end.
    pub(super) fn connect(&self, actor: Actor, scene: LinkScene) -> (Link, End) {
        let mut made = self.lock();
        let number = made.links.len();
        let draws = made.draws.fork();
        let (link, client, daemon) = Link::new(number, scene, draws, self.notes.clone());
        made.links.push(link.clone());
        if made.has_crashed {
            drop(daemon);
            return (link, client);
        }
        let (sessions, shutdown) = (self.sessions.clone(), self.service.shutdown.clone());
        let serving = tokio::spawn(async move { sessions.serve(daemon, actor, shutdown).await });
        let is_silent = scene.cut.is_some_and(|cut| cut.kind == CutKind::Silence);
        made.serving.push((is_silent, serving));
        (link, client)
    }

    /// Drops all sessions where they wait.
    pub(super) fn crash(&self) {
        let mut made = self.lock();
        made.has_crashed = true;
        made.serving.iter().for_each(|(_, serving)| serving.abort());
    }

    /// The serving of those that end when their clients leave, and of those that may not.
    pub(super) fn take_serving(&self) -> [Vec<Serving>; 2] {
        let mut sorted = [Vec::new(), Vec::new()];
        for (is_silent, serving) in std::mem::take(&mut self.lock().serving) {
            sorted[usize::from(is_silent)].push(serving);
        }
        sorted
    }

    /// All connections that were ever made.
    pub(super) fn links(&self) -> Vec<Link> {
        self.lock().links.clone()
    }
}
