//! Honest clients, each with a connection of its own, that go on until their daemon is gone.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use trellis_client::{Client, Error, ErrorCode, Event, Guest, GuestSender, Program, Stage};

use crate::daemons::with;
use crate::guests;

/// What the stream begins with.
const PROMPT: &str = "<|begin_of_text|>Once upon a time";

/// Its tokens.
const N_TOKENS: usize = 32;

/// What contexts are saved with: the last has some pages.
const TEXTS: [&str; 4] = [
    "<|begin_of_text|>What is 37 + 48?",
    PROMPT,
    "<|begin_of_text|>The capital of France is",
    "<|begin_of_text|>Once upon a time there was a small bird that lived in an old tree beside a river. Every morning it \
     sang to the sun, and every evening it told the moon what it had seen. One day the wind came down from the hills and \
     asked the bird for a song of its own, so that it would not be alone on its way over the sea.",
];

/// The name under which one context takes the place of the other.
const REPLACED: &str = "replaced";

/// Contexts that are saved at a time.
const N_SAVED_MAX: u64 = 4;

/// What clients know of their daemon and have had it do.
#[derive(Debug)]
pub(super) struct World {
    socket: PathBuf,
    hostile: Bytes,
    /// The tokens of the stream and of contexts that are opened, once they are known.
    pub(super) golden: Option<Golden>,
    ledger: Mutex<Ledger>,
}

/// What is the same in every life.
#[derive(Debug)]
pub(super) struct Golden {
    stream: Vec<u32>,
    opened: Vec<Vec<u32>>,
}

/// What was done.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    n_components: u64,
    n_saves: u64,
    /// Components of the life, by number: those that have run, and all.
    pub(super) ran: Vec<u64>,
    pub(super) begun: Vec<u64>,
    /// Contexts that were saved in the life or were being saved, by number.
    pub(super) saved: Vec<u64>,
    /// Those that a guest was told are forgotten.
    pub(super) forgotten: Vec<u64>,
    /// Contexts of an earlier life that are opened only while this one may be killed.
    pub(super) unopened: Vec<u64>,
    /// How many of those were there, whole.
    pub(super) n_reopened: usize,
    /// Tokens of streams.
    pub(super) n_tokens: usize,
    /// Calls that ended well.
    pub(super) n_calls: usize,
}

/// Why a client stopped.
#[derive(Debug)]
pub(super) enum Stop {
    /// A call ended so.
    Error { call: &'static str, error: Error, at: Instant },
    /// It got what is not right.
    Wrong(String),
}

type Outcome<T> = Result<T, Stop>;

fn ended(call: &'static str) -> impl Fn(Error) -> Stop {
    move |error| Stop::Error { call, error, at: Instant::now() }
}

/// What became of a component that was run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Disk,
    Compiler,
}

