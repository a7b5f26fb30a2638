//! Logit programs on the CPU and on a device, for tests and fuzzers: rows with all that programs look at, and both answers.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use trellis_engine::batch::{OutputFault, Token};
use trellis_engine::sampling::program::{DrawInputs, Machine, Outcome, Program, ProgramState};
use trellis_engine::sampling::{Bias, TokenMask};

use super::common::PAGE_LEN;
use super::logits::{BiasPair, NOWHERE, OutputRow, Wants};
use super::program::{
    KEPT_ROW, ProgramBias, ProgramBuffers, ProgramKernel, ProgramOutput, ProgramRow, planes_bytes, sources,
};
use super::program_code::Entry;
use super::program_plan::{EncodedProgram, ProgramKind};
use super::program_single::meetings_bytes;
use super::shares::PageEntry;
use crate::bare::{TestGpu, download, poisoned, upload};
use crate::{Buffer, Plain};

/// A row of logits with a program and all that it may look at.
#[derive(Debug)]
pub(crate) struct CaseRow {
    pub(crate) program: Program,
    pub(crate) plan: EncodedProgram,
    pub(crate) logits: Vec<f32>,       // [vocab_size]
    pub(crate) members: Vec<Vec<f32>>, // [vocab_size] each
    pub(crate) history: Vec<Token>,
    pub(crate) position: u64,
    pub(crate) n_drawn: u32,
    pub(crate) seed: u64,
    pub(crate) parameters: Vec<f32>,
    pub(crate) state: ProgramState,
    pub(crate) masks: Vec<Arc<TokenMask>>,
    pub(crate) biases: Vec<Arc<Bias>>,
    pub(crate) constraint: Option<Arc<TokenMask>>,
}

impl CaseRow {
    /// The CPU's answer.
    pub(crate) fn expected(&self, machine: &mut Machine) -> Result<Outcome<Token>, OutputFault> {
        let members: Vec<&[f32]> = self.members.iter().map(Vec::as_slice).collect();
        let place = DrawInputs {
            logits: &self.logits,
            members: &members,
            history: &self.history,
            n_tokens: self.history.len(),
            position: self.position,
            n_drawn: self.n_drawn,
            seed: self.seed,
            parameters: &self.parameters,
            state: self.state,
            masks: &self.masks,
            biases: &self.biases,
            constraint: self.constraint.as_deref(),
            within: None,
        };
        machine.draw(&self.program, &place)
    }
}

/// The host's side of the buffers.
#[derive(Default)]
pub(super) struct Host {
    pub(super) programs: Vec<Entry>,
    pub(super) rows: Vec<ProgramRow>,
    pub(super) chains: Vec<u32>,
    pub(super) output_rows: Vec<OutputRow>,
    pub(super) logits: Vec<f32>,
    /// Every other member is one of these.
    pub(super) kept_rows: Vec<f32>,
    pub(super) members: Vec<u32>,
    pub(super) tables: Vec<PageEntry>,
    pub(super) page_tokens: Vec<[i32; PAGE_LEN]>,
    pub(super) parameters: Vec<f32>,
    pub(super) mask_starts: Vec<u32>,
    pub(super) masks: Vec<u64>,
    pub(super) bias_places: Vec<ProgramBias>,
    pub(super) dense_biases: Vec<f32>,
    pub(super) bias_pairs: Vec<BiasPair>,
    pub(super) states: Vec<f32>,
}

impl Host {
    /// The buffers of these rows, in chains of so many. The rows of a chain share their planes.
    pub(super) fn of(rows: &[&CaseRow], chain_len: usize) -> Self {
        let mut host = Self::default();
        rows.iter().for_each(|row| host.push(row));
        for (chain_idx, chain) in host.rows.chunks_mut(chain_len).enumerate() {
            let first = chain_idx * chain_len;
            host.chains.push(first as u32);
            for (idx, row) in chain.iter_mut().enumerate() {
                row.planes = chain_idx as u32;
                row.next = (first + idx + 1) as u32;
            }
            chain.last_mut().expect("a chain has rows").next = NOWHERE;
        }
        host
    }

    /// A plan that is there is not put there again.
    fn push_program(&mut self, entries: &[Entry]) -> u32 {
        let n = self.programs.len();
        let known = self.programs.windows(entries.len()).position(|known| known == entries);
        known.unwrap_or_else(|| {
            self.programs.extend_from_slice(entries);
            n
        }) as u32
    }

    fn push_logits(&mut self, logits: &[f32]) -> u32 {
        self.logits.extend_from_slice(logits);
        (self.logits.len() / logits.len() - 1) as u32
    }

    /// Puts tokens into pages, the last first; returns where the page table begins.
    fn push_history(&mut self, tokens: &[Token]) -> u32 {
        let start = self.tables.len();
        let pages = tokens.chunks(PAGE_LEN).map(|tokens| {
            let mut page = [i32::MIN; PAGE_LEN];
            page.iter_mut().zip(tokens).for_each(|(place, &token)| *place = token as i32);
            page
        });
        for page in pages.rev() {
            self.tables.insert(start, PageEntry(self.page_tokens.len() as u32));
            self.page_tokens.push(page);
        }
        start as u32
    }

