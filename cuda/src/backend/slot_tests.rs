//! What stays on the card of contexts, against the CPU, which is told everything in every step.

use std::collections::BTreeSet;

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Input, OutputKind, OutputRequest, PageCopy, Row, SlotId, Token};
use trellis_engine::cpu::CpuBackend;
use trellis_engine::model::Dtype;
use trellis_engine::sampling::Sampler;

use super::beside_cpu::compare;
use super::tests::{bundled, card, cpu, load_on, tokens};
use super::*;
use crate::memory::SLAB_BYTES;
use crate::testing::Random;

const N_TALKS: usize = 8;
const N_TALK_TOKENS_MAX: usize = 150;

/// A context as an engine would keep it.
struct Talk {
    tokens: Vec<Token>,
    pages: Vec<PageId>,
    /// Pages from the first on that the backend was told and that are as they were.
    n_told: usize,
    /// Whether the state of the last token was kept.
    has_state: bool,
}

struct World {
    random: Random,
    device: CudaBackend,
    host: CpuBackend,
    talks: Vec<Talk>,
    free: Vec<PageId>,
    n_moved: usize,
    n_heads: usize,
    n_other_draws: usize,
}

impl World {
    fn one_of(&mut self) -> usize {
        self.random.below(self.talks.len())
    }

    fn take_page(&mut self) -> PageId {
        let idx = self.random.below(self.free.len());
        self.free.swap_remove(idx)
    }

    /// Moves some pages of a context, through the memory of the host or on the device; or nowhere, by way of the host.
    fn move_pages(&mut self) {
        let talk_idx = self.one_of();
        let n_pages = self.talks[talk_idx].pages.len();
        if n_pages == 0 {
            return;
        }
        let (page_idx, way) = (self.random.below(n_pages), self.random.below(3));
        let from = self.talks[talk_idx].pages[page_idx];
        let to = if way == 0 { from } else { self.take_page() };
        for backend in [&mut self.device as &mut dyn Backend, &mut self.host] {
            match way {
                2 => backend.move_pages(&[(from, to)]).expect("a move"),
                _ => {
                    backend.swap_out(&[(from, HostPageId(3))]).expect("a way out");
                    backend.swap_in(&[(HostPageId(3), to)]).expect("a way back");
                    if self.n_moved.is_multiple_of(3) {
                        // While the copy is on its way back.
                        let free: Vec<HostPageId> =
                            (0..backend.limits().n_host_pages as u32).map(HostPageId).collect();
                        assert!(backend.release_host_pages(&free, u64::MAX) > 0);
                    }
                }
            }
        }
        let talk = &mut self.talks[talk_idx];
        if to != from {
            talk.pages[page_idx] = to;
            talk.n_told = talk.n_told.min(page_idx);
            self.free.push(from);
        }
        self.n_moved += 1;
    }

    /// A page that is copied before the next step, as if another context held it too.
    fn copy_page(&mut self) -> Option<PageCopy> {
        let talk_idx = self.one_of();
        let n_pages = self.talks[talk_idx].pages.len();
        if n_pages == 0 {
            return None;
        }
        let (page_idx, dst) = (self.random.below(n_pages), self.take_page());
        let talk = &mut self.talks[talk_idx];
        let src = std::mem::replace(&mut talk.pages[page_idx], dst);
        talk.n_told = talk.n_told.min(page_idx);
        Some(PageCopy { src, dst })
    }

    /// Cuts a context short, or ends it; another begins in its place.
    fn cut(&mut self) {
        let talk_idx = self.one_of();
        let n_tokens = self.talks[talk_idx].tokens.len();
        let n_kept = self.random.below(n_tokens + 1);
        let ends = self.random.below(2) == 0;
        let talk = &mut self.talks[talk_idx];
        talk.tokens.truncate(if ends { 0 } else { n_kept });
        talk.has_state = false;
        self.free.extend(talk.pages.drain(talk.tokens.len().div_ceil(PAGE_LEN)..));
        talk.n_told = if ends { 0 } else { talk.n_told.min(talk.pages.len()) };
    }

    /// A step in which about half of the contexts have a row.
    fn step(&mut self, samplers: &[Sampler]) {
        let copies: Vec<PageCopy> =
            (self.random.below(3) == 0).then(|| self.copy_page()).flatten().into_iter().collect();
        let vocab_size = self.host.limits().vocab_size;
        let mut asked = Vec::new();
        for talk_idx in 0..N_TALKS {
            if self.random.below(2) == 0 {
                continue;
            }
            let start = self.talks[talk_idx].tokens.len();
            let is_of_head = self.talks[talk_idx].has_state && self.random.below(3) == 0;
            if !is_of_head {
                if start > N_TALK_TOKENS_MAX {
                    continue;
                }
                let n = if start > 0 && self.random.below(4) > 0 { 1 } else { 1 + self.random.below(40) };
                // A few tokens over and over: the penalties tell.
                let added = tokens(&mut self.random, n, 12.min(vocab_size));
                self.talks[talk_idx].tokens.extend(added);
                while self.talks[talk_idx].pages.len() * PAGE_LEN < start + n {
                    let page = self.take_page();
                    self.talks[talk_idx].pages.push(page);
                }
            }
            self.n_heads += usize::from(is_of_head);
            let has_pages = !is_of_head || self.random.below(3) > 0;
            asked.push((talk_idx, start, has_pages, self.random.below(samplers.len())));
        }
        let talks = &self.talks;
        let row = |&(talk_idx, start, has_pages, sampler): &(usize, usize, bool, usize)| {
            let Talk { tokens, pages, n_told, .. } = &talks[talk_idx];
            let position = tokens.len() - 1;
            let request = |kind| OutputRequest { position, kind };
            Row {
                slot: SlotId(talk_idx as u32),
                tokens: tokens.into(),
                start,
                pages: if has_pages { pages } else { &[] },
                n_same_pages: if has_pages { *n_told } else { 0 },
                n_pages_alike: 0,
                outputs: [request(OutputKind::Sample(&samplers[sampler])), request(OutputKind::Top { n: 3 })]
                    .into_iter()
                    .collect(),
                input: Input::Known,
                evicted: None,
                steered: None,
            }
        };
        let about = format!("{asked:?}");
        let rows = asked.iter().map(row).collect();
        self.n_other_draws +=
            compare(&mut self.device, &mut self.host, Batch { copies: &copies, rows }, &about);
        for (talk_idx, _, has_pages, _) in asked {
            let talk = &mut self.talks[talk_idx];
            talk.has_state = true;
            if has_pages {
                talk.n_told = talk.pages.len();
            }
        }
        self.free.extend(copies.iter().map(|copy| copy.src));
    }
}