impl World {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, hostile: guests::hostile().into(), golden: None, ledger: Mutex::default() }
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_call(&self) {
        self.ledger().n_calls += 1;
    }

    async fn connect(&self) -> Outcome<Client> {
        Client::connect_to(&self.socket).await.map_err(ended("connect"))
    }

    /// What the streams and the contexts of a daemon are that nobody disturbs.
    pub(super) async fn learn(&self) -> Outcome<Golden> {
        let client = self.connect().await?;
        let stream = self.streamed(&client).await?;
        let mut keeper = Keeper::begin(self, &client).await?;
        let mut opened = Vec::new();
        for number in 0..TEXTS.len() as u64 {
            keeper.save(number).await?;
            opened.extend(keeper.open(&name(number)).await?);
            keeper.forget(number).await?;
        }
        self.ledger().n_saves = TEXTS.len() as u64;
        Ok(Golden { stream, opened })
    }

    /// The tokens of the stream, each looked at as it comes.
    async fn streamed(&self, client: &Client) -> Outcome<Vec<u32>> {
        let options = with(&["tokens", &N_TOKENS.to_string(), PROMPT]);
        let mut guest =
            client.start(Program::wasm(self.hostile.clone()), options).await.map_err(ended("start"))?;
        let mut tokens = Vec::new();
        while let Some(event) = guest.next().await {
            let Event::Tokens { tokens: more } = event.map_err(ended("stream"))? else { continue };
            self.ledger().n_tokens += more.len();
            tokens.extend(more);
            if let Some(golden) = &self.golden
                && !golden.stream.starts_with(&tokens)
            {
                return Err(Stop::Wrong(format!("the stream {tokens:?} is not {:?}", golden.stream)));
            }
        }
        if tokens.len() != N_TOKENS {
            return Err(Stop::Wrong(format!("a stream that ended well has {} tokens", tokens.len())));
        }
        self.note_call();
        Ok(tokens)
    }

    /// Streams the same again and again.
    pub(super) async fn stream(&self) -> Outcome<Infallible> {
        let client = self.connect().await?;
        loop {
            self.streamed(&client).await?;
        }
    }

    /// Runs one small component after the other that no daemon has seen.
    pub(super) async fn compile(&self) -> Outcome<Infallible> {
        let client = self.connect().await?;
        loop {
            let number = self.next_component();
            self.run_component(&client, number).await?;
            self.ledger().ran.push(number);
        }
    }

    /// Does the same with a large one, which a daemon compiles for long.
    pub(super) async fn upload(&self) -> Outcome<Infallible> {
        let client = self.connect().await?;
        loop {
            let wasm = guests::anew(&self.hostile, self.next_component());
            let guest = client.start(Program::wasm(wasm), with(&["exit-well"])).await;
            guest.map_err(ended("start"))?.wait().await.map_err(ended("a large component"))?;
            self.note_call();
        }
    }

    fn next_component(&self) -> u64 {
        let mut ledger = self.ledger();
        ledger.n_components += 1;
        let number = ledger.n_components;
        ledger.begun.push(number);
        number
    }

    async fn run_component(&self, client: &Client, number: u64) -> Outcome<Source> {
        let program = Program::wasm(numbered(number));
        let mut guest = client.start(program, with(&[])).await.map_err(ended("start"))?;
        let mut source = Source::Disk;
        while let Some(event) = guest.next().await {
            match event {
                // As long as it is compiled, nobody knows for how long it will be.
                Ok(Event::Progress { stage: Stage::Compile, total: 0, .. }) => source = Source::Compiler,
                Ok(_) => {}
                Err(Error::Daemon(body)) if body.code == ErrorCode::GuestFailed => {
                    if body.message != said(number) {
                        return Err(Stop::Wrong(format!("{} said {:?}", said(number), body.message)));
                    }
                    self.note_call();
                    return Ok(source);
                }
                Err(error) => return Err(ended("a component")(error)),
            }
        }
        Err(Stop::Wrong(format!("{} said nothing", said(number))))
    }

    /// Saves, opens and forgets contexts by name.
    pub(super) async fn save(&self) -> Outcome<Infallible> {
        let client = self.connect().await?;
        let mut keeper = Keeper::begin(self, &client).await?;
        let first = self.ledger().n_saves;
        loop {
            let number = {
                let mut ledger = self.ledger();
                ledger.n_saves += 1;
                let number = ledger.n_saves - 1;
                ledger.saved.push(number);
                number
            };
            keeper.save(number).await?;
            if !keeper.is_whole(number).await? {
                return Err(Stop::Wrong(format!("{} was saved and is not there", name(number))));
            }
            if let Some(old) = number.checked_sub(N_SAVED_MAX).filter(|old| *old >= first) {
                keeper.forget(old).await?;
                self.ledger().forgotten.push(old);
            }
        }
    }

    /// Saves one context after the other under the same name.
    pub(super) async fn replace(&self) -> Outcome<Infallible> {
        let client = self.connect().await?;
        let mut keeper = Keeper::begin(self, &client).await?;
        for text in (0..TEXTS.len()).cycle() {
            keeper.save_as(REPLACED, text).await?;
            if keeper.text_of(REPLACED).await? != Some(text) {
                return Err(Stop::Wrong(format!("text {text} was saved as {REPLACED} and is not there")));
            }
        }
        unreachable!("the texts come again and again")
    }

    /// Opens what an earlier life has saved, which comes from disk the first time.
    pub(super) async fn reopen(&self) -> Outcome<Infallible> {
        let client = self.connect().await?;
        let mut keeper = Keeper::begin(self, &client).await?;
        let unopened = self.ledger().unopened.clone();
        for number in unopened {
            let is_whole = keeper.is_whole(number).await?;
            self.ledger().n_reopened += usize::from(is_whole);
        }
        loop {
            keeper.text_of(REPLACED).await?;
        }
    }

    /// Comes, asks and goes. A daemon that is `awaited` may not be there yet.
    pub(super) async fn visit(&self, is_awaited: &(dyn Fn() -> bool + Sync)) -> Outcome<Infallible> {
        loop {
            let client = match Client::connect_to(&self.socket).await {
                Ok(client) => client,
                Err(Error::NotRunning { .. }) if is_awaited() => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                }
                Err(error) => return Err(ended("connect")(error)),
            };
            self.note_call();
            // One that goes before it is answered.
            drop(Client::connect_to(&self.socket).await.map_err(ended("connect"))?);
            client.info().await.map_err(ended("info"))?;
            client.ps().await.map_err(ended("ps"))?;
            self.note_call();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Whether a daemon that has begun holds nothing, and streams what it should.
    pub(super) async fn check_begun(&self) -> Outcome<()> {
        let client = self.connect().await?;
        let info = client.info().await.map_err(ended("info"))?;
        let models = client.models().await.map_err(ended("models"))?;
        let n_contexts: u64 = models.iter().map(|model| model.n_contexts).sum();
        if (info.n_guests, n_contexts) != (0, 0) {
            let message = format!("a new daemon has {} guests and {n_contexts} contexts", info.n_guests);
            return Err(Stop::Wrong(message));
        }
        self.streamed(&client).await.map(drop)
    }

    /// Runs components of an earlier life again; how many came from the disk and how many had to be compiled. One that `ran` is
    /// there, because it was written before it ran.
    pub(super) async fn check_components(&self, begun: &[u64], ran: &[u64]) -> Outcome<(usize, usize)> {
        let client = self.connect().await?;
        let (mut n_from_disk, mut n_compiled) = (0, 0);
        for number in begun {
            match self.run_component(&client, *number).await? {
                Source::Disk => n_from_disk += 1,
                Source::Compiler if ran.contains(number) => {
                    return Err(Stop::Wrong(format!("{} had run and was not kept", said(*number))));
                }
                Source::Compiler => n_compiled += 1,
            }
        }
        Ok((n_from_disk, n_compiled))
    }

    /// Opens contexts of an earlier life: how many of them are there, whole. One that was `forgotten` is not.
    pub(super) async fn check_saved(&self, saved: &[u64], forgotten: &[u64]) -> Outcome<usize> {
        let client = self.connect().await?;
        let mut keeper = Keeper::begin(self, &client).await?;
        let mut n_whole = 0;
        for number in saved {
            let is_whole = keeper.is_whole(*number).await?;
            if is_whole && forgotten.contains(number) {
                return Err(Stop::Wrong(format!("{} was forgotten and is there", name(*number))));
            }
            n_whole += usize::from(is_whole);
        }
        keeper.text_of(REPLACED).await?;
        Ok(n_whole)
    }
}

