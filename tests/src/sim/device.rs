//! A device that computes in virtual time. What it answers comes from the pages that it was told to read, so that a mistake
//! with pages, copies or slots gives other tokens than the naive model does.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use trellis_engine::backend::{
    Backend, BackendError, Collected, Damage, Limits, OldestStep, PAGE_LEN, WeightsInfo,
};
use trellis_engine::batch::{
    Batch, CellMove, HostPageId, Input, LateMask, Output, OutputKind, PageId, Row, SlotId, Token,
};
use trellis_engine::model::Dtype;

use super::draws::Draws;
use super::mutation::Mutation;
use super::naive;
use super::notes::{Fault, Notes};
use super::scene::DeviceScene;

/// What is in memory that holds nothing.
const GARBAGE: u64 = u64::MAX;

/// When the steps under way are done, of all models in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Arc<Mutex<VecDeque<Instant>>>);

impl Clock {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the oldest step is done.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.lock().front().copied()
    }

    /// A step that takes so long behind those under way.
    fn begin(&self, takes: Duration) {
        let mut steps = self.lock();
        let from = steps.back().copied().unwrap_or_else(Instant::now).max(Instant::now());
        steps.push_back(from + takes);
    }

    fn end(&self) {
        self.lock().pop_front();
    }
}

type Page = [u64; PAGE_LEN];

/// One model on the device.
pub(super) struct Device {
    name: String,
    salt: u64,
    limits: Limits,
    n_pages: usize,
    pages: Vec<Page>,
    host_pages: Vec<Page>,
    /// The token that was drawn last for each slot.
    drawn: BTreeMap<SlotId, Token>,
    /// What was made of the last token that was asked about, for each slot.
    states: BTreeMap<SlotId, u64>,
    under_way: VecDeque<(Result<Vec<Output>, BackendError>, Duration)>,
    clock: Clock,
    scene: DeviceScene,
    draws: Draws,
    notes: Arc<Notes>,
}

impl Device {
    pub(super) fn new(
        name: &str,
        salt: u64,
        scene: DeviceScene,
        clock: Clock,
        draws: Draws,
        notes: Arc<Notes>,
    ) -> Self {
        let limits = scene.limits();
        Self {
            name: name.to_owned(),
            salt,
            n_pages: scene.n_pages,
            pages: vec![[GARBAGE; PAGE_LEN]; limits.n_pages],
            host_pages: vec![[GARBAGE; PAGE_LEN]; limits.n_host_pages],
            limits,
            drawn: BTreeMap::new(),
            states: BTreeMap::new(),
            under_way: VecDeque::new(),
            clock,
            scene,
            draws,
            notes,
        }
    }

    /// An error, if this call is to fail.
    fn fault(&mut self, call: &'static str) -> Result<(), BackendError> {
        if self.draws.happens(self.scene.per_mille_lost) {
            self.notes.fault(Fault::Device);
            return Err(self.error(call, Damage::Device));
        }
        if !self.draws.happens(self.scene.per_mille_failed) {
            return Ok(());
        }
        if self.draws.happens(500) {
            self.notes.fault(Fault::Memory);
            return Err(BackendError::OutOfMemory {
                device: self.name.clone(),
                needed_bytes: 2,
                free_bytes: 1,
            });
        }
        self.notes.fault(Fault::Step);
        Err(self.error(call, Damage::Call))
    }

    fn error(&self, call: &'static str, damage: Damage) -> BackendError {
        BackendError::Device { device: self.name.clone(), call, reason: "injected".to_owned(), damage }
    }

    fn makes(&mut self, mutation: Mutation, per_mille: usize) -> bool {
        self.notes.makes(mutation) && self.draws.happens(per_mille)
    }

    fn cell(&self, row: &Row<'_>, position: usize) -> u64 {
        self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN]
    }

    fn write(&mut self, row: &Row<'_>) {
        if row.start == row.end() {
            return;
        }
        let mut tokens = row.tokens.copy_of(row.start..row.tokens.len());
        if let Input::Drawn(slot) = row.input {
            tokens.push(self.drawn.get(&slot).copied().unwrap_or(0));
        }
        let mut before = if row.start == 0 { self.salt } else { self.cell(row, row.start - 1) };
        for (idx, token) in tokens.into_iter().enumerate() {
            before = naive::kv(before, token);
            let position = row.start + idx;
            self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN] = before;
        }
    }

    fn answer(&mut self, row: &Row<'_>, outputs: &mut Vec<Output>) {
        for request in &row.outputs {
            let state = match row.start == row.end() {
                true => self.states.get(&row.slot).copied().unwrap_or(GARBAGE),
                false => naive::state((0..=request.position).map(|position| self.cell(row, position))),
            };
            if request.position + 1 == row.end() {
                self.states.insert(row.slot, state);
            }
            let output = self.output(row.slot, state, &request.kind);
            outputs.push(output);
        }
    }

    fn output(&mut self, slot: SlotId, state: u64, kind: &OutputKind<'_>) -> Output {
        match kind {
            OutputKind::Sample(sampler) => {
                let mut candidate = naive::drawn(state, sampler.seed);
                if self.makes(Mutation::WrongToken, 3) {
                    candidate.token = (candidate.token + 1) % naive::VOCAB as Token;
                }
                self.drawn.insert(slot, candidate.token);
                Output::Sampled(candidate)
            }
            OutputKind::Top { n } => {
                Output::Top { candidates: naive::top(state, *n), entropy: naive::score(state, 0) }
            }
            OutputKind::Scores(tokens) => {
                Output::Scores(tokens.iter().map(|&token| naive::score(state, token)).collect())
            }
            other => panic!("no script asks for {other:?}"),
        }
    }

    fn note_moves(&self, which: &str, moves: impl Iterator<Item = (u32, u32)>) {
        let moves: Vec<_> = moves.collect();
        self.notes.event(format_args!("{}: pages moved {which}: {moves:?}", self.name));
    }

    /// Makes what a failed step would have written unknown.
    fn spoil(&mut self, batch: &Batch<'_>) {
        for row in batch.rows.iter().filter(|row| row.start < row.end()) {
            let end = row.pages.len() * PAGE_LEN;
            for position in row.start..end {
                self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN] = GARBAGE;
            }
            self.drawn.remove(&row.slot);
            self.states.remove(&row.slot);
        }
        for copy in batch.copies {
            self.pages[copy.dst.0 as usize] = [GARBAGE; PAGE_LEN];
        }
    }
}

