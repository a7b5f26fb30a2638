//! The engine over a device that has two steps under way and computes when the test says so.

mod held;
mod kept;
mod linger;
mod memory;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Core, EngineInput, KvBounds, Newcomer, Next};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{
    AskLimits, Backend, BackendError, Collected, Damage, Limits, SteeringTimes, WeightsInfo,
};
use crate::batch::{
    Batch, Candidate, CellMove, Drawn, HostPageId, LateMask, Output, OutputKind, PageId, Token,
};
use crate::command::{Ahead, ContextId, Edit, MaskSource, ModelId, Operation, RunSettings};
use crate::completion::{CallerId, Completion, Done, Tag};
use crate::error::EngineError;
use crate::kept::KeptRow;
use crate::model::Dtype;
use crate::run::RunEvent;
use crate::sampling::program::Left;
use crate::sampling::{Sampler, TokenMask};
use crate::scheduler::SchedulerSettings;

const VOCAB: usize = 64;
/// How long each step takes.
const STEP: Duration = Duration::from_millis(2);
const CALLER: CallerId = CallerId(1);
const MODEL: ModelId = ModelId { place: 0, generation: 0 };
const MASKED: ContextId = ContextId { model: MODEL, number: 1 };
const PLAIN: ContextId = ContextId { model: MODEL, number: 2 };

/// What the device was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Submit { n_rows: usize, n_late: usize },
    Supply { n_masks: usize },
    Collect,
}

#[derive(Default)]
struct Told {
    calls: Mutex<Vec<Call>>,
    are_layers_done: AtomicBool,
    fails_to_supply: AtomicBool,
    /// When it is asked the next time.
    fails_in_layers: AtomicBool,
}

/// Draws the number of the place that the token takes, or what the mask allows.
struct Device {
    limits: Limits,
    told: Arc<Told>,
    /// Outputs of the steps under way, with the places of the late ones in the last.
    under_way: Vec<Vec<Output>>,
    late: Vec<(usize, usize)>,
    waits: bool,
}

fn only(token: Token) -> TokenMask {
    let mut mask = TokenMask::none(VOCAB);
    mask.set(token, true);
    mask
}

fn drawn(token: Token) -> Output {
    Output::Sampled(Candidate { token, logprob: -1.0 })
}

fn drawn_under(mask: &TokenMask) -> Output {
    drawn((0..VOCAB as Token).find(|&token| mask.allows(token)).expect("the masks here allow one"))
}

impl Device {
    /// Ends the last step.
    fn fail(&mut self, call: &'static str) -> BackendError {
        self.under_way.pop();
        self.waits = false;
        self.late.clear();
        let (device, reason) = (String::new(), String::new());
        BackendError::Device { device, call, reason, damage: Damage::Call }
    }

