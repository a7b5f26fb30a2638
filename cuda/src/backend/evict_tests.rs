//! Contexts from which tokens are evicted, and whose pages are packed, against the CPU; and decoded ahead against one step
//! after the other.

use smallvec::smallvec;
use trellis_engine::N_STRETCHES_MAX;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Evicted, Input, OutputKind, OutputRequest, Pack, Row, SlotId, Stretch, Token};
use trellis_engine::cpu::CpuBackend;
use trellis_engine::model::{Dtype, Model};
use trellis_engine::sampling::Sampler;

use super::beside_cpu::compare;
use super::tests::{bundled, card, cpu, load_on, random_models, tokens};
use super::*;
use crate::testing::Random;

const N_TALKS: usize = 8;
const N_TALK_TOKENS_MAX: usize = 250;

/// A token that is there.
#[derive(Clone, Copy, Debug)]
struct LiveToken {
    token: Token,
    /// Tokens before it that there have been: what it is rotated by.
    number: usize,
    cell: usize,
    /// How far its position is below its number.
    closed_up: usize,
}

/// A context as an engine would keep it.
#[derive(Default)]
struct Talk {
    held: Vec<LiveToken>,
    pages: Vec<PageId>,
    /// Pages from the first on that the device was told and that are as they were.
    n_told: usize,
    has_state: bool,
    packs: Vec<Pack>,
    /// What rows borrow.
    tokens: Vec<Token>,
    live: Vec<u16>,
    open: usize,
    stretches: Vec<Stretch>,
}

impl Talk {
    fn next_number(&self) -> usize {
        self.held.last().map_or(0, |last| last.number + 1)
    }

    fn next_cell(&self) -> usize {
        self.held.last().map_or(0, |last| last.cell + 1)
    }

    fn n_evicted(&self) -> usize {
        self.next_number() - self.held.len()
    }

    fn bits(&self) -> Vec<u16> {
        let mut bits = vec![0; self.next_cell().div_ceil(PAGE_LEN)];
        self.held.iter().for_each(|held| bits[held.cell / PAGE_LEN] |= 1 << (held.cell % PAGE_LEN));
        bits
    }

    fn n_stretches(&self) -> usize {
        self.held.chunk_by(|a, b| a.closed_up == b.closed_up).count()
    }

    /// Takes tokens out; returns the pages that come free.
    fn evict(&mut self, gone: std::ops::Range<usize>, closes_up: bool) -> Vec<PageId> {
        self.held.drain(gone.clone());
        if closes_up {
            self.held[gone.start..].iter_mut().for_each(|held| held.closed_up += gone.len());
        }
        self.has_state = false;
        let bits = self.bits();
        let mut free = Vec::new();
        for page_idx in (0..bits.len()).rev().filter(|&page_idx| bits[page_idx] == 0) {
            free.push(self.pages.remove(page_idx));
            self.n_told = self.n_told.min(page_idx);
            let after = self.held.iter_mut().filter(|held| held.cell / PAGE_LEN > page_idx);
            after.for_each(|held| held.cell -= PAGE_LEN);
        }
        free.extend(self.pages.drain(self.next_cell().div_ceil(PAGE_LEN)..));
        self.n_told = self.n_told.min(self.pages.len());
        free
    }

    /// Packs two neighbours whose tokens fit into a page; returns those that come free after the step. What a pack fills no
    /// other takes from in the same step.
    fn pack(&mut self, to: PageId) -> Option<[PageId; 2]> {
        let bits = self.bits();
        let n = |page_idx: usize| bits[page_idx].count_ones() as usize;
        let page_idx = (1..self.next_cell() / PAGE_LEN).map(|idx| idx - 1).find(|&idx| {
            let is_filled = |page: &PageId| self.packs.iter().any(|pack| pack.to == *page);
            n(idx) + n(idx + 1) <= PAGE_LEN && !self.pages[idx..idx + 2].iter().any(is_filled)
        })?;
        let gone = [self.pages[page_idx], self.pages[page_idx + 1]];
        self.packs
            .push(Pack { from: smallvec![(gone[0], bits[page_idx]), (gone[1], bits[page_idx + 1])], to });
        self.pages.splice(page_idx..page_idx + 2, [to]);
        self.n_told = self.n_told.min(page_idx);
        let mut next = page_idx * PAGE_LEN;
        for held in &mut self.held {
            match held.cell / PAGE_LEN {
                at if at < page_idx => {}
                at if at <= page_idx + 1 => {
                    held.cell = next;
                    next += 1;
                }
                _ => held.cell -= PAGE_LEN,
            }
        }
        Some(gone)
    }