    fn push_mask(&mut self, mask: &TokenMask) -> u32 {
        self.masks.extend_from_slice(mask.words());
        (self.masks.len() - mask.words().len()) as u32
    }

    fn push_bias(&mut self, bias: &Bias) {
        let place = match bias {
            Bias::Dense(values) => {
                let start = self.dense_biases.len().next_multiple_of(4);
                self.dense_biases.resize(start, f32::NAN);
                self.dense_biases.extend_from_slice(values);
                ProgramBias { start: start as u32, n_pairs: NOWHERE }
            }
            Bias::Sparse(pairs) => {
                let start = self.bias_pairs.len() as u32;
                self.bias_pairs.extend(pairs.iter().map(|&(token, value)| BiasPair { token, value }));
                ProgramBias { start, n_pairs: pairs.len() as u32 }
            }
        };
        self.bias_places.push(place);
    }

    fn push(&mut self, row: &CaseRow) {
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let state_in = self.states.len() as u32;
        self.states.extend(row.state);
        self.states.extend([f32::NAN; 8]);
        let logits_row = self.push_logits(&row.logits);
        let made = ProgramRow {
            program: self.push_program(row.plan.entries()),
            output_row: self.output_rows.len() as u32,
            next: NOWHERE,
            planes: 0,
            members_start: self.members.len() as u32,
            n_members: row.members.len() as u32,
            seed: halves(row.seed),
            position: halves(row.position),
            n_tokens: row.history.len() as u32,
            n_drawn: row.n_drawn,
            table_start: self.push_history(&row.history),
            n_history: row.history.len() as u32,
            parameters_start: self.parameters.len() as u32,
            n_parameters: row.parameters.len() as u32,
            masks_start: self.mask_starts.len() as u32,
            n_masks: row.masks.len() as u32,
            biases_start: self.bias_places.len() as u32,
            n_biases: row.biases.len() as u32,
            state_in,
            state_out: state_in + 8,
        };
        let output_row = OutputRow {
            wants: Wants::PROGRAM,
            logits_row,
            mask_start: row.constraint.as_ref().map_or(NOWHERE, |mask| self.push_mask(mask)),
            ..OutputRow::default()
        };
        self.output_rows.push(output_row);
        for member in &row.members {
            let place = match self.members.len() % 2 {
                0 => self.push_logits(member),
                _ => {
                    self.kept_rows.extend_from_slice(member);
                    KEPT_ROW | (self.kept_rows.len() / member.len() - 1) as u32
                }
            };
            self.members.push(place);
        }
        self.parameters.extend_from_slice(&row.parameters);
        for mask in &row.masks {
            let start = self.push_mask(mask);
            self.mask_starts.push(start);
        }
        row.biases.iter().for_each(|bias| self.push_bias(bias));
        self.rows.push(made);
    }
}

/// A launch's memory.
pub(super) struct Launched {
    held: Vec<Buffer>,
    pub(super) buffers: ProgramBuffers,
    /// Chains of the bucket.
    pub(super) bucket: usize,
    /// Rows, and one past the end.
    pub(super) n_rows: usize,
    pub(super) kind: ProgramKind,
}

impl Launched {
    /// Uploads rows into a bucket with room for one more.
    pub(super) fn new(gpu: &TestGpu, host: &Host, vocab_size: usize, kind: ProgramKind) -> Self {
        let (bucket, n_rows) = (host.chains.len() + 1, host.rows.len() + 1);
        let mut rows = host.rows.clone();
        rows.push(ProgramRow { program: u32::MAX, ..rows[0] });
        let past = [&host.chains[..], &[host.rows.len() as u32]].concat();
        let planes = poisoned(gpu, planes_bytes(bucket, vocab_size));
        let meetings = poisoned(gpu, meetings_bytes(bucket));
        for zeros in [&planes, &meetings] {
            zeros.slice().fill(&gpu.stream, 0).expect("filled");
        }
        let held = vec![
            put(gpu, &host.programs),
            put(gpu, &rows),
            put(gpu, &past),
            put(gpu, &[host.chains.len() as u32]),
            put(gpu, &host.output_rows),
            put(gpu, &host.logits),
            put(gpu, &host.members),
            put(gpu, &host.tables),
            put(gpu, &host.page_tokens.concat()),
            put(gpu, &host.parameters),
            put(gpu, &host.mask_starts),
            put(gpu, &host.masks),
            put(gpu, &host.bias_places),
            put(gpu, &host.dense_biases),
            put(gpu, &host.bias_pairs),
            put(gpu, &host.states),
            planes,
            put(gpu, &host.kept_rows),
            poisoned(gpu, n_rows * size_of::<ProgramOutput>()),
            meetings,
        ];
        let slice = |idx: usize| held[idx].slice();
        let buffers = ProgramBuffers {
            programs: slice(0),
            rows: slice(1),
            chains: slice(2),
            n_chains: slice(3),
            output_rows: slice(4),
            logits: slice(5),
            kept_rows: slice(17),
            members: slice(6),
            tables: slice(7),
            page_tokens: slice(8),
            parameters: slice(9),
            mask_starts: slice(10),
            masks: slice(11),
            bias_places: slice(12),
            dense_biases: slice(13),
            bias_pairs: slice(14),
            states: slice(15),
            planes: slice(16),
            outputs: slice(18),
            meetings: slice(19),
        };
        Self { held, buffers, bucket, n_rows, kind }
    }