fn name(number: u64) -> String {
    format!("kept-{number}")
}

fn text(number: u64) -> usize {
    number as usize % TEXTS.len()
}

/// A guest that saves and opens contexts.
struct Keeper<'a> {
    world: &'a World,
    guest: Guest,
    told: GuestSender,
}

impl<'a> Keeper<'a> {
    async fn begin(world: &'a World, client: &Client) -> Outcome<Self> {
        let program = Program::wasm(world.hostile.clone());
        let guest = client.start(program, with(&["keep"])).await.map_err(ended("start"))?;
        Ok(Self { world, told: guest.sender(), guest })
    }

    /// What it answers to a message: the tokens before the word, and the word.
    async fn tell(&mut self, call: &'static str, message: String) -> Outcome<(Vec<u32>, String)> {
        self.told.send(message).await.map_err(ended(call))?;
        let mut tokens = Vec::new();
        while let Some(event) = self.guest.next().await {
            match event.map_err(ended(call))? {
                Event::Tokens { tokens: more } => tokens.extend(more),
                Event::Text { text } => {
                    self.world.note_call();
                    return Ok((tokens, text));
                }
                _ => {}
            }
        }
        Err(Stop::Wrong(format!("the guest that keeps contexts ended at {call}")))
    }

    async fn save(&mut self, number: u64) -> Outcome<()> {
        self.save_as(&name(number), text(number)).await
    }

