//! Cases for the tests of attention, and its reference in f64.

use std::collections::HashMap;
use std::time::Instant;

use super::attention::{
    AttentionInputs, AttentionShape, Contexts, KvLayer, PAGE_LEN, RowSpan, Tiles, plan_tiles,
};
use super::common::Dtype;
use super::common::check::{Count, download, download_as, poisoned, rounded, rounding, upload, upload_as};
use crate::testing::{Random, TestGpu};
use crate::{Buffer, Module, Slice, Source};

/// A shape with the usual scale.
pub(crate) fn shape(dtype: Dtype, n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { dtype, n_heads, n_kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

/// A device, and each source compiled once.
pub(crate) struct Modules {
    pub(crate) test: TestGpu,
    loaded: HashMap<&'static str, Module>,
}

impl Modules {
    pub(crate) fn new(test: TestGpu) -> Self {
        Self { test, loaded: HashMap::new() }
    }

    pub(crate) fn get(&mut self, source: Source) -> &Module {
        self.loaded.entry(source.text).or_insert_with(|| self.test.module(source))
    }
}

const N_LAYERS: usize = 2;
const LAYER_IDX: usize = 1;
/// What `poisoned` fills with.
const POISON: u8 = 0xff;
/// Entries of the page table past a row's last page.
const SPARE: usize = 3;
/// Pairs of token and head that are compared in a case with more.
const N_COMPARED: usize = 200;

/// Rows with contexts in shuffled pages. What no query may read is NaN: other layers, positions past the end of a
/// context or before every window, and page 0, to which the page table leads where it has no page.
pub(crate) struct Case {
    shape: AttentionShape,
    window: Option<usize>,
    spans: Vec<RowSpan>,
    q: Vec<f32>,  // [n_tokens + 1, n_heads, head_dim]
    kv: Vec<f32>, // [n_pages, layers, 2, n_kv_heads, PAGE_LEN, head_dim]
    row_start: Vec<i32>,
    page_table: Vec<i32>, // [rows, stride]
    stride: usize,
}

/// A case on the device, with one row of one token and its tiles past the count, which no launch may touch.
pub(crate) struct Uploaded {
    shape: AttentionShape,
    window: Option<usize>,
    n_tokens: usize,
    n_rows: usize,
    stride: usize,
    q: Buffer,
    out: Buffer,
    kv: Buffer,
    row_start: Buffer,
    row_pos0: Buffer,
    page_table: Buffer,
    tiles: Buffer,
    count: Count,
}

fn spans(rows: &[(usize, usize)]) -> Vec<RowSpan> {
    let span = |(row_idx, &(n_tokens, pos0))| RowSpan { row_idx, n_tokens, pos0 };
    rows.iter().enumerate().map(span).collect()
}

fn row_starts(spans: &[RowSpan]) -> Vec<i32> {
    let mut starts = vec![0];
    for span in spans {
        starts.push(starts[starts.len() - 1] + span.n_tokens as i32);
    }
    starts
}

/// The pages of each row in random order, from 1 on, and the stride.
fn page_table(spans: &[RowSpan], random: &mut Random) -> (Vec<i32>, usize) {
    let n_pages = |span: &RowSpan| (span.pos0 + span.n_tokens).div_ceil(PAGE_LEN);
    let stride = spans.iter().map(n_pages).max().unwrap_or(0) + SPARE;
    let n_all: usize = spans.iter().map(n_pages).sum();
    let mut ids: Vec<i32> = (1..=n_all as i32).collect();
    for i in (1..n_all).rev() {
        ids.swap(i, random.below(i + 1));
    }
    let mut table = vec![0; spans.len() * stride];
    for (row, span) in table.chunks_mut(stride).zip(spans) {
        for entry in &mut row[..n_pages(span)] {
            *entry = ids.pop().expect("as many as were counted");
        }
    }
    (table, stride)
}

impl Case {
    /// Random numbers for rows of (tokens, position of the first).
    pub(crate) fn new(shape: AttentionShape, rows: &[(usize, usize)], window: Option<usize>) -> Self {
        let mut random = Random(rows.len() as u64 + 1000 * shape.head_dim as u64);
        let spans = spans(rows);
        let row_start = row_starts(&spans);
        let (page_table, stride) = page_table(&spans, &mut random);
        let n_pages = page_table.iter().max().map_or(1, |&last| last as usize + 1);
        let n_tokens = row_start[spans.len()] as usize;
        // Scores of a spread of about 1.5, so that the weights are neither equal nor one.
        let q: Vec<f32> =
            random.normals((n_tokens + 1) * shape.n_heads * shape.head_dim).iter().map(|q| 1.5 * q).collect();
        let kv = vec![f32::NAN; n_pages * N_LAYERS * shape.layer_len()];
        let q = rounded(shape.dtype, &q);
        let mut case = Self { shape, window, spans, q, kv, row_start, page_table, stride };
        for row_idx in 0..case.spans.len() {
            let span = case.spans[row_idx];
            let first = case.first(span.pos0);
            for position in first..span.pos0 + span.n_tokens {
                for part in 0..2 * shape.n_kv_heads {
                    let start = case.kv_start(row_idx, position, part);
                    let values = rounded(shape.dtype, &random.normals(shape.head_dim));
                    case.kv[start..start + shape.head_dim].copy_from_slice(&values);
                }
            }
            case.page_table[row_idx * stride..][..first / PAGE_LEN].fill(0);
        }
        case
    }

    /// The first position that a query attends to.
    fn first(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Where a key (`part` is its head) or a value (`part` is `n_kv_heads` more) begins.
    fn kv_start(&self, row_idx: usize, position: usize, part: usize) -> usize {
        let page = self.page_table[row_idx * self.stride + position / PAGE_LEN] as usize;
        let layer = (page * N_LAYERS + LAYER_IDX) * self.shape.layer_len();
        layer + (part * PAGE_LEN + position % PAGE_LEN) * self.shape.head_dim
    }

    /// One output, and the sum of the weighted magnitudes that it is made of.
    fn reference(&self, row_idx: usize, offset: usize, head: usize) -> Vec<(f64, f64)> {
        let AttentionShape { n_heads, n_kv_heads, head_dim, scale, .. } = self.shape;
        let position = self.spans[row_idx].pos0 + offset;
        let token = self.row_start[row_idx] as usize + offset;
        let q = &self.q[(token * n_heads + head) * head_dim..][..head_dim];
        let kv_head = head / self.shape.group_len();
        let scores: Vec<f64> = (self.first(position)..=position)
            .map(|position| {
                let k = &self.kv[self.kv_start(row_idx, position, kv_head)..][..head_dim];
                let dot: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                dot * f64::from(scale)
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
        let mut out = vec![(0.0, 0.0); head_dim];
        for (position, score) in (self.first(position)..=position).zip(&scores) {
            let weight = (score - top).exp() / sum;
            let v = &self.kv[self.kv_start(row_idx, position, n_kv_heads + kv_head)..][..head_dim];
            for (out, &v) in out.iter_mut().zip(v) {
                out.0 += weight * f64::from(v);
                out.1 += weight * f64::from(v).abs();
            }
        }
        out
    }

    /// Onto the device, cut into tiles.
    pub(crate) fn upload(&self, test: &TestGpu, tile_len: usize) -> Uploaded {
        let dtype = self.shape.dtype;
        let kv = upload_as(test, dtype, &self.kv);
        let mut device = Uploaded::new(test, self.shape, &self.spans, kv, &self.page_table, tile_len);
        device.q = upload_as(test, dtype, &self.q);
        device.window = self.window;
        device
    }

    /// A case for measuring: all pages full of numbers.
    pub(crate) fn random_on_device(
        test: &TestGpu,
        shape: AttentionShape,
        rows: &[(usize, usize)],
        tile_len: usize,
    ) -> Uploaded {
        let mut random = Random(7);
        let spans = spans(rows);
        let (table, _) = page_table(&spans, &mut random);
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
        let n_pages = table.iter().max().map_or(1, |&last| last as usize + 1);
        let kv = random_buffer(n_pages * N_LAYERS * shape.layer_len() * shape.dtype.n_bytes());
        let mut device = Uploaded::new(test, shape, &spans, kv, &table, tile_len);
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
                    let token = self.row_start[row_idx] as usize + offset;
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

impl Uploaded {
    fn new(
        test: &TestGpu,
        shape: AttentionShape,
        spans: &[RowSpan],
        kv: Buffer,
        table: &[i32],
        tile_len: usize,
    ) -> Self {
        let mut row_start = row_starts(spans);
        let n_tokens = row_start[spans.len()] as usize;
        row_start.push(n_tokens as i32 + 1);
        let row_pos0: Vec<i32> = spans.iter().map(|span| span.pos0 as i32).chain([0]).collect();
        let stride = table.len() / spans.len();
        let table = [table, &vec![0; stride]].concat();
        let mut tiles = Vec::new();
        plan_tiles(spans, tile_len, None, &mut tiles);
        let mut words: Vec<i32> = tiles.iter().flat_map(|tile| tile.words()).collect();
        words.extend([spans.len() as i32, 0].repeat(2));
        let n_bytes = (n_tokens + 1) * shape.n_heads * shape.head_dim * shape.dtype.n_bytes();
        Self {
            shape,
            window: None,
            n_tokens,
            n_rows: spans.len() + 1,
            stride,
            q: poisoned(test, n_bytes),
            out: poisoned(test, n_bytes),
            kv,
            row_start: upload(test, &row_start),
            row_pos0: upload(test, &row_pos0),
            page_table: upload(test, &table),
            tiles: upload(test, &words),
            count: Count::new(test, tiles.len() + 2, tiles.len()),
        }
    }

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
            contexts: Contexts {
                n_rows_max: self.n_rows,
                row_start: self.row_start.slice(),
                row_pos0: self.row_pos0.slice(),
                page_table: self.page_table.slice(),
                page_table_stride: self.stride,
            },
            window: self.window,
        }
    }

    pub(crate) fn tiles(&self) -> Tiles {
        Tiles { count: self.count.rows(), list: self.tiles.slice() }
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
