//! A backend that shows every mistake with pages.

use crate::backend::PAGE_LEN;
use std::collections::HashMap;

use super::N_PAGES_MIN;
use crate::batch::{
    Batch, Candidate, CellMove, HostPageId, Input, LateMask, Output, OutputFault, OutputKind, PageId, Row,
    SlotId, Token, Within,
};
use crate::kv::N_STRETCHES_MAX;
use crate::sampling::TokenMask;
use crate::sampling::program::{DrawState, Left, N_REPORTS_MAX};
use crate::scheduler::Move;
use crate::steering::Steering;

/// Entries of its vocabulary.
pub(crate) const VOCAB: u64 = 50;

pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub(crate) fn extend_hash(hash: u64, token: Token) -> u64 {
    mix(hash ^ mix(u64::from(token) + 1))
}

pub(crate) fn hash(tokens: &[Token]) -> u64 {
    tokens.iter().fold(0, |hash, &token| extend_hash(hash, token))
}

/// What tells a steering apart.
pub(crate) fn digest(steering: &Steering) -> u64 {
    u64::from_le_bytes(steering.fingerprint()[..8].try_into().expect("there are eight"))
}

/// The KV of a token to which something was added.
fn steered(kv: u64, digest: u64) -> u64 {
    mix(kv ^ digest)
}

/// The KV of a row's token, which follows from that of the token before it.
fn extend_row(row: &Row<'_>, before: u64, position: usize, token: Token) -> u64 {
    let kv = extend_hash(before, token);
    let added = row.steered.filter(|steered| position >= steered.from);
    added.map_or(kv, |added| steered(kv, digest(added.steering)))
}

/// The KV of the last of these tokens of a row.
fn hash_row(row: &Row<'_>, tokens: &[Token]) -> u64 {
    let tokens = tokens.iter().enumerate();
    tokens.fold(0, |before, (position, &token)| extend_row(row, before, position, token))
}

/// What the KV of the next token follows from: the KV before it, and where tokens were evicted all that the token sees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    /// The KV of the last token.
    pub(crate) last: u64,
    /// All that are seen, summed, where tokens were evicted.
    sum: Option<u64>,
    /// What is added from which token on, and how many there are before the next one.
    steered: Option<(u64, usize)>,
    n_tokens: usize,
}

impl From<u64> for Chain {
    fn from(last: u64) -> Self {
        Self { last, sum: None, steered: None, n_tokens: 0 }
    }
}

impl Chain {
    /// After tokens of these KVs, with holes between them.
    pub(crate) fn holed(kvs: &[u64]) -> Self {
        let sum = kvs.iter().fold(0, |sum: u64, kv| sum.wrapping_add(*kv));
        Self { sum: Some(sum), ..kvs.last().copied().unwrap_or(0).into() }
    }

    pub(crate) fn extend(self, token: Token) -> Self {
        let kv = extend_hash(self.last ^ self.sum.unwrap_or(0), token);
        let added = self.steered.filter(|&(_, from)| self.n_tokens >= from);
        let last = added.map_or(kv, |(digest, _)| steered(kv, digest));
        let sum = self.sum.map(|sum| sum.wrapping_add(last));
        Self { last, sum, n_tokens: self.n_tokens + 1, ..self }
    }

    /// The same, after so many tokens, where this is added to those from an index on.
    pub(crate) fn steered(self, steered: Option<(u64, usize)>, n_tokens: usize) -> Self {
        Self { steered, n_tokens, ..self }
    }
}

pub(crate) fn drawn(prefix_hash: u64, seed: u64) -> Candidate {
    Candidate { token: (mix(prefix_hash ^ seed) % VOCAB) as Token, logprob: -((prefix_hash % 97) as f32) }
}

/// The draw of a mixture of contexts.
pub(crate) fn mixed_drawn(prefixes: &[u64], seed: u64) -> Candidate {
    drawn(prefixes.iter().fold(0, |sum, prefix| mix(sum ^ prefix)), seed)
}