    async fn save_as(&mut self, name: &str, text: usize) -> Outcome<()> {
        self.tell("save", format!("save {name} {}", TEXTS[text])).await?;
        Ok(())
    }

    async fn forget(&mut self, number: u64) -> Outcome<()> {
        self.tell("forget", format!("forget {}", name(number))).await?;
        Ok(())
    }

    /// The tokens of what is saved, and those that the model draws after them.
    async fn open(&mut self, name: &str) -> Outcome<Option<Vec<u32>>> {
        let (tokens, word) = self.tell("open", format!("open {name}")).await?;
        Ok((word == "opened").then_some(tokens))
    }

    /// With which text a context was saved that is there; what is there is whole.
    async fn text_of(&mut self, name: &str) -> Outcome<Option<usize>> {
        let (world, opened) = (self.world, self.open(name).await?);
        let golden = world.golden.as_ref().map_or(&[][..], |golden| &golden.opened);
        let text = golden.iter().position(|golden| Some(golden) == opened.as_ref());
        if opened.is_some() && text.is_none() {
            return Err(Stop::Wrong(format!("{name} is {opened:?} and none of {golden:?}")));
        }
        Ok(text)
    }

    /// Whether a context is there; what is there is whole.
    async fn is_whole(&mut self, number: u64) -> Outcome<bool> {
        let opened = self.open(&name(number)).await?;
        let golden = self.world.golden.as_ref().map(|golden| &golden.opened[text(number)]);
        if opened.is_some() && opened.as_ref() != golden {
            return Err(Stop::Wrong(format!("{} is {opened:?} and not {golden:?}", name(number))));
        }
        Ok(opened.is_some())
    }
}

/// What a component of its own says.
fn said(number: u64) -> String {
    format!("component {number:08}")
}

/// A component that says its number, as an error, so that it shows whose code has run. Its functions are there to be compiled.
fn numbered(number: u64) -> Vec<u8> {
    const N_FUNCTIONS: usize = 400;
    let said = said(number);
    let functions: String = (0..N_FUNCTIONS)
        .map(|idx| {
            format!(
                r#"(func (export "f{idx}") (param i32 i32) (result i32)
                    (i32.rotl (i32.mul (local.get 0) (i32.const {idx})) (i32.xor (local.get 1) (i32.const {number}))))"#
            )
        })
        .collect();
    // At 16: an error, whose text is at 32.
    let text = format!(
        r#"(component
            (core module $main
                (memory (export "memory") 1)
                (data (i32.const 16) "\01\00\00\00\20\00\00\00\{:02x}\00\00\00")
                (data (i32.const 32) "{said}")
                {functions}
                (func (export "run") (result i32) (i32.const 16)))
            (core instance $main (instantiate $main))
            (func (export "run") (result (result (error string)))
                (canon lift (core func $main "run") (memory (core memory $main "memory")))))"#,
        said.len()
    );
    wat::parse_str(text).expect("it is WebAssembly")
}
