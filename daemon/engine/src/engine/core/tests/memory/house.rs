//! Models of one device, over backends that show every mistake with pages, and their guests.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{Backend, BackendError, Collected, HostPiece, Limits, PAGE_LEN, WeightsInfo};
use crate::batch::{Batch, CellMove, Drawn, HostPageId, LateMask, Output, PageId, Token};
use crate::command::{Ahead, Answer, Ask, ContextId, Edit, MaskSource, ModelId, Operation, RunSettings};
use crate::completion::{CallerId, Completion, Done, Tag};
use crate::engine::KvBounds;
use crate::engine::core::{Core, EngineInput, Newcomer, Next};
use crate::error::EngineError;
use crate::handle::DESK;
use crate::model::Dtype;
use crate::run::{Finish, RunEvent};
use crate::sampling::Sampler;
use crate::scheduler::tests::hash_backend::{HashBackend, VOCAB, drawn, hash, mix, ranked, score};
use crate::scheduler::{Move, SchedulerSettings};
use crate::stats::EngineStats;

/// Pages of the longest context of most models here.
pub(super) const N_LONGEST: usize = 10;

/// What the backends were told.
#[derive(Default)]
pub(super) struct Ledger {
    /// Bytes of each model's pages.
    pub(super) kv_bytes: Vec<u64>,
    pub(super) budget: u64,
    /// Steps of all models, and the number of each at which a model gained pages.
    pub(super) n_steps: u64,
    pub(super) gains: Vec<(u64, usize)>,
    /// Whether there is memory for more.
    pub(super) is_full: bool,
    /// Whether memory of host pages does not go back to the system.
    pub(super) gives_nothing_back: bool,
    /// Whether the backend says so.
    pub(super) says_it_keeps: bool,
    /// Whether moves are not done.
    pub(super) is_moving: bool,
    /// Host pages whose memory goes back together; each by itself where none is said.
    pub(super) n_host_piece_pages: Option<u32>,
    /// Pages that were moved together for that.
    pub(super) n_gathered: usize,
}

impl Ledger {
    pub(super) fn total(&self) -> u64 {
        self.kv_bytes.iter().sum()
    }
}

struct Device {
    place: usize,
    limits: Limits,
    n_pages: usize,
    hash: HashBackend,
    under_way: VecDeque<Vec<Output>>,
    /// Host pages that have memory.
    written: BTreeSet<u32>,
    ledger: Arc<Mutex<Ledger>>,
}

impl Device {
    /// Host memory that has been written to.
    fn pieces(&self, free: &[HostPageId]) -> Vec<HostPiece> {
        let n = self.ledger.lock().expect("nobody panicked").n_host_piece_pages.unwrap_or(1);
        let numbers: BTreeSet<u32> = self.written.iter().map(|page| page / n).collect();
        let piece = |number: u32| {
            let pages = number * n..((number + 1) * n).min(self.limits.n_host_pages as u32);
            let n_written = self.written.range(pages.clone()).count();
            let (free, used) = pages.map(HostPageId).partition(|page| free.contains(page));
            HostPiece { used, free, n_bytes: (n_written * self.limits.page_bytes) as u64 }
        };
        numbers.into_iter().map(piece).collect()
    }

    fn check(&self, pages: impl IntoIterator<Item = PageId>) {
        for page in pages {
            assert!((page.0 as usize) < self.n_pages, "{page:?} of {}", self.n_pages);
        }
    }

    fn make(&mut self, moves: impl Iterator<Item = Move>) {
        let moves: Vec<Move> = moves.collect();
        for &planned in &moves {
            match planned {
                Move::Out(page, _) | Move::In(_, page) => self.check([page]),
                Move::Within(from, to) => self.check([from, to]),
            }
        }
        self.hash.make(&moves);
    }
}

impl Backend for Device {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn weights(&self) -> WeightsInfo {
        WeightsInfo { dtype: Dtype::F32, n_bytes: 0 }
    }