    fn note(&self, call: Call) {
        self.told.calls.lock().expect("nobody panicked").push(call);
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

    fn keep_row(&mut self) -> Option<KeptRow> {
        Some(KeptRow::new(()))
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        assert!(!self.waits && self.under_way.len() < 2, "a step behind one that waits for masks");
        let mut outputs = Vec::new();
        for (row_idx, row) in batch.rows.iter().enumerate() {
            for request in &row.outputs {
                outputs.push(match request.kind {
                    OutputKind::Sample(_) => drawn(request.position as Token + 1),
                    OutputKind::Masked { mask: Some(mask), .. } => drawn_under(mask),
                    OutputKind::Keep(_) => Output::Kept,
                    OutputKind::Program { sampler, .. } => {
                        let candidate = Candidate { token: request.position as Token + 1, logprob: -1.0 };
                        let left = Left { next: sampler.start(), reports: Default::default() };
                        Output::Programmed(candidate, Box::new(left))
                    }
                    OutputKind::Masked { mask: None, .. } => {
                        self.late.push((row_idx, outputs.len()));
                        Output::SatOut
                    }
                    ref other => panic!("{other:?}"),
                });
            }
        }
        self.waits = !self.late.is_empty();
        self.note(Call::Submit { n_rows: batch.rows.len(), n_late: self.late.len() });
        self.under_way.push(outputs);
        Ok(())
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        assert!(std::mem::take(&mut self.waits), "once for each step that waits");
        self.note(Call::Supply { n_masks: masks.len() });
        let late = std::mem::take(&mut self.late);
        let outputs = self.under_way.last_mut().expect("it is under way");
        for mask in masks {
            let (_, output_idx) = late.iter().find(|(row_idx, _)| *row_idx == mask.row_idx).expect("late");
            outputs[*output_idx] = drawn_under(mask.mask);
        }
        if self.told.fails_to_supply.swap(false, Ordering::Relaxed) {
            return Err(self.fail("supply"));
        }
        Ok(Vec::new())
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        assert!(self.waits);
        if self.told.fails_in_layers.swap(false, Ordering::Relaxed) {
            return Err(self.fail("the layers"));
        }
        Ok(self.told.are_layers_done.load(Ordering::Relaxed))
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        assert!(!self.waits || self.under_way.len() > 1, "it would never end");
        self.note(Call::Collect);
        Ok(Collected { outputs: self.under_way.remove(0), elapsed: STEP })
    }

    fn n_pages(&self) -> usize {
        self.limits.n_pages
    }

    fn resize(&mut self, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn move_pages(&mut self, _: &[(PageId, PageId)]) -> Result<(), BackendError> {
        Ok(())
    }

    fn move_cells(&mut self, _: &[CellMove]) -> Result<(), BackendError> {
        Ok(())
    }

    fn swap_out(&mut self, _: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        Ok(())
    }

    fn swap_in(&mut self, _: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        Ok(())
    }
}

fn limits(n_rows_max: usize, n_steps_under_way: usize) -> Limits {
    Limits {
        n_pages: 100 * n_rows_max,
        n_granule_pages: 1,
        n_host_pages: 0,
        page_bytes: 128,
        n_rows_max,
        n_tokens_max: 8 * n_rows_max,
        n_tile_tokens: 1,
        n_block_tokens: 1,
        n_queries_per_key: 1,
        n_positions_max: 1000,
        vocab_size: VOCAB,
        hidden_size: 1,
        n_layers: 6,
        n_steps_under_way,
        n_slots: 2 * n_rows_max,
        n_states: 0,
        n_stretches_max: 0,
        logits_tokens: 1.0,
        steering: SteeringTimes::NONE,
        asks: AskLimits::NONE,
    }
}

fn newcomer(limits: Limits, told: &Arc<Told>) -> Newcomer {
    let settings = SchedulerSettings::alone(limits.n_tokens_max);
    let (under_way, late) = (Vec::new(), Vec::new());
    let device = Device { limits, told: told.clone(), under_way, late, waits: false };
    let bounds = KvBounds::of(&device);
    Newcomer { id: MODEL, settings, bounds, backend: Box::new(device), archive: None }
}

fn run_settings(masks: MaskSource) -> RunSettings {
    RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Unbounded,
        masks,
    }
}

struct House {
    core: Core,
    told: Arc<Told>,
    inputs: Vec<EngineInput>,
    /// What the masked run and the plain one gave.
    masked: Vec<Token>,
    plain: Vec<Token>,
    failures: Vec<EngineError>,
}

fn tag(id: ContextId) -> Tag {
    Tag::new(id.number as u32, 0)
}

impl House {
    /// One run whose masks come from its caller, and one that draws by itself.
    fn new() -> Self {
        let (core, told) = (Core::default(), Arc::<Told>::default());
        let newcomer = newcomer(limits(8, 2), &told);
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
        let mut inputs = vec![EngineInput::Add(newcomer), EngineInput::Enter(CALLER, owner)];
        for (id, masks) in [(MASKED, MaskSource::Caller), (PLAIN, MaskSource::Sampler)] {
            inputs.push(EngineInput::Operation(Operation::Create { id, caller: CALLER }));
            let settings = run_settings(masks);
            let edit = Edit { appended: vec![1, 2, 3], ..Edit::default() };
            inputs.push(EngineInput::Operation(Operation::Run { id, edit, settings, tag: tag(id) }));
        }
        let (masked, plain, failures) = (Vec::new(), Vec::new(), Vec::new());
        Self { core, told, inputs, masked, plain, failures }
    }

    /// The mask of the masked run's next token, which allows one.
    fn send_mask(&mut self, token: Token) {
        let (position, mask) = (3 + self.masked.len(), Arc::new(only(token)));
        let mask = Operation::Mask { id: MASKED, tag: tag(MASKED), position, turn: 0, mask, expected: None };
        self.inputs.push(EngineInput::Operation(mask));
    }

    fn turn(&mut self) -> Next {
        let mut completions = Vec::new();
        let next =
            self.core.turn(Instant::now(), std::mem::take(&mut self.inputs).into_iter(), &mut completions);
        for Completion { tag: of, done, .. } in completions {
            match done {
                Done::Run { event: RunEvent::Token(Drawn { candidate, .. }), .. } if of == tag(MASKED) => {
                    self.masked.push(candidate.token);
                }
                Done::Run { event: RunEvent::Token(Drawn { candidate, .. }), .. } => {
                    self.plain.push(candidate.token)
                }
                Done::Run { event: RunEvent::Failed(error), .. } => self.failures.push(error),
                other => panic!("{other:?}"),
            }
        }
        next.expect("the engine lives")
    }

