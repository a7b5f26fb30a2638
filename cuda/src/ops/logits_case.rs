//! What the tests of the kernels over logits share: rows and requests in, results out.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use trellis_engine::batch::Token;
use trellis_engine::sampling::Sampler;

use super::logits::{
    BiasPair, LogitsBuffers, LogitsKernels, NOWHERE, OutputRow, RowOutput, Stages, Wants, all_sources,
    scratch_bytes, sources,
};
use super::sample::ordered_biases;
use super::topn::Ranked;
use crate::ops::common::PAGE_LEN;
use crate::ops::common::check::assert_compiles;
use crate::ops::shares::PageEntry;
use crate::testing::TestGpu;
use crate::{Buffer, Plain};

/// Rows of logits, and what is asked of them.
pub(super) struct Case {
    pub(super) vocab_size: usize,
    pub(super) logits: Vec<Vec<f32>>, // [n_logits_rows][vocab_size]
    pub(super) requests: Vec<Request>,
}

/// One output row.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub(super) logits_row: usize,
    pub(super) sampler: Option<Sampler>,
    pub(super) position: u64,
    pub(super) history: Vec<Token>,
    pub(super) n_top: usize,
    /// Whether the list is of what the sampler makes of the row, in place of a draw.
    pub(super) is_ranked: bool,
    pub(super) score_tokens: Vec<Token>,
    pub(super) full: bool,
}

/// What came back for one request.
pub(super) struct Answer {
    pub(super) output: RowOutput,
    pub(super) top: Vec<Ranked>,
    pub(super) scores: Vec<f32>,
    pub(super) full: Vec<f32>,
    /// What its slot has taken.
    pub(super) drawn: Option<i32>,
}

/// The host's side of the buffers.
#[derive(Default)]
struct Host {
    rows: Vec<OutputRow>,
    tables: Vec<PageEntry>,
    page_tokens: Vec<[i32; PAGE_LEN]>,
    n_slots: usize,
    biases: Vec<BiasPair>,
    masks: Vec<u64>,
    score_tokens: Vec<i32>,
    n_top: usize,
}

const POISON: u8 = 0xc7;

impl Host {
    /// Puts tokens into pages, the last first, and behind the last one a token that is none; returns where the page table
    /// begins.
    fn push_history(&mut self, tokens: &[Token]) -> u32 {
        let start = self.tables.len();
        let pages = tokens.chunks(PAGE_LEN).map(|tokens| {
            let mut page = [0; PAGE_LEN];
            page.iter_mut().zip(tokens).for_each(|(place, &token)| *place = token as i32);
            page
        });
        for page in pages.rev() {
            self.tables.insert(start, PageEntry(self.page_tokens.len() as u32));
            self.page_tokens.push(page);
        }
        start as u32
    }

    fn push(&mut self, request: &Request) {
        let mut row = match &request.sampler {
            Some(sampler) => {
                let n_window = sampler.n_penalized(request.history.len());
                let biases = ordered_biases(&sampler.bias);
                let table_start = self.push_history(&request.history);
                self.n_slots += 1;
                let row = OutputRow {
                    table_start,
                    n_history: n_window as u32,
                    history_end: request.history.len() as u32,
                    drawn_slot: self.n_slots as u32 - 1,
                    bias_start: self.biases.len() as u32,
                    n_bias: biases.len() as u32,
                    mask_start: if sampler.mask.is_some() { self.masks.len() as u32 } else { NOWHERE },
                    ..OutputRow::draw(sampler, request.position)
                };
                self.biases.extend(biases);
                self.masks.extend(sampler.mask.iter().flat_map(|mask| mask.words()));
                row
            }
            None => OutputRow::default(),
        };
        if request.is_ranked {
            (row.wants, row.drawn_slot) = (Wants::NOTHING, NOWHERE);
        }
        row.logits_row = request.logits_row as u32;
        row.top_start = self.n_top as u32;
        row.n_top = request.n_top as u32;
        row.score_start = self.score_tokens.len() as u32;
        row.n_scores = request.score_tokens.len() as u32;
        for (wants, is_wanted) in [
            (Wants::TOP, request.n_top > 0 && !request.is_ranked),
            (Wants::RANKED, request.n_top > 0 && request.is_ranked),
            (Wants::SCORES, !request.score_tokens.is_empty()),
            (Wants::FULL, request.full),
        ] {
            row.wants = if is_wanted { row.wants.and(wants) } else { row.wants };
        }
        self.n_top += request.n_top;
        self.score_tokens.extend(request.score_tokens.iter().map(|&t| t as i32));
        self.rows.push(row);
    }
}

/// Uploads a case, runs everything over a bucket with room to spare, and brings the results back.
pub(super) fn run(gpu: &TestGpu, case: &Case) -> Vec<Answer> {
    answers(gpu, case, |launch| launch())
}

/// Microseconds of all launches over a case, as [`TestGpu::median_us`] has them.
pub(super) fn median_us(gpu: &TestGpu, case: &Case) -> f32 {
    let mut time = 0.0;
    answers(gpu, case, |launch| time = gpu.median_us(launch));
    time
}