    fn device(&self) -> &'static str {
        "a device of a test"
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        self.ledger.lock().expect("nobody panicked").n_steps += 1;
        self.check(batch.rows.iter().flat_map(|row| row.pages.iter().copied()));
        self.check(batch.copies.iter().flat_map(|copy| [copy.src, copy.dst]));
        let outputs = self.hash.run(&[], batch);
        self.under_way.push_back(outputs);
        Ok(())
    }

    fn supply(&mut self, _: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        unreachable!("no draw is late here")
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        unreachable!("no draw is late here")
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        let outputs = self.under_way.pop_front().expect("a step is under way");
        Ok(Collected { outputs, elapsed: Duration::from_millis(1) })
    }

    fn n_pages(&self) -> usize {
        self.n_pages
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        let mut ledger = self.ledger.lock().expect("nobody panicked");
        assert!(n_pages.is_multiple_of(self.limits.n_granule_pages) && n_pages <= self.limits.n_pages);
        assert!(
            n_pages * PAGE_LEN >= self.limits.n_positions_max,
            "a model has what its longest context needs"
        );
        if n_pages > self.n_pages {
            if ledger.is_full {
                let (device, needed_bytes, free_bytes) = (String::new(), 1, 0);
                return Err(BackendError::OutOfMemory { device, needed_bytes, free_bytes });
            }
            let at = ledger.n_steps;
            ledger.gains.push((at, self.place));
        } else {
            assert!(self.under_way.is_empty(), "steps that could read what goes are under way");
            self.hash.forget_from(n_pages);
        }
        self.n_pages = n_pages;
        let before = ledger.total();
        ledger.kv_bytes[self.place] = (n_pages * self.limits.page_bytes) as u64;
        assert!(ledger.total() <= ledger.budget.max(before), "{:?} of {}", ledger.kv_bytes, ledger.budget);
        Ok(())
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        self.make(moves.iter().map(|&(from, to)| Move::Within(from, to)));
        Ok(())
    }

    fn move_cells(&mut self, _: &[CellMove]) -> Result<(), BackendError> {
        unreachable!("nobody guesses")
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        self.make(moves.iter().map(|&(from, to)| Move::Out(from, to)));
        self.written.extend(moves.iter().map(|(_, to)| to.0));
        Ok(())
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        self.make(moves.iter().map(|&(from, to)| Move::In(from, to)));
        Ok(())
    }

    fn is_moving(&mut self) -> bool {
        self.ledger.lock().expect("nobody panicked").is_moving
    }

    fn can_release_host_pages(&self) -> bool {
        true
    }

    fn release_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> u64 {
        if self.ledger.lock().expect("nobody panicked").gives_nothing_back {
            return 0;
        }
        let mut n_bytes = 0;
        for piece in self.pieces(free) {
            if n_bytes < at_most && piece.used.is_empty() {
                n_bytes += piece.n_bytes;
                piece.free.iter().for_each(|page| _ = self.written.remove(&page.0));
            }
        }
        n_bytes
    }

    fn keeps_host_memory(&self) -> bool {
        self.ledger.lock().expect("nobody panicked").says_it_keeps
    }

    fn gather_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        if self.ledger.lock().expect("nobody panicked").gives_nothing_back {
            return Vec::new();
        }
        let moves = HostPiece::gather(self.pieces(free), at_most);
        self.hash.gather(&moves);
        self.written.extend(moves.iter().map(|(_, to)| to.0));
        self.ledger.lock().expect("nobody panicked").n_gathered += moves.len();
        moves
    }
}

/// What a model of these tests is.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) page_bytes: usize,
    pub(super) n_granule_pages: usize,
    pub(super) n_pages: usize,
    pub(super) n_host_pages: usize,
    /// Pages of the longest context.
    pub(super) n_longest: usize,
}

pub(super) const PLAIN: Kind =
    Kind { page_bytes: 128, n_granule_pages: 2, n_pages: 40, n_host_pages: 400, n_longest: N_LONGEST };

/// A context, as its guest knows it.
pub(super) struct Talk {
    pub(super) id: ContextId,
    pub(super) caller: CallerId,
    pub(super) tokens: Vec<Token>,
    pub(super) tag: Tag,
    pub(super) waits: Waits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    Nothing,
    ForAnswer,
    ForTokens,
}

/// What a turn takes: a step and what comes of it are two.
const TURN_TIME: Duration = Duration::from_micros(500);

