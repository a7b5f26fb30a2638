//! Cases for the tests of attention, and its reference in f64.

use std::collections::HashMap;
use std::time::Instant;

use trellis_engine::N_STRETCHES_MAX;
use trellis_engine::batch::{Evicted, Stretch};

use super::attention::{
    Attention, AttentionInputs, AttentionShape, AttentionWork, Cuttings, DeviceShares, Form, KvLayer,
    PAGE_LEN, Workspace,
};
use super::attention_holes::{AttentionHoles, Holes, HolesInputs};
use super::attention_plan::AttentionPlan;
use super::common::Dtype;
use super::common::check::{
    DeviceCount, download, download_as, poisoned, rounded, rounding, upload, upload_as,
};
use super::shares::{Cut, PageEntry, RowSpan, Share};
use crate::testing::{Random, TestGpu};
use crate::{Buffer, Module, Slice};

/// A shape with the usual scale.
pub(crate) fn shape(dtype: Dtype, n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { dtype, n_heads, n_kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

/// Heads, KV heads and length of a head: groups of one to twelve queries, and lengths from the least to the largest.
pub(crate) const HEADS: [(usize, usize, usize); 7] =
    [(4, 4, 64), (8, 2, 128), (8, 1, 64), (6, 2, 80), (12, 1, 128), (5, 1, 256), (2, 1, 8)];

/// A device, and the kernels of each shape compiled once.
pub(crate) struct Modules {
    pub(crate) test: TestGpu,
    loaded: HashMap<String, Attention>,
}

impl Modules {
    pub(crate) fn new(test: TestGpu) -> Self {
        Self { test, loaded: HashMap::new() }
    }

    pub(crate) fn get(&mut self, shape: AttentionShape) -> Attention {
        let test = &self.test;
        let load = || {
            let modules: Vec<Module> =
                Attention::sources(&shape).into_iter().map(|source| test.module(source)).collect();
            let holed = AttentionHoles::new(&test.gpu, &test.compiler(), shape);
            Attention::new(&modules, holed, shape).expect("the kernels")
        };
        self.loaded.entry(format!("{shape:?}")).or_insert_with(load).clone()
    }
}

const N_LAYERS: usize = 2;
const LAYER_IDX: usize = 1;
/// What `poisoned` fills with.
const POISON: u8 = 0xff;
/// Entries before each page table.
const SPARE: usize = 3;
/// Pairs of token and head that are compared in a case with more.
const N_COMPARED: usize = 200;

/// Rows with contexts in shuffled pages, whose page tables lie in random order. What no query may read is NaN: other
/// layers, positions past the end of a context or before every window, and page 0, to which entries lead that no query
/// attends to.
pub(crate) struct Case {
    shape: AttentionShape,
    window: Option<usize>,
    spans: Vec<RowSpan>,
    q: Vec<f32>,  // [n_tokens + 1, n_heads, head_dim]
    kv: Vec<f32>, // [n_pages, layers, 2, n_kv_heads, PAGE_LEN, head_dim]
    /// Page tables; behind them, where tokens were evicted, what describes the holes of rows.
    entries: Vec<PageEntry>,
    /// Of each row, where tokens were evicted from all of them.
    holes: Vec<RowHoles>,
    /// Where they are described, for each token.
    hole_places: Vec<u32>,
    inv_freq: Vec<f32>, // [head_dim / 2]
}

/// Which cells of a context have a token, and how their keys were rotated.
struct RowHoles {
    n_whole: usize,
    live: Vec<u16>,
    open: usize,
    stretches: Vec<Stretch>,
}

impl RowHoles {
    /// Of a row that begins in this cell.
    fn random(cell: usize, random: &mut Random) -> Self {
        let open = random.below(cell + 1);
        // Pages that are full, that have some cells left, that have one.
        let n_pages = open.div_ceil(PAGE_LEN);
        let n_whole = random.below(2) * random.below(n_pages + 1);
        let live = (n_whole..n_pages).map(|_| match random.below(4) {
            0 => u16::MAX,
            1 => 1 << random.below(PAGE_LEN),
            _ => random.next() as u16,
        });
        let live = live.collect();
        let n_stretches = 1 + random.below(N_STRETCHES_MAX);
        let mut firsts: Vec<usize> = (0..n_stretches).map(|_| random.below(cell + 1)).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let n_stretches = firsts.len();
        let stretches = firsts.into_iter().enumerate().map(|(idx, first_cell)| Stretch {
            first_cell,
            extra_rotation: if idx + 1 == n_stretches { 0 } else { random.below(3000) as i64 - 2000 },
        });
        Self { n_whole, live, open, stretches: stretches.collect() }
    }

    fn evicted(&self, cell: usize) -> Evicted<'_> {
        let Self { n_whole, live, open, stretches } = self;
        let (n_whole, open) = (Some(*n_whole), *open);
        Evicted { n_evicted: 0, rotation: 0, cell, n_whole, live, open, stretches, packs: &[] }
    }

    fn sees(&self, cell: usize) -> bool {
        self.evicted(cell).seen_in(cell / PAGE_LEN, cell) >> (cell % PAGE_LEN) & 1 == 1
    }

    fn turn(&self, cell: usize) -> i64 {
        let stretch = self.stretches.iter().rev().find(|stretch| stretch.first_cell <= cell);
        stretch.unwrap_or(&self.stretches[0]).extra_rotation
    }
}

/// A case on the device, with one token, a worker and a cut tile past the counts, which no launch may touch.
pub(crate) struct Uploaded {
    shape: AttentionShape,
    window: Option<usize>,
    n_tokens: usize,
    q: Buffer,
    out: Buffer,
    kv: Buffer,
    entries: Buffer,
    hole_places: Buffer,
    inv_freq: Buffer,
    lists: [Option<UploadedList>; Form::ALL.len()],
    arrivals: Buffer,
    partial: Buffer,
}

struct UploadedList {
    shares: Buffer,
    workers: DeviceCount,
    cut_list: Buffer,
    cuts: DeviceCount,
}

/// The tokens of rows, their page tables in random order with something before each.
fn spans(rows: &[(usize, usize)], random: &mut Random) -> Vec<RowSpan> {
    let mut token = 0;
    let mut spans = Vec::new();
    for &(n_tokens, position) in rows {
        spans.push(RowSpan { token, n_tokens, position, entries: 0, n_pages_alike: 0, has_holes: false });
        token += n_tokens;
    }
    let mut order: Vec<usize> = (0..spans.len()).collect();
    shuffle(&mut order, random);
    let mut end = 0;
    for idx in order {
        spans[idx].entries = end + SPARE;
        end += SPARE + n_pages(&spans[idx]);
    }
    spans
}

fn n_pages(span: &RowSpan) -> usize {
    (span.position + span.n_tokens).div_ceil(PAGE_LEN)
}

fn shuffle<X>(values: &mut [X], random: &mut Random) {
    for i in (1..values.len()).rev() {
        values.swap(i, random.below(i + 1));
    }
}

/// The pages of each row in random order, from 1 on; page 0 elsewhere.
fn page_tables(spans: &[RowSpan], random: &mut Random) -> Vec<PageEntry> {
    let n_all: usize = spans.iter().map(n_pages).sum();
    let mut ids: Vec<u32> = (1..=n_all as u32).collect();
    shuffle(&mut ids, random);
    let mut entries = vec![PageEntry(0); n_all + SPARE * spans.len()];
    for span in spans {
        for entry in &mut entries[span.entries..][..n_pages(span)] {
            *entry = PageEntry(ids.pop().expect("as many as were counted"));
        }
    }
    entries
}

fn n_tokens(spans: &[RowSpan]) -> usize {
    spans.iter().map(|span| span.n_tokens).sum()
}

fn n_pages_used(entries: &[PageEntry]) -> usize {
    entries.iter().map(|entry| entry.0 as usize).max().unwrap_or(0) + 1
}

impl Case {
    /// Random numbers for rows of (tokens, position of the first).
    pub(crate) fn new(shape: AttentionShape, rows: &[(usize, usize)], window: Option<usize>) -> Self {
        Self::sharing(shape, rows, window, 0, 0)
    }

    /// The same, where the first rows have as many first pages in common.
    pub(crate) fn sharing(
        shape: AttentionShape,
        rows: &[(usize, usize)],
        window: Option<usize>,
        n_alike: usize,
        n_pages_alike: usize,
    ) -> Self {
        let mut random = Random(rows.len() as u64 + 1000 * shape.head_dim as u64);
        Self::with(shape, rows, window, Vec::new(), [n_alike, n_pages_alike], &mut random)
    }

    /// The same for rows of (tokens, cell of the first), from whose contexts tokens were evicted.
    pub(crate) fn among_holes(shape: AttentionShape, rows: &[(usize, usize)]) -> Self {
        let mut random = Random(rows.len() as u64 + 2000 * shape.head_dim as u64);
        let holes: Vec<RowHoles> =
            rows.iter().map(|&(_, cell)| RowHoles::random(cell, &mut random)).collect();
        let mut case = Self::with(shape, rows, None, holes, [0, 0], &mut random);
        let mut described = Holes::default();
        let first = case.entries.len();
        for (span, holes) in case.spans.iter_mut().zip(&case.holes) {
            span.has_holes = true;
            let place = first + described.push(&holes.evicted(span.position));
            case.hole_places.resize(span.token + span.n_tokens, place as u32);
        }
        // One more for the token past the last.
        case.hole_places.push(u32::MAX);
        case.entries.extend(described.words().iter().map(|&word| PageEntry(word)));
        case
    }

    fn with(
        shape: AttentionShape,
        rows: &[(usize, usize)],
        window: Option<usize>,
        holes: Vec<RowHoles>,
        [n_alike, n_pages_alike]: [usize; 2],
        random: &mut Random,
    ) -> Self {
        let mut spans = spans(rows, random);
        let mut entries = page_tables(&spans, random);
        let first = spans[0].entries;
        for span in spans[..n_alike].iter_mut().skip(1) {
            entries.copy_within(first..first + n_pages_alike, span.entries);
            span.n_pages_alike = n_pages_alike;
        }
        // Scores of a spread of about 1.5, so that the weights are neither equal nor one.
        let q: Vec<f32> = random
            .normals((n_tokens(&spans) + 1) * shape.n_heads * shape.head_dim)
            .iter()
            .map(|q| 1.5 * q)
            .collect();
        let kv = vec![f32::NAN; n_pages_used(&entries) * N_LAYERS * shape.layer_len()];
        let q = rounded(shape.dtype, &q);
        let frequency = |i: usize| 10_000f32.powf(-2.0 * i as f32 / shape.head_dim as f32);
        let inv_freq = (0..shape.head_dim / 2).map(frequency).collect();
        let hole_places = Vec::new();
        let mut case = Self { shape, window, spans, q, kv, entries, holes, hole_places, inv_freq };
        for row_idx in 0..case.spans.len() {
            let span = case.spans[row_idx];
            let first = case.first(span.position);
            for position in first..span.position + span.n_tokens {
                if !case.sees(row_idx, position) {
                    continue;
                }
                for part in 0..2 * shape.n_kv_heads {
                    let start = case.kv_start(row_idx, position, part);
                    let values = rounded(shape.dtype, &random.normals(shape.head_dim));
                    case.kv[start..start + shape.head_dim].copy_from_slice(&values);
                }
            }
            case.entries[span.entries..][..first / PAGE_LEN].fill(PageEntry(0));
        }
        case
    }

    /// The first position that a query attends to.
    fn first(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Whether the later queries of a row attend to a position.
    fn sees(&self, row_idx: usize, position: usize) -> bool {
        self.holes.get(row_idx).is_none_or(|holes| holes.sees(position))
    }

    /// A query as it is turned for the key in a cell.
    fn turned(&self, row_idx: usize, cell: usize, q: &[f32]) -> Vec<f32> {
        let turn = self.holes.get(row_idx).map_or(0, |holes| holes.turn(cell));
        if turn == 0 {
            return q.to_vec();
        }
        let half = q.len() / 2;
        let turned = (0..q.len()).map(|i| {
            let (sin, cos) = f64::from(turn as f32 * self.inv_freq[i % half]).sin_cos();
            let (own, other) = (f64::from(q[i]), f64::from(q[(i + half) % q.len()]));
            if i < half { (own * cos - other * sin) as f32 } else { (own * cos + other * sin) as f32 }
        });
        rounded(self.shape.dtype, &turned.collect::<Vec<_>>())
    }

    /// Where a key (`part` is its head) or a value (`part` is `n_kv_heads` more) begins.
    fn kv_start(&self, row_idx: usize, position: usize, part: usize) -> usize {
        let page = self.entries[self.spans[row_idx].entries + position / PAGE_LEN].0 as usize;
        let layer = (page * N_LAYERS + LAYER_IDX) * self.shape.layer_len();
        layer + (part * PAGE_LEN + position % PAGE_LEN) * self.shape.head_dim
    }

    /// Rows as the step has them.
    pub(crate) fn spans(&self) -> &[RowSpan] {
        &self.spans
    }

    /// What a query puts on each token up to itself, the mean of its heads: 0 before its window.
    pub(crate) fn masses(&self, row_idx: usize, offset: usize) -> Vec<f64> {
        let position = self.spans[row_idx].position + offset;
        let there: Vec<usize> = (0..=position).filter(|&position| self.sees(row_idx, position)).collect();
        let mut masses = vec![0.0; there.len()];
        for head in 0..self.shape.n_heads {
            for (position, weight) in self.weights(row_idx, offset, head) {
                let idx = there.binary_search(&position).expect("what is seen is there");
                masses[idx] += weight / self.shape.n_heads as f64;
            }
        }
        masses
    }

    /// What a query's head sees, and how much that weighs.
    fn weights(&self, row_idx: usize, offset: usize, head: usize) -> Vec<(usize, f64)> {
        let AttentionShape { n_heads, head_dim, scale, .. } = self.shape;
        let position = self.spans[row_idx].position + offset;
        let token = self.spans[row_idx].token + offset;
        let q = &self.q[(token * n_heads + head) * head_dim..][..head_dim];
        let kv_head = head / self.shape.group_len();
        let seen: Vec<usize> =
            (self.first(position)..=position).filter(|&position| self.sees(row_idx, position)).collect();
        let mut of_turn = HashMap::new();
        let scores: Vec<f64> = seen
            .iter()
            .map(|&position| {
                let k = &self.kv[self.kv_start(row_idx, position, kv_head)..][..head_dim];
                let turn = self.holes.get(row_idx).map_or(0, |holes| holes.turn(position));
                let q = of_turn.entry(turn).or_insert_with(|| self.turned(row_idx, position, q));
                let dot: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                dot * f64::from(scale)
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
        seen.into_iter().zip(scores.into_iter().map(|score| (score - top).exp() / sum)).collect()
    }

    /// One output, and the sum of the weighted magnitudes that it is made of.
    fn reference(&self, row_idx: usize, offset: usize, head: usize) -> Vec<(f64, f64)> {
        let AttentionShape { n_kv_heads, head_dim, .. } = self.shape;
        let kv_head = head / self.shape.group_len();
        let mut out = vec![(0.0, 0.0); head_dim];
        for (position, weight) in self.weights(row_idx, offset, head) {
            let v = &self.kv[self.kv_start(row_idx, position, n_kv_heads + kv_head)..][..head_dim];
            for (out, &v) in out.iter_mut().zip(v) {
                out.0 += weight * f64::from(v);
                out.1 += weight * f64::from(v).abs();
            }
        }
        out
    }

    /// Onto the device, dealt to workers.
    pub(crate) fn upload(&self, test: &TestGpu, attention: &Attention, cuttings: &Cuttings) -> Uploaded {
        let dtype = self.shape.dtype;
        let kv = upload_as(test, dtype, &self.kv);
        let entries = &self.entries;
        let mut device = Uploaded::new(test, attention, cuttings, &self.spans, self.window, kv, entries);
        device.q = upload_as(test, dtype, &self.q);
        if !self.holes.is_empty() {
            device.hole_places = upload(test, &self.hole_places);
            device.inv_freq = upload(test, &self.inv_freq);
        }
        device
    }

    /// A case for measuring: all pages full of numbers.
    pub(crate) fn random_on_device(
        test: &TestGpu,
        attention: &Attention,
        cuttings: &Cuttings,
        rows: &[(usize, usize)],
    ) -> Uploaded {
        let mut random = Random(7);
        let shape = attention.shape();
        let spans = spans(rows, &mut random);
        let entries = page_tables(&spans, &mut random);
        // Of either sign, between 1/2 and 2: the bits of f16 and of bf16 numbers that are neither tiny nor infinite.
        let chunk: Vec<u16> = (0..1 << 20).map(|_| (random.next() as u16 & 0x80ff) | 0x3f00).collect();
        let random_buffer = |n_bytes: usize| {
            let buffer = test.gpu.allocate("a test", n_bytes).expect("device memory");
            for start in (0..n_bytes).step_by(2 * chunk.len()) {
                let n_bytes = (n_bytes - start).min(2 * chunk.len());
                let part = buffer.slice().part(start, n_bytes);
                part.upload(&test.stream, &chunk[..n_bytes / 2]).expect("an upload");
            }
            buffer
        };
        let n_pages = n_pages_used(&entries);
        let kv = random_buffer(n_pages * N_LAYERS * shape.layer_len() * shape.dtype.n_bytes());
        let mut device = Uploaded::new(test, attention, cuttings, &spans, None, kv, &entries);
        device.q = random_buffer(device.q.slice().n_bytes);
        device
    }

    /// Compares outputs, all of a small case, else the rows' first and last tokens and random others.
    pub(crate) fn assert_outputs(&self, test: &TestGpu, device: &Uploaded) {
        let AttentionShape { dtype, n_heads, head_dim, .. } = self.shape;
        let bits = device.out_bits(test);
        let row_bytes = n_heads * head_dim * dtype.n_bytes();
        assert!(
            bits[bits.len() - row_bytes..].iter().all(|&byte| byte == POISON),
            "written past the last token"
        );
        let out = download_as(test, dtype, device.out.slice(), device.n_tokens * n_heads * head_dim);
        assert!(out.iter().all(|value| value.is_finite()), "every output is written, from numbers only");
        let mut random = Random(3);
        let n_all = device.n_tokens * n_heads;
        for (row_idx, span) in self.spans.iter().enumerate() {
            for offset in 0..span.n_tokens {
                for head in 0..n_heads {
                    let is_edge = (offset == 0 || offset == span.n_tokens - 1) && head == n_heads - 1;
                    if n_all > N_COMPARED && !is_edge && random.below(n_all) >= N_COMPARED {
                        continue;
                    }
                    let token = span.token + offset;
                    let got = &out[(token * n_heads + head) * head_dim..][..head_dim];
                    for (d, (&got, &(expected, spread))) in
                        got.iter().zip(&self.reference(row_idx, offset, head)).enumerate()
                    {
                        // Each weight is rounded to T before the product with V, and the output once. The rest is f32:
                        // sums of up to 8192 terms, exp2 with two units in the last place.
                        let tolerance = rounding(dtype) * (spread + expected.abs()) + 2f64.powi(-16) * spread;
                        let diff = (f64::from(got) - expected).abs();
                        assert!(
                            diff <= tolerance,
                            "{:?}, window {:?}, row {row_idx} {span:?}, query {offset}, head {head}, [{d}]: {got}, \
                             not {expected} (±{tolerance:e})",
                            self.shape,
                            self.window
                        );
                    }
                }
            }
        }
    }
}

impl UploadedList {
    fn new(test: &TestGpu, plan: &AttentionPlan, form: Form) -> Option<Self> {
        let list = plan.list(0, form);
        if list.n_workers == 0 {
            return None;
        }
        let n_cuts = if form.sums_apart() { list.cuts.len() } else { 0 };
        // What lies past the counts would lead outside of everything.
        let outside =
            Share { token: u32::MAX, entries: u32::MAX, next: u32::MAX, page_end: 9, ..Share::default() };
        let shares = [&list.shares[..], &[outside]].concat();
        let far_cut = Cut { token: u32::MAX, partial: u32::MAX, n_tokens: 1, n_shares: 2 };
        let cuts = [&list.cuts[..n_cuts], &[far_cut]].concat();
        Some(Self {
            shares: upload(test, &shares),
            workers: DeviceCount::new(test, list.n_workers + 1, list.n_workers),
            cut_list: upload(test, &cuts),
            cuts: DeviceCount::new(test, if n_cuts == 0 { 0 } else { n_cuts + 1 }, n_cuts),
        })
    }
}

impl Uploaded {
    fn new(
        test: &TestGpu,
        attention: &Attention,
        cuttings: &Cuttings,
        spans: &[RowSpan],
        window: Option<usize>,
        kv: Buffer,
        entries: &[PageEntry],
    ) -> Self {
        let shape = attention.shape();
        let n_tokens = n_tokens(spans);
        let mut plan = AttentionPlan::new(&[window]);
        plan.plan(spans, cuttings);
        let n_bytes = (n_tokens + 1) * shape.n_heads * shape.head_dim * shape.dtype.n_bytes();
        Self {
            shape,
            window,
            n_tokens,
            q: poisoned(test, n_bytes),
            out: poisoned(test, n_bytes),
            kv,
            entries: upload(test, entries),
            hole_places: poisoned(test, 16),
            inv_freq: poisoned(test, 16),
            lists: Form::ALL.map(|form| UploadedList::new(test, &plan, form)),
            arrivals: upload(test, &vec![0u8; attention.arrivals_bytes()]),
            partial: poisoned(test, attention.partial_bytes()),
        }
    }

    /// What the kernels work on.
    pub(crate) fn inputs(&self) -> AttentionInputs {
        AttentionInputs {
            n_tokens_max: self.n_tokens + 1,
            q: self.q.slice(),
            out: self.out.slice(),
            kv: KvLayer {
                pages: self.kv.slice(),
                page_stride: N_LAYERS * self.shape.layer_len(),
                layer_idx: LAYER_IDX,
            },
            entries: self.entries.slice(),
            window: self.window,
            holes: self.lists[Form::Holed as usize]
                .is_some()
                .then(|| HolesInputs { places: self.hole_places.slice(), inv_freq: self.inv_freq.slice() }),
        }
    }

    /// Puts the launches into the stream.
    pub(crate) fn launch(&self, test: &TestGpu, attention: &Attention) {
        let inputs = self.inputs();
        let on_device = |list: &UploadedList| DeviceShares {
            shares: list.shares.slice(),
            workers: list.workers.rows(),
            cut_list: list.cut_list.slice(),
            cuts: list.cuts.rows(),
        };
        let work = AttentionWork { lists: self.lists.each_ref().map(|list| list.as_ref().map(on_device)) };
        let workspace = Workspace { arrivals: self.arrivals.slice(), partial: self.partial.slice() };
        attention.run(&test.stream, &inputs, &work, workspace).expect("the launches");
    }

    /// Launches, with partial results poisoned, and looks whether the counts are zero again.
    pub(crate) fn run(&self, test: &TestGpu, attention: &Attention) {
        self.partial.slice().fill(&test.stream, 0xff).expect("a fill");
        self.launch(test, attention);
        let arrived = download(test, self.arrivals.slice(), attention.arrivals_bytes(), 1u8);
        assert!(arrived.iter().all(|&byte| byte == 0), "the counts are zero again");
    }

    /// Which forms have work.
    pub(crate) fn forms(&self) -> Vec<Form> {
        Form::ALL.into_iter().filter(|&form| self.lists[form as usize].is_some()).collect()
    }

    /// The outputs' bytes.
    pub(crate) fn out_bits(&self, test: &TestGpu) -> Vec<u8> {
        let out: Slice = self.out.slice();
        download(test, out, out.n_bytes, 0u8)
    }

    /// The median time of a launch, from eleven runs of several launches each.
    pub(crate) fn seconds(&self, test: &TestGpu, launch: impl Fn()) -> f64 {
        const N_LAUNCHES: u32 = 20;
        let mut runs: Vec<f64> = (0..11)
            .map(|_| {
                test.stream.synchronize().expect("the launches before");
                let start = Instant::now();
                (0..N_LAUNCHES).for_each(|_| launch());
                test.stream.synchronize().expect("the launches");
                start.elapsed().as_secs_f64() / f64::from(N_LAUNCHES)
            })
            .collect();
        runs.sort_by(f64::total_cmp);
        runs[runs.len() / 2]
    }
}