    /// Notes down what a row borrows, for tokens from an index on.
    fn prepare(&mut self, n_before: usize) {
        self.tokens = self.held.iter().map(|held| held.token).collect();
        let last = self.held.last().map_or(0, |held| held.closed_up);
        let runs = self.held.chunk_by(|a, b| a.closed_up == b.closed_up);
        self.stretches = runs
            .map(|run| Stretch {
                first_cell: run[0].cell,
                extra_rotation: run[0].closed_up as i64 - last as i64,
            })
            .collect();
        let all = std::mem::take(&mut self.held);
        self.held = all[..n_before].to_vec();
        (self.live, self.open) = (self.bits(), self.next_cell());
        self.held = all;
    }

    /// Where its tokens lie, if some are gone; the row's first is the one of this index.
    fn evicted(&self, start: usize) -> Option<Evicted<'_>> {
        let first = self.held.get(start);
        (self.n_evicted() > 0).then(|| Evicted {
            n_evicted: self.n_evicted(),
            rotation: first.map_or(self.next_number(), |held| held.number),
            cell: first.map_or(self.next_cell(), |held| held.cell),
            n_whole: None,
            live: &self.live,
            open: self.open,
            stretches: &self.stretches,
            packs: &self.packs,
        })
    }
}

struct World {
    random: Random,
    device: CudaBackend,
    host: CpuBackend,
    talks: Vec<Talk>,
    free: Vec<PageId>,
    n_evicted: usize,
    n_packed: usize,
    n_holed_rows: usize,
    n_other_draws: usize,
}

impl World {
    fn new(card: &Card, model: &Model) -> Self {
        let device = load_on(card, model, Dtype::F32);
        // What no token has is NaN.
        device.kv.slice().fill(&card.stream(), 0xff).expect("a fill");
        Self {
            random: Random(77),
            device,
            host: cpu(model),
            talks: (0..N_TALKS).map(|_| Talk::default()).collect(),
            free: (0..600).map(PageId).collect(),
            n_evicted: 0,
            n_packed: 0,
            n_holed_rows: 0,
            n_other_draws: 0,
        }
    }

    fn take_page(&mut self) -> PageId {
        let idx = self.random.below(self.free.len());
        self.free.swap_remove(idx)
    }

    fn evict(&mut self) {
        let talk = &mut self.talks[self.random.below(N_TALKS)];
        let n = talk.held.len();
        if n < 3 {
            return;
        }
        let start = self.random.below(n - 1);
        let n_most = if self.random.below(3) == 0 { n } else { 20 };
        let end = start + 1 + self.random.below((n - 1 - start).min(n_most));
        let closes_up = self.random.below(2) == 0 && talk.n_stretches() < N_STRETCHES_MAX;
        self.n_evicted += end - start;
        let free = talk.evict(start..end, closes_up);
        self.free.extend(free);
    }

    /// Cuts a context short, or ends it.
    fn cut(&mut self) {
        let talk = &mut self.talks[self.random.below(N_TALKS)];
        let n_kept = if self.random.below(2) == 0 { 0 } else { self.random.below(talk.held.len() + 1) };
        talk.held.truncate(n_kept);
        talk.has_state = false;
        let n_pages = talk.next_cell().div_ceil(PAGE_LEN);
        self.free.extend(talk.pages.drain(n_pages..));
        talk.n_told = if n_kept == 0 { 0 } else { talk.n_told.min(n_pages) };
    }