pub(super) struct House {
    core: Core,
    ledger: Arc<Mutex<Ledger>>,
    pub(super) inputs: Vec<EngineInput>,
    pub(super) talks: Vec<Talk>,
    n_asked: u32,
    /// What came of jobs.
    drawn: Vec<(Tag, Result<Answer, EngineError>)>,
    n_callers: u64,
    pub(super) n_answers: usize,
    pub(super) n_tokens: usize,
    /// What the desk was told.
    pub(super) shared: Vec<Result<(), EngineError>>,
    stats: Option<EngineStats>,
    relieved: Option<u64>,
    /// What turns took.
    pub(super) busy: Duration,
    now: Instant,
    /// Turns after which something was to come in, or a moment.
    pub(super) n_pauses: usize,
}

impl House {
    pub(super) fn new(kinds: &[Kind], n_under_way: usize) -> Self {
        let ledger = Arc::<Mutex<Ledger>>::default();
        let mut house = Self {
            core: Core::default(),
            ledger: ledger.clone(),
            inputs: Vec::new(),
            talks: Vec::new(),
            n_asked: 0,
            drawn: Vec::new(),
            n_callers: 0,
            n_answers: 0,
            n_tokens: 0,
            shared: Vec::new(),
            stats: None,
            relieved: None,
            busy: Duration::ZERO,
            now: Instant::now(),
            n_pauses: 0,
        };
        kinds.iter().for_each(|&kind| house.add(kind, n_under_way));
        // As long as no budget was set for all together, each has what it came with.
        assert!(house.ledger().gains.is_empty());
        let budget = house.ledger().total();
        house.share(budget);
        house.settle();
        assert!(matches!(house.shared.pop(), Some(Ok(()))), "there is nothing to give out");
        house
    }

    /// A model more, with its pages.
    pub(super) fn add(&mut self, kind: Kind, n_under_way: usize) {
        let Kind { page_bytes, n_granule_pages, n_pages, n_host_pages, n_longest } = kind;
        let limits = Limits {
            n_pages: 1 << 10,
            n_granule_pages,
            n_host_pages,
            page_bytes,
            n_tokens_max: 256,
            n_positions_max: n_longest * PAGE_LEN,
            vocab_size: VOCAB as usize,
            n_steps_under_way: n_under_way,
            ..Limits::of_nothing(16, 0)
        };
        let (hash, under_way) = (HashBackend::new(limits.n_pages, n_host_pages), VecDeque::new());
        let mut ledger = self.ledger.lock().expect("nobody panicked");
        let place = ledger.kv_bytes.len();
        ledger.kv_bytes.push((n_pages * page_bytes) as u64);
        ledger.budget = ledger.total();
        drop(ledger);
        let (written, ledger) = (BTreeSet::new(), self.ledger.clone());
        let device = Device { place, limits, n_pages, hash, under_way, written, ledger };
        let bounds = KvBounds { n_pages_min: n_longest, n_pages_max: 1 << 10 };
        let settings = SchedulerSettings { place, ..SchedulerSettings::alone(256) };
        let id = ModelId { place: place as u16, generation: 0 };
        self.inputs.push(EngineInput::Add(Newcomer {
            id,
            settings,
            bounds,
            backend: Box::new(device),
            archive: None,
        }));
        self.settle();
    }

    /// Takes a model off.
    pub(super) fn remove(&mut self, place: usize) {
        self.inputs.push(EngineInput::Remove(ModelId { place: place as u16, generation: 0 }));
        self.settle();
        assert_eq!(self.core.take_departed().len(), 1);
        let mut ledger = self.ledger();
        (ledger.kv_bytes[place], ledger.budget) = (0, ledger.budget - ledger.kv_bytes[place]);
    }

