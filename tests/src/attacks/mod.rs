//! Attacks by name: guests and clients that mean harm, and what must come of each.
//!
//! The [`table`] has them all, a file for each category. An attack is let loose on a [`Site`], a daemon's socket, by [`Attack::run`];
//! what came of it is an [`Ending`], which has to be one of the attack's [`End`]s. [`suite`] lets each loose once and looks at
//! everything afterwards, [`pace`] measures what a neighbour has beside it, [`mixed`] runs all of them at random, [`memory`] those that
//! take memory at once on a daemon that has little. [`sessions`] are no attacks, but many and dropped at every moment; [`killed`] kills
//! the daemon under honest clients; [`alone`] measures what a user has beside whom there is nobody. The command `attacks` has those
//! seven; the tests run each attack once, drop some hundred sessions and kill a few daemons. All of these daemons keep what guests save on disk, each in a folder of its own ([`saved`]).

pub mod alone;
mod boundary;
mod clients;
mod components;
mod decoding;
mod ends;
pub mod group;
mod io;
pub mod killed;
mod life;
mod load;
pub mod memory;
pub mod mixed;
pub mod neighbour;
pub mod neighbours;
pub mod pace;
pub mod processes;
mod processor;
mod questions;
pub mod raw;
pub mod saved;
pub mod sessions;
pub mod state;
pub mod suite;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use trellis_wire::ComponentHash;

pub use ends::{End, Ending};

/// What an attack is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// Components, their upload and their compilation.
    Load,
    /// The processor's time and memory.
    Processor,
    /// Values that cross from a guest or a client to the host.
    Boundary,
    /// The engine.
    Decoding,
    /// What is sent and received.
    Io,
    /// Beginnings and ends of guests and connections.
    Life,
}

impl Category {
    /// What it is called in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load and compile",
            Self::Processor => "processor and memory",
            Self::Boundary => "boundary",
            Self::Decoding => "decoding",
            Self::Io => "input and output",
            Self::Life => "life cycle",
        }
    }
}

/// Where an attack is let loose.
#[derive(Clone, Debug)]
pub struct Site {
    /// The daemon's socket.
    pub socket: Arc<Path>,
    /// The guest whose arguments say what it does.
    pub hostile: Component,
    /// When a client that could go on for ever has to come to its end.
    pub until: Instant,
    /// How long after that guests are cancelled that still run; where it is not given they are left to their limits.
    pub patience: Option<Duration>,
}

impl Site {
    /// Whether the attack may go on.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        Instant::now() < self.until
    }

    /// Keeps what is held until the attack is to end.
    pub async fn hold(&self) {
        tokio::time::sleep_until(self.until.into()).await;
    }
}

/// A component and its hash.
#[derive(Clone)]
pub struct Component {
    /// Its bytes.
    pub wasm: Arc<[u8]>,
    /// Their hash.
    pub hash: ComponentHash,
}

impl Component {
    /// With the hash that the bytes have.
    #[must_use]
    pub fn new(wasm: Vec<u8>) -> Self {
        let hash = ComponentHash(*blake3::hash(&wasm).as_bytes());
        Self { wasm: wasm.into(), hash }
    }
}

impl fmt::Debug for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Component({} bytes, {})", self.wasm.len(), self.hash)
    }
}

/// What a client does; it returns what came of it.
pub type ClientFn = fn(Site) -> Pin<Box<dyn Future<Output = std::io::Result<Ending>> + Send>>;

/// Who attacks.
#[derive(Clone, Copy)]
pub enum Attacker {
    /// The hostile guest with these arguments.
    Guest(&'static [&'static str]),
    /// A component of its own.
    Component(fn() -> Vec<u8>),
    /// A client that speaks the protocol as it likes.
    Client(ClientFn),
}

impl fmt::Debug for Attacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Guest(arguments) => write!(f, "guest {}", arguments.join(" ")),
            Self::Component(_) => f.write_str("component"),
            Self::Client(_) => f.write_str("client"),
        }
    }
}

/// One attack.
#[derive(Clone, Copy, Debug)]
pub struct Attack {
    /// Its name, unique.
    pub name: &'static str,
    /// What it is about.
    pub category: Category,
    /// Who does it.
    pub attacker: Attacker,
    /// What may come of it.
    pub ends: &'static [End],
    /// How many at once a neighbour's pace is measured beside, each of which begins again when it is over.
    pub n_copies: usize,
    /// Whether one is over at once, so that it takes time only where it is made over and over.
    pub is_brief: bool,
    /// Whether it takes all of something that its user has, so that no other attack of that user runs beside it.
    pub is_alone: bool,
    /// Whether it may only be let loose by a user other than the daemon's, who may do what the attack tries.
    pub is_of_a_stranger: bool,
    /// The arguments of the hostile guest that takes away what the attack leaves on purpose.
    pub cleanup: Option<&'static [&'static str]>,
}

/// The copies of an attack in a measurement of the pace, unless the table says otherwise.
pub const N_COPIES: usize = 4;

impl Attack {
    const fn new(category: Category, name: &'static str, attacker: Attacker, ends: &'static [End]) -> Self {
        Self {
            name,
            category,
            attacker,
            ends,
            n_copies: N_COPIES,
            is_brief: false,
            is_alone: false,
            is_of_a_stranger: false,
            cleanup: None,
        }
    }