/// That the rows behind the first of a mixture are those of its others.
fn check_others(members: &[Row<'_>]) {
    let input = |row: &Row<'_>| row.input;
    for other in &members[1..] {
        let [asked] = &other.outputs[..] else { panic!("one output of a member") };
        assert!(matches!(asked.kind, OutputKind::Mixed) && asked.position + 1 == other.end());
        assert_eq!(input(other), input(&members[0]), "what the first one drew");
    }
}

/// The draw under a mask: the first token allowed from the one on that would be drawn without.
pub(crate) fn drawn_under(mask: &TokenMask, prefix_hash: u64, seed: u64) -> Option<Candidate> {
    let free = drawn(prefix_hash, seed);
    let tokens = (0..VOCAB as Token).map(|n| (free.token + n) % VOCAB as Token);
    tokens.into_iter().find(|&token| mask.allows(token)).map(|token| Candidate { token, ..free })
}

/// Whether drawing with this seed fails here; never with a multiple of 8.
pub(crate) fn fails(prefix_hash: u64, seed: u64) -> bool {
    seed % 8 == 1 && mix(prefix_hash ^ !seed).is_multiple_of(8)
}

pub(crate) fn score(prefix_hash: u64, token: Token) -> f32 {
    -((mix(prefix_hash ^ (u64::from(token) << 32)) % 1009) as f32)
}

/// The most probable tokens.
pub(crate) fn ranked(prefix_hash: u64, n: usize) -> Vec<Candidate> {
    let candidate = |token| Candidate { token, logprob: score(prefix_hash, token) / 100.0 };
    let mut ranked: Vec<Candidate> = (0..VOCAB as Token).map(candidate).collect();
    ranked.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token.cmp(&b.token)));
    ranked.truncate(n);
    ranked
}

/// A backend whose KV of a position is a hash of all tokens up to it, checked whenever it is read.
pub(crate) struct HashBackend {
    pages: Vec<[u64; PAGE_LEN]>,
    host_pages: Vec<[u64; PAGE_LEN]>,
    /// The token that was drawn last for each slot.
    drawn: HashMap<SlotId, Token>,
    /// The hash of all tokens up to the one that each slot was asked about last.
    states: HashMap<SlotId, u64>,
    /// The pages that each slot was told last.
    tables: HashMap<SlotId, Vec<PageId>>,
    /// Late draws of the step that was run last.
    late: Vec<LateDraw>,
    /// Rows without tokens.
    pub(crate) n_rows_of_head: usize,
    /// And those of them that came with their pages.
    pub(crate) n_heads_with_pages: usize,
    /// Pages that were told again, though the backend had them.
    pub(crate) n_told_again: usize,
    /// Rows whose token only the backend knew, and those of them that began a page.
    pub(crate) n_drawn_rows: usize,
    pub(crate) n_drawn_rows_on_new_pages: usize,
    /// Times that tokens of several pages were copied into one.
    pub(crate) n_packs: usize,
    /// Tokens of branches of trees that were copied.
    pub(crate) n_cells_moved: usize,
}

struct LateDraw {
    row_idx: usize,
    output_idx: usize,
    slot: SlotId,
    prefix: u64,
    seed: u64,
}

/// What is in memory that must not be read.
const GARBAGE: u64 = u64::MAX;

impl HashBackend {
    pub(crate) fn new(n_pages: usize, n_host_pages: usize) -> Self {
        let pages = |n| vec![[GARBAGE; PAGE_LEN]; n];
        Self {
            pages: pages(n_pages),
            host_pages: pages(n_host_pages),
            drawn: HashMap::new(),
            states: HashMap::new(),
            tables: HashMap::new(),
            late: Vec::new(),
            n_rows_of_head: 0,
            n_heads_with_pages: 0,
            n_told_again: 0,
            n_drawn_rows: 0,
            n_drawn_rows_on_new_pages: 0,
            n_packs: 0,
            n_cells_moved: 0,
        }
    }