    pub(super) fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("nobody panicked")
    }

    pub(super) fn share(&mut self, kv_bytes: u64) {
        self.ledger().budget = kv_bytes;
        self.inputs.push(EngineInput::SetKvBytes { kv_bytes, tag: Tag::new(0, 0) });
    }

    /// Memory is short; says how many bytes went back to the system.
    pub(super) fn relieve(&mut self, n_bytes: u64) -> u64 {
        self.inputs.push(EngineInput::Relieve { n_bytes, tag: Tag::new(2, 0) });
        self.turn();
        self.relieved.take().expect("answered at once")
    }

    /// As [`Self::relieve`], while a step is under way: what is said before that was taken in, and after it.
    pub(super) fn relieve_beside_step(&mut self, n_bytes: u64) -> [Option<u64>; 2] {
        let begins = (0..100).any(|_| self.turn() == Next::Device);
        assert!(begins, "there is something to compute");
        self.inputs.push(EngineInput::Relieve { n_bytes, tag: Tag::new(2, 0) });
        assert_eq!(self.turn(), Next::Device);
        let before = self.relieved.take();
        self.core.wait();
        let after = (0..2).find_map(|_| {
            self.turn();
            self.relieved.take()
        });
        [before, after]
    }

    pub(super) fn n_pages(&mut self, place: usize) -> usize {
        self.core.resident(place).backend.n_pages()
    }

    /// Contexts of a model that are looked at when pages are wanted.
    pub(super) fn n_holders(&mut self, place: usize) -> usize {
        self.core.resident(place).scheduler.n_holders()
    }

    pub(super) fn n_granule_pages(&mut self, place: usize) -> usize {
        self.core.resident(place).backend.limits().n_granule_pages
    }

    pub(super) fn stats(&mut self, place: usize) -> EngineStats {
        let model = ModelId { place: place as u16, generation: 0 };
        self.inputs.push(EngineInput::Operation(Operation::Stats {
            model,
            caller: DESK,
            tag: Tag::new(1, 0),
        }));
        self.turn();
        self.stats.take().expect("answered at once")
    }

    pub(super) fn create(&mut self, place: usize, actor: u32) -> usize {
        self.n_callers += 1;
        let caller = CallerId(self.n_callers);
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (session, guest) = (SessionId(self.n_callers), GuestId(self.n_callers));
        let owner = Owner { actor: ActorId(actor), session, guest, account };
        let model = ModelId { place: place as u16, generation: 0 };
        let id = ContextId { model, number: self.n_callers };
        self.inputs.push(EngineInput::Enter(caller, owner));
        self.inputs.push(EngineInput::Operation(Operation::Create { id, caller }));
        let (tokens, tag) = (Vec::new(), Tag::new(0, 0));
        self.talks.push(Talk { id, caller, tokens, tag, waits: Waits::Nothing });
        self.talks.len() - 1
    }

    /// What a guest appends before it asks; no other appends the same.
    fn edit(&mut self, talk: usize, n_tokens: usize) -> Edit {
        self.n_asked += 1;
        let Talk { id, tokens, tag, .. } = &mut self.talks[talk];
        *tag = Tag::new(self.n_asked, 7);
        let text = mix(id.number + 1000 * id.model.place as u64);
        let n_kept = tokens.len();
        tokens.extend((n_kept..n_kept + n_tokens).map(|n| (mix(text + n as u64) % VOCAB) as Token));
        Edit { n_kept, appended: tokens[n_kept..].to_vec(), n_pulled: 0 }
    }

    pub(super) fn ask(&mut self, talk: usize, n_tokens: usize) {
        let edit = self.edit(talk, n_tokens);
        let Talk { id, tag, waits, .. } = &mut self.talks[talk];
        *waits = Waits::ForAnswer;
        let ask = Operation::Ask { id: *id, edit, ask: Ask::Top { n: 1 }, tag: *tag };
        self.inputs.push(EngineInput::Operation(ask));
    }

    pub(super) fn run(&mut self, talk: usize, n_tokens: usize, n_tokens_max: Option<usize>) {
        let edit = self.edit(talk, n_tokens);
        let Talk { id, tag, waits, .. } = &mut self.talks[talk];
        *waits = Waits::ForTokens;
        let settings = RunSettings {
            sampler: Arc::new(Sampler::greedy()),
            stop_tokens: Arc::new([]),
            n_tokens_max,
            ahead: Ahead::Unbounded,
            masks: MaskSource::Sampler,
        };
        self.inputs.push(EngineInput::Operation(Operation::Run { id: *id, edit, settings, tag: *tag }));
    }

    /// So many contexts of one guest of the first model.
    pub(super) fn create_for_job(&mut self, actor: u32, n: usize) -> Vec<ContextId> {
        let first = self.create(0, actor);
        let Talk { caller, id, .. } = self.talks[first];
        let others = (1..n as u64).map(|n| ContextId { number: id.number + 1000 * n, ..id });
        for id in others.clone() {
            self.inputs.push(EngineInput::Operation(Operation::Create { id, caller }));
        }
        [id].into_iter().chain(others).collect()
    }

    /// A draw of all these contexts, each with so many tokens of its own.
    pub(super) fn draw_together(&mut self, ids: &[ContextId], n_tokens: usize) -> Tag {
        self.draw_grown(ids, 0..n_tokens)
    }

    /// As above, of contexts that have the tokens before these already.
    pub(super) fn draw_grown(&mut self, ids: &[ContextId], tokens: std::ops::Range<usize>) -> Tag {
        self.n_asked += 1;
        let tag = Tag::new(self.n_asked, 8);
        let n_kept = tokens.start;
        let text = |id: ContextId| tokens.clone().map(move |n| (mix(id.number + n as u64) % VOCAB) as Token);
        let edit = |id| Edit { n_kept, appended: text(id).collect(), ..Edit::default() };
        let members = ids.iter().map(|&id| (id, edit(id))).collect();
        let sampler = Arc::new(Sampler::greedy());
        self.inputs.push(EngineInput::Operation(Operation::DrawTogether { members, sampler, tag }));
        tag
    }

    /// What came of a draw.
    pub(super) fn take_drawn(&mut self, tag: Tag) -> Result<Answer, EngineError> {
        let idx = self.drawn.iter().position(|(of, _)| *of == tag).expect("it was answered");
        self.drawn.swap_remove(idx).1
    }

    pub(super) fn release(&mut self, talk: usize) {
        let Talk { id, caller, .. } = self.talks.swap_remove(talk);
        self.inputs.push(EngineInput::Operation(Operation::Release { id, n_pulled: 0 }));
        self.inputs.push(EngineInput::Leave(caller));
    }

    fn turn(&mut self) -> Next {
        let mut completions = Vec::new();
        let inputs = std::mem::take(&mut self.inputs);
        let begun = Instant::now();
        // What a step takes here says nothing: it would depend on what else the machine does.
        self.now += TURN_TIME;
        let next = self.core.turn(self.now, inputs.into_iter(), &mut completions).expect("the engine lives");
        self.busy += begun.elapsed();
        completions.into_iter().for_each(|completion| self.take(completion));
        next
    }

    fn take(&mut self, Completion { caller, tag, done }: Completion) {
        match done {
            Done::Shared(shared) => return self.shared.push(shared),
            Done::Relieved(n_bytes) => return self.relieved = Some(n_bytes),
            Done::Stats(stats) => return self.stats = Some(*stats.expect("it is there")),
            _ => {}
        }
        if tag.generation() == 8
            && let Done::Answer(answer) = done
        {
            return self.drawn.push((tag, answer));
        }
        let talk = self.talks.iter_mut().find(|talk| talk.caller == caller && talk.tag == tag);
        let Some(talk) = talk else { return };
        let prefix = hash(&talk.tokens);
        match done {
            Done::Answer(answer) => {
                let expected = Answer::Top { candidates: ranked(prefix, 1), entropy: score(prefix, 0) };
                assert_eq!(answer.expect("it fits"), expected);
                talk.waits = Waits::Nothing;
                self.n_answers += 1;
            }
            Done::Run { event: RunEvent::Token(Drawn { candidate, .. }), .. } => {
                assert_eq!(candidate, drawn(prefix, Sampler::greedy().seed));
                talk.tokens.push(candidate.token);
                self.n_tokens += 1;
            }
            Done::Run { event: RunEvent::Finished(finish), .. } => {
                assert!(matches!(finish, Finish::MaxTokens | Finish::ContextFull));
                talk.waits = Waits::Nothing;
            }
            other => panic!("{other:?}"),
        }
    }

    /// One turn, and the device's work if it is to be waited for; `false` if there is nothing to do.
    pub(super) fn step(&mut self) -> bool {
        match self.turn() {
            Next::Device => self.core.wait(),
            Next::Input => return !self.inputs.is_empty(),
            Next::InputBefore(_) => self.n_pauses += 1,
            _ => {}
        }
        true
    }

    pub(super) fn settle(&mut self) {
        let mut n_turns = 0;
        while self.step() {
            n_turns += 1;
            assert!(n_turns < 100_000, "it comes to no end");
        }
        let waiting: Vec<_> = self.talks.iter().filter(|talk| talk.waits != Waits::Nothing).collect();
        assert!(waiting.is_empty(), "{} wait for ever", waiting.len());
    }
}