    /// A step in which about half of the contexts have a row.
    fn step(&mut self, samplers: &[Sampler]) {
        let vocab_size = self.host.limits().vocab_size;
        let (mut asked, mut freed) = (Vec::new(), Vec::new());
        for talk_idx in 0..N_TALKS {
            if self.random.below(2) == 0 {
                continue;
            }
            let start = self.talks[talk_idx].held.len();
            let is_of_head = self.talks[talk_idx].has_state && self.random.below(4) == 0;
            let n = match self.random.below(5) {
                _ if is_of_head => 0,
                0 => 1 + self.random.below(60),
                1 => 2 + self.random.below(6),
                _ => 1,
            };
            if start + n > N_TALK_TOKENS_MAX {
                continue;
            }
            while !is_of_head && self.talks[talk_idx].n_evicted() > 0 {
                let page = self.take_page();
                let Some(gone) = self.talks[talk_idx].pack(page) else {
                    self.free.push(page);
                    break;
                };
                freed.extend(gone);
                self.n_packed += 1;
            }
            // A few tokens over and over: the penalties tell.
            for token in tokens(&mut self.random, n, 12.min(vocab_size)) {
                let talk = &self.talks[talk_idx];
                let closed_up = talk.held.last().map_or(0, |last| last.closed_up);
                let held = LiveToken { token, number: talk.next_number(), cell: talk.next_cell(), closed_up };
                if held.cell / PAGE_LEN == talk.pages.len() {
                    let page = self.take_page();
                    self.talks[talk_idx].pages.push(page);
                }
                self.talks[talk_idx].held.push(held);
            }
            self.n_holed_rows += usize::from(self.talks[talk_idx].n_evicted() > 0);
            self.talks[talk_idx].prepare(start);
            asked.push((talk_idx, start, self.random.below(samplers.len()), self.random.below(3) == 0));
        }
        let talks = &self.talks;
        let row = |&(talk_idx, start, sampler, is_full): &(usize, usize, usize, bool)| {
            let talk = &talks[talk_idx];
            let position = talk.held.len() - 1;
            let drawn = OutputRequest { position, kind: OutputKind::Sample(&samplers[sampler]) };
            let full = is_full.then_some(OutputRequest { position, kind: OutputKind::Full });
            // The slot keeps no query.
            let attention = (is_full && start <= position)
                .then_some(OutputRequest { position, kind: OutputKind::Attention { layers: &[1, 0] } });
            let evicted = talk.evicted(start);
            Row {
                slot: SlotId(talk_idx as u32),
                tokens: (&talk.tokens).into(),
                start,
                pages: &talk.pages,
                n_same_pages: talk.n_told,
                n_pages_alike: 0,
                outputs: [drawn].into_iter().chain(full).chain(attention).collect(),
                input: Input::Known,
                evicted: evicted.map(|evicted| match start > position {
                    true => Evicted { packs: &[], ..evicted },
                    false => evicted,
                }),
                steered: None,
            }
        };
        let about = format!("{asked:?}");
        let rows = asked.iter().map(row).collect();
        self.n_other_draws += compare(&mut self.device, &mut self.host, Batch { copies: &[], rows }, &about);
        for (talk_idx, ..) in asked {
            let talk = &mut self.talks[talk_idx];
            talk.has_state = true;
            talk.n_told = talk.pages.len();
            talk.packs.clear();
        }
        self.free.extend(freed);
    }
}

#[test]
fn contexts_with_holes_agree_with_the_cpu() {
    let Some(card) = card() else { return };
    let penalized = Sampler { repetition_penalty: 1.7, frequency_penalty: 0.6, ..Sampler::greedy() };
    let samplers = [
        Sampler::greedy(),
        penalized.clone(),
        Sampler { penalty_last_n: Some(20), ..penalized.clone() },
        Sampler { temperature: 1.0, seed: 5, presence_penalty: 1.0, ..penalized },
        Sampler { temperature: 0.8, seed: 9, top_p: Some(0.9), ..Sampler::greedy() },
    ];
    let random = random_models().into_iter().filter(|model| model.config.windows.iter().all(Option::is_none));
    for model in random.filter(|model| model.config.n_positions > 500).chain([bundled("tiny")]) {
        let mut world = World::new(&card, &model);
        assert_eq!(world.device.limits().n_stretches_max, N_STRETCHES_MAX);
        let n_steps = if model.name == "tiny" { 500 } else { 120 };
        for _ in 0..n_steps {
            match world.random.below(12) {
                0 => world.cut(),
                1..=5 => world.evict(),
                6 => world.device.steps.forget_slots(),
                _ => {}
            }
            world.step(&samplers);
        }
        let World { n_evicted, n_packed, n_holed_rows, n_other_draws, .. } = world;
        println!(
            "{}: {n_evicted} tokens evicted, {n_packed} packs, {n_holed_rows} rows among holes, {n_other_draws} other \
             draws in {n_steps} steps",
            model.name
        );
        assert!(n_evicted > 500 && n_packed > 10 && n_holed_rows > 100);
        assert!(n_other_draws <= 4, "{n_other_draws} draws of other tokens");
    }
}