    /// The row's tokens, the drawn one included.
    fn tokens(&mut self, row: &Row<'_>) -> Vec<Token> {
        let mut tokens = row.tokens.to_vec();
        if let Input::Drawn(slot) = row.input {
            assert_eq!(row.start, tokens.len(), "a drawn token is the row's only one");
            // Where the draw failed, what was there before.
            tokens.push(self.drawn.get(&slot).copied().unwrap_or(0));
            self.n_drawn_rows += 1;
            self.n_drawn_rows_on_new_pages += usize::from(row.start.is_multiple_of(PAGE_LEN));
        }
        tokens
    }

    pub(crate) fn run(&mut self, moves: &[Move], batch: &Batch<'_>) -> Vec<Output> {
        assert!(self.late.is_empty(), "nothing is submitted behind a step that waits for masks");
        self.make(moves);
        for copy in batch.copies {
            assert!(batch.copies.iter().all(|other| other.dst != copy.src), "a source is no destination");
            self.pages[copy.dst.0 as usize] = self.pages[copy.src.0 as usize];
        }
        for pack in batch.rows.iter().filter_map(|row| row.evicted.as_ref()).flat_map(|evicted| evicted.packs)
        {
            let cells = pack.from.iter().flat_map(|&(from, bits)| {
                (0..PAGE_LEN).filter(move |slot| bits >> slot & 1 == 1).map(move |slot| (from, slot))
            });
            let kvs: Vec<u64> = cells.map(|(from, slot)| self.pages[from.0 as usize][slot]).collect();
            assert!(kvs.len() <= PAGE_LEN && pack.from.iter().all(|(from, _)| *from != pack.to));
            self.pages[pack.to.0 as usize] = [GARBAGE; PAGE_LEN];
            self.pages[pack.to.0 as usize][..kvs.len()].copy_from_slice(&kvs);
            self.n_packs += 1;
        }
        let tokens: Vec<Vec<Token>> = batch.rows.iter().map(|row| self.tokens(row)).collect();
        // All rows are written before any is checked: a page shared in error would be seen.
        for (row, tokens) in batch.rows.iter().zip(&tokens) {
            if let Some(evicted) = &row.evicted {
                for (idx, &token) in tokens[row.start..].iter().enumerate() {
                    let cell = evicted.cell + idx;
                    let kv = self.kv_among_holes(row, cell, token);
                    self.pages[row.pages[cell / PAGE_LEN].0 as usize][cell % PAGE_LEN] = kv;
                }
                continue;
            }
            let mut prefix = hash_row(row, &tokens[..row.start]);
            for (position, &token) in tokens.iter().enumerate().skip(row.start) {
                prefix = extend_row(row, prefix, position, token);
                self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN] = prefix;
            }
        }
        let mut outputs = Vec::new();
        let all_tokens = &tokens;
        for (row_idx, (row, tokens)) in batch.rows.iter().zip(all_tokens).enumerate() {
            self.note_late(row_idx, row, tokens, outputs.len());
            self.take_table(row);
            if row.start == row.end() {
                if !row.pages.is_empty() {
                    self.check_pages(row, tokens);
                    self.n_heads_with_pages += 1;
                }
                let prefix = match &row.evicted {
                    Some(_) => self.states[&row.slot],
                    None => hash_row(row, tokens),
                };
                assert_eq!(self.states.get(&row.slot), Some(&prefix), "the state of the last token");
                self.n_rows_of_head += 1;
                outputs
                    .extend(row.outputs.iter().map(|request| self.output(row.slot, prefix, &request.kind)));
                continue;
            }
            let n_cells = row.evicted.map_or(row.end(), |evicted| evicted.cell + row.end() - row.start);
            assert_eq!(row.pages.len(), n_cells.div_ceil(PAGE_LEN), "a page for each token and no more");
            // What page tables of a device have room for.
            let n_pages_most = N_PAGES_MIN + 2 * N_STRETCHES_MAX;
            assert!(row.evicted.is_none() || row.pages.len() <= n_pages_most, "{} pages", row.pages.len());
            self.check_pages(row, tokens);
            for request in &row.outputs {
                assert!((row.start..row.end()).contains(&request.position));
                let prefix = self.prefix(row, tokens, request.position);
                outputs.push(match request.kind {
                    OutputKind::Program { sampler, others, within, .. }
                        if !matches!(within, Within::Late) =>
                    {
                        let n_others = others.n_rows();
                        let members = row_idx..=row_idx + n_others;
                        let rows = &batch.rows[members.clone()];
                        check_others(rows);
                        let prefix_of =
                            |(row, tokens): (&Row<'_>, &Vec<Token>)| self.prefix(row, tokens, row.end() - 1);
                        let prefixes: Vec<u64> =
                            rows.iter().zip(&all_tokens[members]).map(prefix_of).collect();
                        self.mixed(row.slot, &prefixes, sampler.seed)
                    }
                    _ => self.output(row.slot, prefix, &request.kind),
                });
                if request.position + 1 == row.end() {
                    self.states.insert(row.slot, prefix);
                }
            }
        }
        outputs
    }