    /// Turns until the device would be waited for, or something to come in.
    fn run(&mut self) -> Next {
        loop {
            match self.turn() {
                Next::Turn => {}
                next => return next,
            }
        }
    }

    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.told.calls.lock().expect("nobody panicked"))
    }
}

#[test]
fn masks_in_time_cost_no_step_and_keep_two_under_way() {
    let mut house = House::new();
    house.send_mask(40);
    // The first token's mask was there when its row was planned; that of the second is late.
    assert_eq!(house.run(), Next::Device);
    assert_eq!(
        house.calls(),
        [Call::Submit { n_rows: 2, n_late: 0 }, Call::Submit { n_rows: 2, n_late: 1 }],
        "the step behind the first waits for a mask"
    );
    for n in 0..20 {
        // The step before is done; its token is what the mask is made from.
        house.core.wait();
        assert_eq!(house.run(), Next::InputOrLayers);
        assert_eq!(house.masked.len(), n + 1);
        assert_eq!(house.calls(), [Call::Collect], "nothing goes behind a step that waits");
        house.send_mask(41 + n as Token);
        assert_eq!(house.run(), Next::Device);
        assert_eq!(
            house.calls(),
            [Call::Supply { n_masks: 1 }, Call::Submit { n_rows: 2, n_late: 1 }],
            "the next step is there while the layers of this one run"
        );
    }
    let expected: Vec<Token> = (40..60).collect();
    assert_eq!(house.masked, expected);
    assert_eq!(house.plain, (3..23).collect::<Vec<Token>>(), "a token each step");
}

#[test]
fn a_mask_that_is_late_holds_up_nobody_beyond_the_layers() {
    let mut house = House::new();
    house.send_mask(40);
    assert_eq!(house.run(), Next::Device);
    house.core.wait();
    assert_eq!(house.run(), Next::InputOrLayers);
    house.calls();
    house.told.are_layers_done.store(true, Ordering::Relaxed);
    assert_eq!(house.run(), Next::Device);
    // The row sits out, and nothing follows it; the other goes on.
    assert_eq!(house.calls(), [Call::Supply { n_masks: 0 }, Call::Submit { n_rows: 1, n_late: 0 }]);
    for _ in 0..3 {
        house.core.wait();
        assert_eq!(house.run(), Next::Device);
        assert_eq!(house.calls(), [Call::Collect, Call::Submit { n_rows: 1, n_late: 0 }]);
    }
    assert_eq!(house.masked, [40]);
    house.send_mask(50);
    house.core.wait();
    assert_eq!(house.run(), Next::Device);
    assert_eq!(house.calls(), [Call::Collect, Call::Submit { n_rows: 2, n_late: 0 }], "with its mask");
    house.told.are_layers_done.store(false, Ordering::Relaxed);
    while house.masked.len() < 2 {
        house.core.wait();
        house.run();
    }
    assert_eq!(house.masked, [40, 50]);
}

#[test]
fn what_nobody_wants_any_more_is_not_waited_for() {
    let mut house = House::new();
    house.send_mask(40);
    assert_eq!(house.run(), Next::Device);
    house.core.wait();
    assert_eq!(house.run(), Next::InputOrLayers);
    house.calls();
    house.inputs.push(EngineInput::Operation(Operation::Release { id: MASKED, n_pulled: 1 }));
    assert_eq!(house.run(), Next::Device);
    assert_eq!(house.calls(), [Call::Supply { n_masks: 0 }, Call::Submit { n_rows: 1, n_late: 0 }]);
}

#[test]
fn a_step_that_fails_when_it_is_let_draw_ends_what_was_in_it() {
    let mut house = House::new();
    house.send_mask(40);
    assert_eq!(house.run(), Next::Device);
    house.core.wait();
    assert_eq!(house.run(), Next::InputOrLayers);
    house.told.fails_to_supply.store(true, Ordering::Relaxed);
    house.send_mask(41);
    assert_eq!(house.run(), Next::Input);
    assert_eq!(house.failures.len(), 2);
    assert!(house.failures.iter().all(|error| matches!(error, EngineError::Step(_))), "{:?}", house.failures);
}

#[test]
fn an_error_that_is_found_while_layers_are_waited_for_is_not_lost() {
    let mut house = House::new();
    house.send_mask(40);
    assert_eq!(house.run(), Next::Device);
    house.core.wait();
    assert_eq!(house.run(), Next::InputOrLayers);
    house.told.fails_in_layers.store(true, Ordering::Relaxed);
    assert!(house.core.is_held_up(), "the next turn has to see to it");
    assert_eq!(house.run(), Next::Input);
    assert_eq!(house.failures.len(), 2, "{:?}", house.failures);
}