    /// Runs the programs once.
    pub(super) fn run(&self, gpu: &TestGpu, kernel: &ProgramKernel, vocab_size: usize) {
        // SAFETY: `Host` put every place inside its buffer, `self` holds them, and the row past the end is not read.
        unsafe { kernel.run(&gpu.stream, &self.buffers, self.bucket, vocab_size, self.kind) }
            .expect("launched");
    }
}

/// An upload that is never empty.
fn put<T: Plain>(gpu: &TestGpu, values: &[T]) -> Buffer {
    match values {
        [] => poisoned(gpu, 16),
        _ => upload(gpu, values),
    }
}

/// Compiled once for all rows, as that takes longer than most tests.
pub(super) fn kernel(gpu: &TestGpu) -> MutexGuard<'static, ProgramKernel> {
    static KERNEL: OnceLock<Mutex<ProgramKernel>> = OnceLock::new();
    let load = || {
        let sources = sources(gpu.gpu.compute_capability());
        let modules: Vec<_> = sources.into_iter().map(|source| gpu.module(source)).collect();
        Mutex::new(ProgramKernel::new(&modules, &gpu.gpu).expect("the kernels"))
    };
    KERNEL.get_or_init(load).lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the device makes of the rows in chains of so many, and the states that lie where they go; the planes are zeros again.
pub(crate) fn run(
    gpu: &TestGpu,
    rows: &[&CaseRow],
    chain_len: usize,
    vocab_size: usize,
) -> Vec<(ProgramOutput, [f32; 8])> {
    run_as(gpu, rows, chain_len, vocab_size, ProgramKind::Any)
}

/// The same, by the kernels for programs of a kind; each row is a chain.
pub(crate) fn run_small(
    gpu: &TestGpu,
    rows: &[&CaseRow],
    vocab_size: usize,
    kind: ProgramKind,
) -> Vec<(ProgramOutput, [f32; 8])> {
    assert!(rows.iter().all(|row| row.plan.kind() <= kind), "all are of that kind");
    run_as(gpu, rows, 1, vocab_size, kind)
}

fn run_as(
    gpu: &TestGpu,
    rows: &[&CaseRow],
    chain_len: usize,
    vocab_size: usize,
    kind: ProgramKind,
) -> Vec<(ProgramOutput, [f32; 8])> {
    let host = Host::of(rows, chain_len);
    let kernel = kernel(gpu);
    let launched = Launched::new(gpu, &host, vocab_size, kind);
    launched.run(gpu, &kernel, vocab_size);
    let buffers = &launched.buffers;
    let outputs = download(gpu, buffers.outputs, launched.n_rows, ProgramOutput::default());
    let past = outputs.last().expect("a row past the end");
    assert_eq!(past.token, u32::MAX, "a row past the end is written");
    let planes = download(gpu, buffers.planes, buffers.planes.n_bytes / 4, 1u32);
    let meetings = download(gpu, buffers.meetings, buffers.meetings.n_bytes / 4, 1u32);
    assert!(planes.iter().chain(&meetings).all(|&bits| bits == 0), "what was zeros is left as it was found");
    let states = download(gpu, buffers.states, host.states.len(), 0f32);
    drop(launched.held);
    let state_out = |idx: usize| states[16 * idx + 8..][..8].try_into().expect("eight numbers");
    (0..rows.len()).map(|idx| (outputs[idx], state_out(idx))).collect()
}

/// How an answer differs from the CPU's, if it does.
pub(crate) fn difference(
    expected: &Result<Outcome<Token>, OutputFault>,
    (output, state_out): &(ProgramOutput, [f32; 8]),
) -> Option<String> {
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let is_equal = match (expected, output.fault()) {
        (Ok(outcome), None) => {
            outcome.end == output.token
                && bits(&outcome.reports) == bits(&output.reports)
                && bits(&outcome.state) == bits(&output.state)
                && bits(&outcome.state) == bits(state_out)
        }
        (Err(fault), Some(found)) => {
            *fault == found && output.token == 0 && state_out.iter().all(|x| x.is_nan())
        }
        _ => false,
    };
    (!is_equal).then(|| format!("expected {expected:?}, got {output:?}, state {state_out:?}"))
}