/// Contexts with and without holes decode together, tokens are taken out between two tokens, and what is drawn is the same
/// whether or not a step is submitted before the one in front of it is collected.
#[test]
fn submitting_ahead_among_holes_changes_nothing() {
    const N_PAGES: usize = 20;
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let samplers = [
        Sampler::greedy(),
        Sampler { temperature: 0.9, seed: 3, ..Sampler::greedy() },
        Sampler {
            temperature: 0.9,
            seed: 4,
            repetition_penalty: 1.5,
            penalty_last_n: Some(40),
            ..Sampler::greedy()
        },
        Sampler { repetition_penalty: 1.3, presence_penalty: 0.3, ..Sampler::greedy() },
    ];
    let mut seen: Vec<Vec<(Token, f32)>> = Vec::new();
    for is_ahead in [false, true] {
        let mut backend = load_on(&card, &model, Dtype::F32);
        let mut random = Random(4);
        let mut drawn = Vec::new();
        let mut talks: Vec<Talk> = (0..samplers.len() * 2)
            .map(|idx| {
                let prompt = tokens(&mut random, 60 + 7 * idx, model.config.vocab_size);
                let held = prompt.into_iter().enumerate();
                let held =
                    held.map(|(number, token)| LiveToken { token, number, cell: number, closed_up: 0 });
                let pages = (0..N_PAGES).map(|page| PageId((idx * N_PAGES + page) as u32)).collect();
                let mut talk = Talk { held: held.collect(), pages, ..Talk::default() };
                talk.prepare(0);
                talk
            })
            .collect();
        let submit = |backend: &mut CudaBackend, talks: &[Talk], n_new: usize, is_known: bool| {
            let rows = talks.iter().enumerate().map(|(idx, talk)| {
                let n_tokens = talk.tokens.len();
                let start = n_tokens - n_new * usize::from(is_known);
                let position = n_tokens - usize::from(is_known);
                Row {
                    slot: SlotId(idx as u32),
                    tokens: (&talk.tokens).into(),
                    start,
                    pages: &talk.pages,
                    n_same_pages: 0,
                    n_pages_alike: 0,
                    outputs: [OutputRequest { position, kind: OutputKind::Sample(&samplers[idx % 4]) }]
                        .into_iter()
                        .collect(),
                    input: if is_known { Input::Known } else { Input::Drawn(SlotId(idx as u32)) },
                    evicted: talk.evicted(start),
                    steered: None,
                }
            });
            backend.submit(&Batch { copies: &[], rows: rows.collect() }).expect("a step");
        };
        let mut collect = |backend: &mut CudaBackend, talks: &mut [Talk]| {
            for (talk, output) in talks.iter_mut().zip(backend.collect().expect("a step").outputs) {
                let Output::Sampled(candidate) = output else { panic!("{output:?}") };
                drawn.push((candidate.token, candidate.logprob));
                let closed_up = talk.held.last().map_or(0, |last| last.closed_up);
                let held = LiveToken {
                    token: candidate.token,
                    number: talk.next_number(),
                    cell: talk.next_cell(),
                    closed_up,
                };
                talk.held.push(held);
                talk.prepare(talk.held.len() - 1);
            }
        };
        for (idx, talk) in talks.iter().enumerate() {
            let row = Row {
                slot: SlotId(idx as u32),
                tokens: (&talk.tokens).into(),
                start: 0,
                pages: &talk.pages,
                n_same_pages: 0,
                n_pages_alike: 0,
                outputs: smallvec![],
                input: Input::Known,
                evicted: None,
                steered: None,
            };
            backend.forward(&Batch { copies: &[], rows: vec![row] }).expect("a prompt");
        }
        // The last token is asked about once what was taken out is gone.
        for round in 0..12 {
            for (idx, talk) in talks.iter_mut().enumerate().filter(|(idx, _)| idx % 3 != 2) {
                let (start, end) = (4 + idx, 4 + idx + 5 + round % 3);
                talk.evict(start..end, idx % 2 == 0);
                talk.prepare(talk.held.len() - 1);
                // Pages that came free are not handed out again here.
                let first = talk.pages.iter().map(|page| page.0).max().unwrap_or(0) + 1;
                let n_missing = N_PAGES.saturating_sub(talk.pages.len());
                let limit = ((idx + 1) * N_PAGES) as u32;
                talk.pages.extend((first..limit).take(n_missing).map(PageId));
            }
            submit(&mut backend, &talks, 1, true);
            for step in 0..7 {
                match is_ahead && step < 6 {
                    true => {
                        submit(&mut backend, &talks, 0, false);
                        collect(&mut backend, &mut talks);
                    }
                    false => {
                        collect(&mut backend, &mut talks);
                        if step < 6 {
                            submit(&mut backend, &talks, 1, true);
                        }
                    }
                }
            }
        }
        seen.push(drawn);
    }
    assert_eq!(seen[0].len(), seen[1].len());
    for (idx, (plain, ahead)) in seen[0].iter().zip(&seen[1]).enumerate() {
        assert!(plain.0 == ahead.0 && (plain.1 - ahead.1).abs() <= 1e-3, "draw {idx}: {plain:?} {ahead:?}");
    }
}