fn answers(gpu: &TestGpu, case: &Case, launch: impl FnOnce(&mut dyn FnMut())) -> Vec<Answer> {
    let kernels = kernels(gpu);
    let mut host = Host::default();
    case.requests.iter().for_each(|request| host.push(request));
    let n_rows = host.rows.len();
    let bucket = n_rows + 3;
    host.rows
        .resize(bucket, OutputRow { wants: Wants::SAMPLE, logits_row: u32::MAX, ..OutputRow::default() });
    let logits: Vec<f32> = case.logits.concat();

    let poisoned = |n_bytes: usize| {
        let buffer = gpu.gpu.allocate("a test", n_bytes).expect("memory");
        buffer.slice().fill(&gpu.stream, POISON).expect("filled");
        buffer
    };
    let (tables, page_tokens) = (upload(gpu, &host.tables), upload(gpu, &host.page_tokens.concat()));
    let (slots, biases) = (upload(gpu, &vec![-1i32; host.n_slots]), upload(gpu, &host.biases));
    let (masks, score_tokens) = (upload(gpu, &host.masks), upload(gpu, &host.score_tokens));
    let (logits, rows) = (upload(gpu, &logits), upload(gpu, &host.rows));
    let n_rows_used = upload(gpu, &[n_rows as u32]);
    let scratch = poisoned(scratch_bytes(bucket, case.vocab_size));
    let outputs = poisoned(bucket * size_of::<RowOutput>());
    let (top, scores) = (poisoned(host.n_top * size_of::<Ranked>()), poisoned(host.score_tokens.len() * 4));
    let buffers = LogitsBuffers {
        logits: logits.slice(),
        rows: rows.slice(),
        n_rows: n_rows_used.slice(),
        tables: tables.slice(),
        page_tokens: page_tokens.slice(),
        slots: slots.slice(),
        biases: biases.slice(),
        masks: masks.slice(),
        score_tokens: score_tokens.slice(),
        scratch: scratch.slice(),
        outputs: outputs.slice(),
        top: top.slice(),
        scores: scores.slice(),
        // No row here is a program's.
        program_outputs: outputs.slice(),
    };
    let stages = Stages::of(&host.rows[..n_rows]);
    launch(&mut || {
        // SAFETY: `Host` put every place inside its buffer; the rows past `n_rows` are not read; the downloads below
        // wait for the stream.
        unsafe { kernels.run(&gpu.stream, &buffers, bucket, case.vocab_size, stages, None) }
            .expect("launched");
    });

    let outputs: Vec<RowOutput> = download(gpu, &outputs, bucket);
    assert!(
        outputs[n_rows..].iter().all(|o| o.token == u32::from_ne_bytes([POISON; 4])),
        "rows past the end"
    );
    let top: Vec<Ranked> = download(gpu, &top, host.n_top);
    let scores: Vec<f32> = download(gpu, &scores, host.score_tokens.len());
    let slots: Vec<i32> = download(gpu, &slots, host.n_slots);
    let logits: Vec<f32> = download(gpu, &logits, case.logits.len() * case.vocab_size);
    let part = |start: u32, n: u32| start as usize..(start + n) as usize;
    let answer = |(row, output): (&OutputRow, &RowOutput)| Answer {
        output: *output,
        top: top[part(row.top_start, row.n_top)].to_vec(),
        scores: scores[part(row.score_start, row.n_scores)].to_vec(),
        full: logits[row.logits_row as usize * case.vocab_size..][..case.vocab_size].to_vec(),
        drawn: (row.drawn_slot != NOWHERE).then(|| slots[row.drawn_slot as usize]),
    };
    host.rows[..n_rows].iter().zip(&outputs).map(answer).collect()
}

/// Compiled once for all tests, as that takes longer than most of them.
fn kernels(gpu: &TestGpu) -> MutexGuard<'static, LogitsKernels> {
    static KERNELS: OnceLock<Mutex<LogitsKernels>> = OnceLock::new();
    let load = || {
        let modules = sources().map(|source| Ok(gpu.module(source)));
        let kernels = LogitsKernels::new(&gpu.gpu, &gpu.compiler(), modules).expect("the kernels");
        kernels.load(Stages::all()).expect("the others");
        Mutex::new(kernels)
    };
    KERNELS.get_or_init(load).lock().unwrap_or_else(PoisonError::into_inner)
}

fn upload<T: Plain>(gpu: &TestGpu, values: &[T]) -> Buffer {
    let buffer = gpu.gpu.allocate("a test", size_of_val(values)).expect("memory");
    buffer.slice().upload(&gpu.stream, values).expect("uploaded");
    buffer
}

fn download<T: Plain + Default>(gpu: &TestGpu, buffer: &Buffer, n: usize) -> Vec<T> {
    let mut values = vec![T::default(); n];
    buffer.slice().download(&gpu.stream, &mut values).expect("downloaded");
    values
}

#[test]
fn sources_compile_for_every_architecture() {
    all_sources().for_each(assert_compiles);
}