/// Numbers of pages.
struct Pages<'a>(&'a [PageId]);

impl fmt::Debug for Pages<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|page| page.0)).finish()
    }
}

impl Backend for Device {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn weights(&self) -> WeightsInfo {
        WeightsInfo { dtype: Dtype::F32, n_bytes: 1 << 20 }
    }

    fn device(&self) -> &str {
        &self.name
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        if let Err(error) = self.fault("submit") {
            let slots: Vec<_> = batch.rows.iter().map(|row| (row.slot.0, row.start..row.end())).collect();
            self.notes.event(format_args!("{}: a step of {slots:?} cannot be submitted", self.name));
            self.spoil(batch);
            if !self.makes(Mutation::UnsaidError, 1000) {
                return Err(error);
            }
        }
        for copy in batch.copies {
            if !self.makes(Mutation::ForgottenCopy, 1000) {
                self.pages[copy.dst.0 as usize] = self.pages[copy.src.0 as usize];
            }
        }
        // All rows are written before any is answered: a page that two of them have in error would be seen.
        batch.rows.iter().for_each(|row| self.write(row));
        let mut outputs = Vec::new();
        batch.rows.iter().for_each(|row| self.answer(row, &mut outputs));
        let outcome = match self.fault("collect") {
            Ok(()) => Ok(outputs),
            Err(error) => {
                self.spoil(batch);
                Err(error)
            }
        };
        let n_tokens: usize = batch.rows.iter().map(|row| row.end() - row.start).sum();
        let mut takes = self.scene.step_time + self.scene.token_time * n_tokens as u32;
        if self.draws.happens(self.scene.per_mille_stalled) {
            self.notes.fault(Fault::Stall);
            takes *= 20;
        }
        if self.makes(Mutation::LostStep, 10) {
            takes = Duration::from_secs(1 << 20);
        }
        let rows = batch.rows.iter().map(|row| (row.slot.0, row.start..row.end(), Pages(row.pages)));
        let rows: Vec<_> = rows.collect();
        let copies: Vec<_> = batch.copies.iter().map(|copy| (copy.src.0, copy.dst.0)).collect();
        let ends = outcome.as_ref().err().map(|_| "fails").unwrap_or("goes well");
        self.notes
            .event(format_args!("{}: step of {rows:?}, copies {copies:?}, {takes:?}, {ends}", self.name));
        self.clock.begin(takes);
        self.under_way.push_back((outcome, takes));
        Ok(())
    }

    fn supply(&mut self, _: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        panic!("no script draws under late masks")
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        panic!("no script draws under late masks")
    }

    fn oldest_step(&mut self) -> OldestStep {
        match self.clock.oldest() {
            _ if self.scene.is_by_caller => OldestStep::ByCaller,
            Some(done) if done > Instant::now() => OldestStep::OnDevice,
            _ => OldestStep::Done,
        }
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        self.clock.end();
        let (outputs, elapsed) = self.under_way.pop_front().expect("a step is under way");
        Ok(Collected { outputs: outputs?, elapsed })
    }

    fn n_pages(&self) -> usize {
        self.n_pages
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        if n_pages > self.n_pages {
            self.fault("resize")?;
        }
        self.notes.event(format_args!("{}: {n_pages} pages after {}", self.name, self.n_pages));
        self.pages[n_pages..].fill([GARBAGE; PAGE_LEN]);
        self.n_pages = n_pages;
        Ok(())
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        let fault = self.fault("move_pages");
        self.note_moves("within", moves.iter().map(|(from, to)| (from.0, to.0)));
        for (from, to) in moves {
            let page = std::mem::replace(&mut self.pages[from.0 as usize], [GARBAGE; PAGE_LEN]);
            self.pages[to.0 as usize] = if fault.is_ok() { page } else { [GARBAGE; PAGE_LEN] };
            if fault.is_err() {
                self.pages[from.0 as usize] = page;
            }
        }
        fault
    }

    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError> {
        self.notes.event(format_args!("{}: {} cells moved", self.name, moves.len()));
        for CellMove { src, dst } in moves {
            self.pages[dst.page.0 as usize][dst.idx] = self.pages[src.page.0 as usize][src.idx];
        }
        Ok(())
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        let fault = self.fault("swap_out");
        self.note_moves("out", moves.iter().map(|(page, host)| (page.0, host.0)));
        for (page, host) in moves {
            let page = self.pages[page.0 as usize];
            self.host_pages[host.0 as usize] = if fault.is_ok() { page } else { [GARBAGE; PAGE_LEN] };
        }
        fault
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        let is_lost = self.makes(Mutation::LostSwap, 500);
        let fault = self.fault("swap_in");
        self.note_moves("in", moves.iter().map(|(host, page)| (host.0, page.0)));
        for (host, page) in moves {
            let stored = self.host_pages[host.0 as usize];
            self.pages[page.0 as usize] =
                if fault.is_ok() && !is_lost { stored } else { [GARBAGE; PAGE_LEN] };
        }
        fault
    }
}