#[test]
fn what_stays_on_the_card_is_what_the_host_has() {
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let penalized = Sampler { repetition_penalty: 1.7, frequency_penalty: 0.6, ..Sampler::greedy() };
    let samplers = [
        Sampler::greedy(),
        penalized.clone(),
        Sampler { penalty_last_n: Some(20), ..penalized.clone() },
        Sampler { temperature: 1.0, seed: 5, presence_penalty: 1.0, ..penalized },
    ];
    let talk = |_| Talk { tokens: Vec::new(), pages: Vec::new(), n_told: 0, has_state: false };
    let mut world = World {
        random: Random(21),
        device: load_on(&card, &model, Dtype::F32),
        host: cpu(&model),
        talks: (0..N_TALKS).map(talk).collect(),
        free: (0..200).map(PageId).collect(),
        n_moved: 0,
        n_heads: 0,
        n_other_draws: 0,
    };
    let n_steps = 400;
    for _ in 0..n_steps {
        match world.random.below(12) {
            0 | 1 => world.cut(),
            2..=5 => world.move_pages(),
            6 => world.device.steps.forget_slots(),
            _ => {}
        }
        world.step(&samplers);
    }
    let World { n_moved, n_heads, n_other_draws, .. } = world;
    println!(
        "{n_moved} pages moved, {n_heads} questions to the head, {n_other_draws} other draws in {n_steps} steps"
    );
    assert!(n_moved > 50 && n_heads > 100, "{n_moved} {n_heads}");
    assert!(n_other_draws <= 2, "{n_other_draws} draws of other tokens");
}

#[test]
fn pages_that_are_gathered_have_arrived_before() {
    const N_FAR: usize = 3;
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let page_bytes = CudaBackend::page_bytes(&model.config, Dtype::F32) as usize;
    let n_slab_pages = SLAB_BYTES / page_bytes;
    let n_near = n_slab_pages / 2;
    let options = CudaOptions {
        dtype: Some(Dtype::F32),
        kv_bytes: (n_near * page_bytes) as u64,
        kv_bytes_max: (n_near * page_bytes) as u64,
        kv_host_bytes: (2 * n_slab_pages * page_bytes) as u64,
        n_rows_max: 16,
        n_tokens_max: 64,
    };
    let mut device = CudaBackend::load(&card, &model, &options, &|_, _| {}).expect("the model loads");
    let mut random = Random(22);
    let host = |idx: usize| HostPageId(idx as u32);
    let near: Vec<HostPageId> = (0..n_near).map(host).collect();
    let far: Vec<HostPageId> = (0..N_FAR).map(|idx| host(n_slab_pages + idx)).collect();
    let free: Vec<HostPageId> =
        (0..2 * n_slab_pages).map(host).filter(|page| !near.contains(page) && !far.contains(page)).collect();
    for round in 0..8 {
        let bytes: Vec<u8> = (0..n_near * page_bytes).map(|_| random.next() as u8).collect();
        KvBytes::write(&mut device, &near, &bytes).expect("written");
        KvBytes::write(&mut device, &far, &vec![0; N_FAR * page_bytes]).expect("written");
        let back: Vec<_> = near.iter().map(|&page| (page, PageId(page.0))).collect();
        device.swap_in(&back).expect("a way back");
        // What the stream has to do before the far pages are there.
        let out: Vec<_> = near.iter().map(|&page| (PageId(page.0), page)).collect();
        for _ in 0..50 {
            device.swap_out(&out).expect("a way out");
        }
        let last: Vec<_> = far.iter().enumerate().map(|(idx, &page)| (PageId(idx as u32), page)).collect();
        device.swap_out(&last).expect("a way out");
        let moves = device.gather_host_pages(&free, u64::MAX);
        assert_eq!(
            moves.iter().map(|&(from, _)| from).collect::<BTreeSet<_>>(),
            far.iter().copied().collect()
        );
        for (from, to) in moves {
            assert!((to.0 as usize) < n_slab_pages, "{to:?} is in the slab of the others");
            let mut got = Vec::new();
            KvBytes::read(&mut device, &[KvPlace::Host(to)], &mut got).expect("read");
            let idx = from.0 as usize - n_slab_pages;
            assert!(got == bytes[idx * page_bytes..][..page_bytes], "{from:?} of round {round}");
        }
    }
}
