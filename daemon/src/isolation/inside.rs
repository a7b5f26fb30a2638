//! The life of a process of guests: takes what the daemon says, and runs the guests.
//!
//! What guests wait for comes through whoever `listens`, which waits for nothing but the daemon.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::{Account, Counted, GuestId, StepNote};
use trellis_engine::remote::{Asked, FarEngine, FarModel, Numbers, Spokesman};

use super::attend::{Order, Started, attend_all};
use super::budgets::{Bank as _, FarAccounts, OF_A_GUEST};
use super::channel::{ChannelError, Place, Receiver, Sender, Sleeper};
use super::coming::{Arrived, Coming};
use super::far_opener::FarOpener;
use super::listening::Listening;
use super::message::{
    Begin, EngineNumber, FromGuests, ModelNumber, NotUnderstood, Start, Step, ToGuests, decode,
};
use super::teller::{Teller, Up};
use crate::guest::{GuestLimits, GuestPool, Program};
use crate::models::{DevicePast, DeviceWatch, Models};

/// Why the process cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InsideError {
    /// The daemon said what has no meaning.
    #[error(transparent)]
    NotUnderstood(#[from] NotUnderstood),
    /// The channel is broken.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The daemon said something else than how to begin.
    #[error("the daemon did not say how to begin")]
    NotBegun,
    /// There is no runtime for guests.
    #[error(transparent)]
    Guests(#[from] crate::guest::GuestError),
    /// The system has no thread or no runtime for more.
    #[error("no thread: {0}")]
    Threads(#[from] std::io::Error),
    /// A thread that serves all guests has panicked.
    #[error("a thread that serves guests panicked")]
    Panicked,
    /// A model cannot be understood.
    #[error(transparent)]
    Model(#[from] trellis_engine::model::ModelError),
}

/// As [`serve`]; what goes wrong is said to the daemon's log.
pub(crate) fn live(sender: Sender, receiver: Receiver) {
    if let Err(error) = serve(sender, receiver) {
        fail(&error);
    }
    // Guests that still run end with the process.
    std::process::exit(0);
}

/// Ends the process; the daemon's log has why.
pub(super) fn fail(error: &InsideError) -> ! {
    eprintln!("{error}");
    std::process::exit(1)
}

/// Runs guests until the daemon is gone.
///
/// # Errors
/// The system or the daemon does not let it begin, or the daemon says what has no meaning.
fn serve(sender: Sender, mut receiver: Receiver) -> Result<(), InsideError> {
    let mut frame = Vec::new();
    if receiver.recv(&mut frame).is_err() {
        return Ok(());
    }
    let ToGuests::Begin(begin) = decode(&frame)? else { return Err(InsideError::NotBegun) };
    let inside = Inside::begin(*begin, Up::new(sender), receiver.sleeper(Place::First))?;
    let pool = inside.pool.clone();
    let listening = Listening::new(receiver, inside);
    pool.listen_when_idle(listening.clone());
    listening.listen()
}

/// What a process of guests has.
pub(super) struct Inside {
    numbers: Numbers,
    limits: Arc<GuestLimits>,
    up: Arc<Up>,
    teller: Arc<Teller>,
    accounts: FarAccounts,
    pool: Arc<GuestPool>,
    models: Models,
    opener: Arc<FarOpener>,
    engines: BTreeMap<EngineNumber, (Arc<FarEngine>, DeviceWatch)>,
    coming: Coming,
    far_models: HashMap<ModelNumber, (FarModel, AbortOnDropHandle<()>)>,
    programs: HashMap<[u8; 32], Program>,
    accounts_of: HashMap<GuestId, (Weak<Account>, Instant)>,
    orders: mpsc::UnboundedSender<Order>,
    runtime: tokio::runtime::Handle,
}

impl Inside {
    /// `first` is where the thread sleeps that takes models.
    fn begin(begin: Begin, up: Arc<Up>, first: Sleeper) -> Result<Self, InsideError> {
        let Begin { actor, numbers, limits, budgets, declared } = begin;
        let limits = Arc::new(limits);
        let models = Models::with_declared(Vec::new(), Vec::new(), declared);
        let opener = FarOpener::new(up.clone());
        models.open_by(opener.clone());
        let pool = GuestPool::new(limits.clone(), models.clone(), false, None)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let handle = runtime.handle().clone();
        let (orders, given) = mpsc::unbounded_channel();
        let teller = Teller::new(up.clone());
        let speaking = (up.clone(), teller.clone());
        let attended = attend_all(pool.clone(), (actor, limits.clone()), speaking, given);
        // Without it guests would neither start nor stop: the process is to end then, and the daemon to know.
        let attend = move || {
            if catch_unwind(AssertUnwindSafe(|| runtime.block_on(attended))).is_err() {
                fail(&InsideError::Panicked);
            }
        };
        thread::Builder::new().name("guests-attend".to_owned()).spawn(attend)?;
        let accounts = FarAccounts::new(budgets, teller.clone());
        Ok(Self {
            numbers,
            limits,
            up,
            teller,
            accounts,
            pool,
            models,
            opener,
            engines: BTreeMap::new(),
            coming: Coming::new(first),
            far_models: HashMap::new(),
            programs: HashMap::new(),
            accounts_of: HashMap::new(),
            orders,
            runtime: handle,
        })
    }

    /// Does what the daemon says.
    pub(super) fn take(&mut self, message: ToGuests) -> Result<(), InsideError> {
        match self.coming.pass(message) {
            Some(message) => self.carry_out(message),
            None => Ok(()),
        }
    }

    /// Takes models that have been read meanwhile, and what waits for them.
    pub(super) fn take_models(&mut self) -> Result<(), InsideError> {
        while let Some((arrived, held)) = self.coming.arrived() {
            let Arrived { model, engine, facts, loaded } = arrived;
            let far = self.engine(engine)?.add(*facts, Arc::new(loaded?));
            let told = self.runtime.spawn(tell_held(self.up.clone(), model, far.handle().clone()));
            self.far_models.insert(model, (far, AbortOnDropHandle::new(told)));
            for message in held {
                self.take(message)?;
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, message: ToGuests) -> Result<(), InsideError> {
        match message {
            ToGuests::Begin(_) => return Err(InsideError::NotBegun),
            ToGuests::Answer { engine, answered } => {
                // Of one that is gone all have heard that it is.
                if let Some((engine, _)) = self.engines.get(&engine) {
                    engine.deliver([answered]);
                }
            }
            ToGuests::Counted { guest, counted } => self.note_counted(guest, &counted),
            ToGuests::Lent { ticket, lent } => self.teller.note_lent(ticket, lent),
            ToGuests::Steps { guest, steps } => self.note_steps(guest, &steps),
            ToGuests::Engine { engine, device } => self.add_engine(engine, device),
            ToGuests::EngineEnded { engine, failure } => {
                if let Some((engine, _)) = self.engines.get(&engine) {
                    engine.end(failure);
                }
            }
            ToGuests::Model { model, engine, facts, card } => {
                self.coming.read(model, engine, facts, *card)?;
            }
            ToGuests::ModelFailed { model, failure } => {
                if let Some((far, _)) = self.far_models.get(&model) {
                    far.fail(failure);
                }
            }
            ToGuests::ModelUnloaded { model } => {
                if let Some((far, _)) = self.far_models.get(&model) {
                    far.handle().end();
                }
            }
            ToGuests::Listing { loaded, leaving, engines } => self.list(&loaded, &leaving, &engines),
            ToGuests::Opened { guest, opened } => {
                let opened = opened.map(|model| {
                    let far = self.far_models.get(&model);
                    far.map(|(far, _)| (model, far.handle().clone()))
                });
                self.opener.note_opened(guest, opened);
            }
            ToGuests::Forgotten { guest, was_there } => self.opener.note_forgotten(guest, was_there),
            ToGuests::Program { hash, code } => {
                let known = blake3::Hash::from_bytes(hash);
                let program = Program::load(self.pool.runtime(), &self.limits, known, &code)?;
                self.programs.insert(hash, program);
            }
            ToGuests::ForgetProgram { hash } => {
                self.programs.remove(&hash);
            }
            ToGuests::Start(start) => self.start(*start)?,
            ToGuests::Drain { left_ms } => {
                self.pool.drain(Instant::now() + Duration::from_millis(left_ms));
            }
            ToGuests::Credit { guest, n_bytes } => self.order(Order::Credit { guest, n_bytes }),
            ToGuests::ClientGone { guest } => self.order(Order::ClientGone { guest }),
            ToGuests::Message { guest, text } => self.order(Order::Message { guest, text }),
            ToGuests::InputClosed { guest } => self.order(Order::InputClosed { guest }),
            ToGuests::Stop { guest } => self.order(Order::Stop { guest }),
        }
        Ok(())
    }

    fn order(&self, order: Order) {
        // The thread that attends lives as long as the process.
        let _ = self.orders.send(order);
    }

    fn engine(&self, engine: EngineNumber) -> Result<&Arc<FarEngine>, NotUnderstood> {
        let not_there = NotUnderstood::NotThere { what: "engine", number: engine.0.into() };
        self.engines.get(&engine).map(|(engine, _)| engine).ok_or(not_there)
    }

    fn add_engine(&mut self, engine: EngineNumber, device: String) {
        let far = FarEngine::new(self.numbers, Arc::new(Asker { engine, up: self.up.clone() }));
        let watch = DeviceWatch { device, engine: far.watch(), past: DevicePast::begin(None) };
        self.engines.insert(engine, (Arc::new(far), watch));
    }

    fn list(&mut self, loaded: &[ModelNumber], leaving: &[ModelNumber], engines: &[EngineNumber]) {
        self.far_models.retain(|model, (far, _)| {
            let is_there = loaded.contains(model) || leaving.contains(model);
            if !is_there {
                far.handle().end();
            }
            is_there
        });
        let handles = |numbers: &[ModelNumber]| {
            let far = numbers.iter().filter_map(|number| self.far_models.get(number));
            far.map(|(far, _)| far.handle().clone()).collect::<Vec<_>>()
        };
        let (loaded, leaving) = (handles(loaded), handles(leaving));
        for handle in &leaving {
            handle.close();
        }
        self.engines.retain(|number, (engine, _)| {
            let is_there = engines.contains(number);
            if !is_there && engine.watch().failure().is_none() {
                engine.end(None);
            }
            is_there
        });
        let devices = engines.iter().filter_map(|engine| self.engines.get(engine));
        self.models.set(loaded, leaving, devices.map(|(_, device)| device.clone()).collect());
    }

    fn start(&mut self, mut start: Start) -> Result<(), InsideError> {
        self.teller.note_spare(std::mem::take(&mut start.lent));
        let program = self.programs.get(&start.hash).cloned();
        let program =
            program.ok_or(NotUnderstood::NotThere { what: "program of guest", number: start.guest.0 })?;
        let session = self.accounts.session(start.session);
        let lender = self.teller.clone().lender(Some(start.guest));
        let account =
            Account::lent("guest", self.limits.budget(), Some(session.clone()), lender, &OF_A_GUEST);
        if start.is_profiled {
            account.watch_steps();
        }
        self.accounts_of.retain(|_, (account, _)| account.strong_count() > 0);
        self.accounts_of.insert(start.guest, (Arc::downgrade(&account), Instant::now()));
        self.order(Order::Start(Box::new(Started { start, program, account, session })));
        Ok(())
    }

    fn note_counted(&self, guest: GuestId, counted: &Counted) {
        let account = self.accounts_of.get(&guest).and_then(|(account, _)| account.upgrade());
        if let Some(account) = account {
            account.take_over(counted);
        }
    }

    fn note_steps(&self, guest: GuestId, steps: &[Step]) {
        let Some((account, started)) = self.accounts_of.get(&guest) else { return };
        let Some(log) = account.upgrade().map(|account| account.watch_steps()) else { return };
        for Step { end_ns, elapsed_ns, n_rows, n_tokens } in steps.iter().copied() {
            let ended = *started + Duration::from_nanos(end_ns);
            log.note(StepNote { ended, elapsed: Duration::from_nanos(elapsed_ns), n_rows, n_tokens });
        }
    }
}

/// Asks one engine of the daemon.
#[derive(Debug)]
struct Asker {
    engine: EngineNumber,
    up: Arc<Up>,
}

impl Spokesman for Asker {
    fn ask(&self, asked: Asked) {
        self.up.say(&FromGuests::Asked { engine: self.engine, asked: Box::new(asked) });
    }
}

/// Tells whether guests have anything of a model.
async fn tell_held(up: Arc<Up>, model: ModelNumber, handle: trellis_engine::ModelHandle) {
    loop {
        for is_held in [true, false] {
            handle.held(is_held).await;
            up.say(&FromGuests::Holds { model, is_held });
        }
    }
}