    /// The KV of a token that sees the cells before its own that the row says.
    fn kv_among_holes(&self, row: &Row<'_>, cell: usize, token: Token) -> u64 {
        let evicted = row.evicted.as_ref().expect("tokens were evicted");
        let seen = |page_idx: usize| {
            let bits = evicted.seen_in(page_idx, cell);
            let cells = (0..PAGE_LEN).filter(move |slot| bits >> slot & 1 == 1);
            cells.map(move |slot| page_idx * PAGE_LEN + slot).filter(|&seen| seen != cell)
        };
        let cells = (0..=cell / PAGE_LEN).flat_map(seen);
        let kvs: Vec<u64> = cells
            .map(|seen| self.pages[row.pages[seen / PAGE_LEN].0 as usize][seen % PAGE_LEN])
            .inspect(|&kv| assert_ne!(kv, GARBAGE, "a cell that nothing is in"))
            .collect();
        if evicted.n_whole.is_some() {
            // Of a node of a tree all that it sees is its context and its path.
            let path = row.tokens.iter().enumerate().scan(0, |hash, (position, token)| {
                *hash = extend_row(row, *hash, position, token);
                Some(*hash)
            });
            assert!(path.take(kvs.len()).eq(kvs.iter().copied()), "cell {cell} sees its own path");
        }
        let before = match evicted.n_evicted {
            0 => kvs.last().copied().unwrap_or(0).into(),
            _ => Chain::holed(&kvs),
        };
        let added = row.steered.map(|steered| (digest(steered.steering), steered.from));
        before.steered(added, row.start + cell - evicted.cell).extend(token).last
    }

    /// The KV of a token of a row.
    fn prefix(&self, row: &Row<'_>, tokens: &[Token], position: usize) -> u64 {
        match &row.evicted {
            None => hash_row(row, &tokens[..=position]),
            Some(evicted) => self.kv_among_holes(row, evicted.cell + position - row.start, tokens[position]),
        }
    }