    const fn copies(self, n: usize) -> Self {
        Self { n_copies: n, is_brief: false, ..self }
    }

    const fn brief(self) -> Self {
        Self { is_brief: true, ..self }
    }

    const fn alone(self) -> Self {
        Self { is_alone: true, ..self }
    }

    const fn of_a_stranger(self) -> Self {
        Self { is_of_a_stranger: true, ..self }
    }

    const fn cleaned_by(self, arguments: &'static [&'static str]) -> Self {
        Self { cleanup: Some(arguments), ..self }
    }

    /// Whether this is an end that the attack may have.
    #[must_use]
    pub fn allows(&self, ending: &Ending) -> bool {
        self.ends.iter().any(|end| end.fits(ending))
    }

    /// How many are let loose at once by a user who makes several attacks: one, where it is over at once.
    #[must_use]
    pub fn n_at_once(&self) -> usize {
        if self.is_brief { 1 } else { self.n_copies.min(2 * N_COPIES) }
    }

    /// Whether it comes to an end also where a guest has all the time that there is.
    #[must_use]
    pub fn ends_by_itself(&self) -> bool {
        !self.ends.iter().any(|end| end.is_of_time())
    }

    /// What is wrong with how copies of it have ended that were let loose again and again for a while: an end that is none of its
    /// own, of those that copies bring, or of those that come when the time is over; or, where it ends by itself, that none has
    /// ended as it has to.
    #[must_use]
    pub fn wrong_ends(&self, tally: &processes::Tally) -> Vec<String> {
        let endings = || tally.by_end.values().map(|(ending, _)| ending);
        let may_be = |ending: &Ending| ending.is_cut() || ends::OF_COPIES.iter().any(|end| end.fits(ending));
        let mut wrong: Vec<String> = endings()
            .filter(|ending| !self.allows(ending) && !may_be(ending))
            .map(|ending| format!("it ended with {}: {}", ending.short(), ending.message))
            .collect();
        if self.ends_by_itself() && !endings().any(|ending| self.allows(ending)) {
            wrong.push("none came to its end".to_owned());
        }
        wrong
    }

    /// Makes what takes time to make before it is let loose.
    pub fn prepare(&self) {
        if let Attacker::Component(make) = self.attacker {
            made_once(self.name, make);
        }
    }

    /// Lets it loose once.
    ///
    /// # Errors
    /// The connection failed in a way that the attack does not expect.
    pub async fn run(&self, site: &Site) -> std::io::Result<Ending> {
        match self.attacker {
            Attacker::Guest(arguments) => run_guest(site, &site.hostile, arguments).await,
            Attacker::Component(make) => {
                let name = self.name;
                let made = tokio::task::spawn_blocking(move || made_once(name, make));
                run_guest(site, &made.await.map_err(std::io::Error::other)?, &[]).await
            }
            Attacker::Client(client) => client(site.clone()).await,
        }
    }

    /// Takes away what it leaves on purpose, where it does.
    ///
    /// # Errors
    /// The connection failed, or something cannot be taken away.
    pub async fn clean_up(&self, site: &Site) -> std::io::Result<()> {
        let Some(arguments) = self.cleanup else { return Ok(()) };
        let site = Site { patience: None, ..site.clone() };
        // A guest has little time here, and there may be much to take away.
        for _ in 0..N_CLEANINGS_MAX {
            let ending = run_guest(&site, &site.hostile, arguments).await?;
            if ending.is_well() {
                return Ok(());
            }
            if !ends::BUSY.iter().any(|end| end.fits(&ending)) {
                return Err(std::io::Error::other(ending.message));
            }
        }
        Err(std::io::Error::other(format!("not done after {N_CLEANINGS_MAX} guests")))
    }
}

/// The component of this attack: made once, as some take longer to make than the daemon takes to refuse them.
fn made_once(name: &'static str, make: fn() -> Vec<u8>) -> Component {
    static MADE: Mutex<BTreeMap<&str, Component>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(name).or_insert_with(|| Component::new(make())).clone()
}

/// Guests in a row that may take away what an attack has left.
const N_CLEANINGS_MAX: usize = 30;

/// Runs a guest to its end and takes what it sends; cancels it where the attack is over before.
async fn run_guest(site: &Site, component: &Component, arguments: &[&str]) -> std::io::Result<Ending> {
    let mut raw = raw::Raw::connect(&site.socket).await?;
    let uploaded = raw.upload(component).await?;
    if !uploaded.is_well() {
        return Ok(uploaded);
    }
    let id = raw.start(component, arguments).await?;
    let Some(patience) = site.patience else { return raw.follow(id).await };
    if let Ok(ending) = tokio::time::timeout_at((site.until + patience).into(), raw.follow(id)).await {
        return ending;
    }
    raw.send(&trellis_wire::ClientMessage::Cancel { id }).await?;
    Ok(raw.follow(id).await?.of_cancelled())
}

/// All attacks, category after category.
#[must_use]
pub fn table() -> Vec<Attack> {
    [load::ATTACKS, processor::ATTACKS, boundary::ATTACKS, decoding::ATTACKS, io::ATTACKS, life::ATTACKS]
        .concat()
}