    fn check_pages(&self, row: &Row<'_>, tokens: &[Token]) {
        if let Some(evicted) = &row.evicted {
            for (idx, &token) in tokens[row.start..].iter().enumerate() {
                let cell = evicted.cell + idx;
                let stored = self.pages[row.pages[cell / PAGE_LEN].0 as usize][cell % PAGE_LEN];
                assert_eq!(stored, self.kv_among_holes(row, cell, token), "KV of cell {cell}");
            }
            return;
        }
        let mut prefix = 0;
        for (position, &token) in tokens.iter().enumerate() {
            prefix = extend_row(row, prefix, position, token);
            let stored = self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN];
            assert_eq!(stored, prefix, "KV of position {position}");
        }
    }

    /// Brings a slot's page table up to date, from what is said to have changed alone.
    fn take_table(&mut self, row: &Row<'_>) {
        if row.pages.is_empty() {
            return;
        }
        let table = self.tables.entry(row.slot).or_default();
        let n_same = row.n_same_pages.min(table.len());
        assert_eq!(table[..n_same], row.pages[..n_same], "pages that are as they were");
        self.n_told_again +=
            table.iter().zip(row.pages).skip(n_same).filter(|(had, told)| had == told).count();
        table.truncate(row.n_same_pages);
        table.extend_from_slice(&row.pages[table.len().min(row.pages.len())..]);
    }

    fn output(&mut self, slot: SlotId, prefix: u64, kind: &OutputKind<'_>) -> Output {
        match kind {
            OutputKind::Program { within: Within::Late, .. } => Output::SatOut,
            OutputKind::Program { sampler, .. } => self.mixed(slot, &[prefix], sampler.seed),
            OutputKind::Mixed => Output::Mixed,
            OutputKind::Sample(sampler) if fails(prefix, sampler.seed) => {
                Output::Failed(OutputFault::NothingToDraw)
            }
            OutputKind::Sample(sampler) => {
                let candidate = drawn(prefix, sampler.seed);
                self.drawn.insert(slot, candidate.token);
                Output::Sampled(candidate)
            }
            OutputKind::Masked { mask: None, .. } => Output::SatOut,
            OutputKind::Masked { sampler, mask: Some(mask) } => {
                self.draw_under(mask, slot, prefix, sampler.seed)
            }
            OutputKind::Top { n } => {
                Output::Top { candidates: ranked(prefix, *n), entropy: score(prefix, 0) }
            }
            OutputKind::Ranked { n, .. } => Output::Ranked(ranked(prefix, *n)),
            OutputKind::Scores(tokens) => {
                Output::Scores(tokens.iter().map(|&token| score(prefix, token)).collect())
            }
            OutputKind::Full | OutputKind::Logits => Output::Full(vec![score(prefix, 7)]),
            OutputKind::Keep(_) => Output::Kept,
            OutputKind::Embedding => Output::Embedding(vec![score(prefix, 8)]),
            OutputKind::Hidden { n_layers } => Output::Embedding(vec![score(prefix, *n_layers as Token)]),
            OutputKind::Attention { layers } => {
                Output::Attention(layers.iter().map(|&layer| score(prefix, layer as Token)).collect())
            }
        }
    }

    fn mixed(&mut self, slot: SlotId, prefixes: &[u64], seed: u64) -> Output {
        if fails(prefixes[0], seed) {
            return Output::Failed(OutputFault::NothingToDraw);
        }
        let candidate = mixed_drawn(prefixes, seed);
        self.drawn.insert(slot, candidate.token);
        let next = DrawState::default();
        Output::Programmed(candidate, Box::new(Left { next, reports: [0.0; N_REPORTS_MAX] }))
    }

    fn draw_under(&mut self, mask: &TokenMask, slot: SlotId, prefix: u64, seed: u64) -> Output {
        let Some(candidate) = drawn_under(mask, prefix, seed) else {
            return Output::Failed(OutputFault::NothingToDraw);
        };
        self.drawn.insert(slot, candidate.token);
        Output::Sampled(candidate)
    }

    fn note_late(&mut self, row_idx: usize, row: &Row<'_>, tokens: &[Token], output_idx: usize) {
        for (idx, request) in row.outputs.iter().enumerate() {
            if let (true, Some(sampler)) = (request.kind.is_late(), request.kind.sampler()) {
                // No row may begin with what was drawn before.
                self.drawn.remove(&row.slot);
                let prefix = match row.start == row.end() && row.evicted.is_some() {
                    true => self.states[&row.slot],
                    false => self.prefix(row, tokens, request.position),
                };
                self.late.push(LateDraw {
                    row_idx,
                    output_idx: output_idx + idx,
                    slot: row.slot,
                    prefix,
                    seed: sampler.seed,
                });
            }
        }
    }

    /// The step that waits for masks has failed.
    pub(crate) fn forget_late(&mut self) {
        self.late.clear();
    }

    /// Makes the late draws whose masks have come, of the first so many.
    pub(crate) fn supply(&mut self, masks: &[LateMask<'_>], n_max: usize, outputs: &mut [Output]) {
        let late = std::mem::take(&mut self.late);
        for &LateMask { row_idx, mask } in masks.iter().take(n_max) {
            let draw = late.iter().find(|draw| draw.row_idx == row_idx).expect("the row makes a late draw");
            outputs[draw.output_idx] = self.draw_under(mask, draw.slot, draw.prefix, draw.seed);
        }
    }

    pub(crate) fn move_cells(&mut self, moves: &[CellMove]) {
        for CellMove { src, dst } in moves {
            self.pages[dst.page.0 as usize][dst.idx] = self.pages[src.page.0 as usize][src.idx];
            self.n_cells_moved += 1;
        }
    }

    /// Copies of tokens that fail: nobody knows what is in the pages that they would have written to.
    pub(crate) fn lose_cells(&mut self, moves: &[CellMove]) {
        moves.iter().for_each(|it| self.pages[it.dst.page.0 as usize] = [GARBAGE; PAGE_LEN]);
    }

    pub(crate) fn n_pages(&self) -> usize {
        self.pages.len()
    }

    /// Pages from here on lose their memory.
    pub(crate) fn forget_from(&mut self, n_pages: usize) {
        self.pages[n_pages..].fill([GARBAGE; PAGE_LEN]);
    }

    pub(crate) fn make(&mut self, moves: &[Move]) {
        for step in moves {
            match *step {
                Move::Out(page, host) => {
                    self.host_pages[host.0 as usize] =
                        std::mem::replace(&mut self.pages[page.0 as usize], [GARBAGE; PAGE_LEN]);
                }
                Move::Within(from, to) => {
                    self.pages[to.0 as usize] =
                        std::mem::replace(&mut self.pages[from.0 as usize], [GARBAGE; PAGE_LEN]);
                }
                Move::In(host, page) => {
                    self.pages[page.0 as usize] =
                        std::mem::replace(&mut self.host_pages[host.0 as usize], [GARBAGE; PAGE_LEN]);
                }
            }
        }
    }

    /// Moves host pages to others.
    pub(crate) fn gather(&mut self, moves: &[(HostPageId, HostPageId)]) {
        for (from, to) in moves {
            self.host_pages[to.0 as usize] =
                std::mem::replace(&mut self.host_pages[from.0 as usize], [GARBAGE; PAGE_LEN]);
        }
    }

    /// Fails a step after so many of its moves: what is in the pages that it would have written is unknown.
    pub(crate) fn fail(&mut self, moves: &[Move], n_moved: usize, batch: &Batch<'_>) {
        self.make(&moves[..n_moved]);
        for planned in &moves[n_moved..] {
            match *planned {
                Move::Out(_, host) => self.host_pages[host.0 as usize] = [GARBAGE; PAGE_LEN],
                Move::In(_, page) | Move::Within(_, page) => {
                    self.pages[page.0 as usize] = [GARBAGE; PAGE_LEN]
                }
            }
        }
        self.states.retain(|slot, _| batch.rows.iter().all(|row| row.slot != *slot));
        let rows = batch.rows.iter().filter(|row| row.start < row.end());
        let first = |row: &&Row<'_>| row.evicted.map_or(row.start, |evicted| evicted.cell) / PAGE_LEN;
        let written = rows.flat_map(|row| &row.pages[first(&row)..]);
        for page in written.chain(batch.copies.iter().map(|copy| &copy.dst)) {
            self.pages[page.0 as usize] = [GARBAGE; PAGE_LEN];
        }
    }
}
