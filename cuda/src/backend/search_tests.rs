//! Beam searches on a card against the CPU's over the same weights: candidates of the model's own probabilities, and of what
//! samplers and masks make of them.

use std::sync::Arc;

use trellis_engine::batch::{Input, OutputKind, OutputRequest, PageCopy, PageId, Row, SlotId, Token};
use trellis_engine::model::Dtype;
use trellis_engine::sampling::beams::{BeamSettings, Finished, Search};
use trellis_engine::sampling::{Sampler, TokenMask};

use trellis_engine::backend::PAGE_LEN;

use super::tests::{bundled, card, cpu, load_on, tokens};
use super::*;
use crate::testing::Random;

const N_PROMPT: usize = 53;
/// Log-probabilities of sixteen tokens, each as far apart as float32 allows.
const TOLERANCE: f32 = 1e-3;

/// What candidates are ranked by.
#[derive(Default)]
struct By {
    sampler: Option<Arc<Sampler>>,
    within: Option<Arc<TokenMask>>,
}

/// A hypothesis, or the prompt, with its pages.
#[derive(Clone)]
struct Hypothesis {
    tokens: Vec<Token>,
    pages: Vec<PageId>,
}

/// Searches as the engine does: what lives rides together, hypotheses share full pages, and the last page of each is copied.
fn search(
    backend: &mut impl Backend,
    prompt: &[Token],
    settings: &BeamSettings,
    by: &By,
    vocab_size: usize,
) -> Vec<Finished> {
    let mut n_pages = 0;
    let mut page = || {
        n_pages += 1;
        PageId(n_pages - 1)
    };
    let pages: Vec<PageId> = (0..=prompt.len() / PAGE_LEN).map(|_| page()).collect();
    let lead = row(SlotId(60), &prompt[..prompt.len() - 1], 0, &pages, None);
    backend.forward(&Batch { copies: &[], rows: vec![lead] }).expect("it runs");
    let root = Hypothesis { tokens: prompt.to_vec(), pages };
    let mut search = Search::new(settings.clone());
    let mut rows: Vec<Hypothesis> = Vec::new();
    while !search.is_over() {
        let (mut copies, mut next) = (Vec::new(), Vec::new());
        for asked in search.rows() {
            let mut held = asked.parent.map_or(&root, |parent| &rows[parent]).clone();
            held.tokens.extend(&asked.appended);
            let last = (held.tokens.len() - 1) / PAGE_LEN;
            let own = page();
            match held.pages.get_mut(last) {
                Some(shared) => {
                    copies.push(PageCopy { src: *shared, dst: own });
                    *shared = own;
                }
                None => held.pages.push(own),
            }
            held.pages.truncate(last + 1);
            next.push(held);
        }
        rows = next;
        let n = search.n_top(vocab_size);
        let kind = || match (&by.sampler, &by.within) {
            (None, None) => OutputKind::Top { n },
            (sampler, within) => OutputKind::Ranked {
                sampler: sampler.as_ref().expect("a mask goes with a sampler"),
                within: within.as_ref(),
                n,
            },
        };
        let asked = rows.iter().enumerate().map(|(idx, held)| {
            row(SlotId(idx as u32), &held.tokens, held.tokens.len() - 1, &held.pages, Some(kind()))
        });
        let batch = Batch { copies: &copies, rows: asked.collect() };
        let outputs = backend.forward(&batch).expect("it runs");
        let lists = outputs.iter().map(|output| match output {
            Output::Top { candidates, .. } | Output::Ranked(candidates) => candidates.as_slice(),
            other => panic!("{other:?}"),
        });
        let lists: Vec<_> = lists.collect();
        assert!(by.sampler.is_none() || outputs.iter().all(|output| matches!(output, Output::Ranked(_))));
        search.advance(&lists);
    }
    search.best(settings.n_beams)
}

fn row<'a>(
    slot: SlotId,
    tokens: &'a [Token],
    start: usize,
    pages: &'a [PageId],
    kind: Option<OutputKind<'a>>,
) -> Row<'a> {
    let position = tokens.len() - 1;
    Row {
        slot,
        tokens: tokens.into(),
        start,
        pages,
        n_same_pages: 0,
        n_pages_alike: 0,
        outputs: kind.into_iter().map(|kind| OutputRequest { position, kind }).collect(),
        input: Input::Known,
        evicted: None,
        steered: None,
    }
}

#[test]
fn searches_find_what_they_find_on_the_cpu() {
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let vocab_size = model.config.vocab_size;
    let mut random = Random(41);
    let prompt = tokens(&mut random, N_PROMPT, vocab_size);
    let mut mask = TokenMask::all(vocab_size);
    tokens(&mut random, vocab_size / 3, vocab_size).into_iter().for_each(|token| mask.set(token, false));
    let mask = Arc::new(mask);
    let penalties = Sampler { repetition_penalty: 1.3, presence_penalty: 0.2, ..Sampler::greedy() };
    let given = Sampler {
        bias: (0..5).map(|idx| (prompt[idx], 1.5)).collect(),
        mask: Some(mask.clone()),
        ..penalties.clone()
    };
    let all = [
        By::default(),
        By { sampler: Some(Arc::new(penalties)), within: None },
        By { sampler: Some(Arc::new(given)), within: None },
        By { sampler: Some(Arc::new(Sampler::greedy())), within: Some(mask) },
    ];
    let mut on_card = load_on(&card, &model, Dtype::F32);
    let mut on_cpu = cpu(&model);
    for (by, n_beams) in all.iter().zip([16, 4, 7, 4]) {
        let settings = BeamSettings { stop_tokens: vec![1, 2], ..BeamSettings::of(n_beams, 16) };
        let found = search(&mut on_card, &prompt, &settings, by, vocab_size);
        let expected = search(&mut on_cpu, &prompt, &settings, by, vocab_size);
        assert_eq!(found.len(), expected.len());
        for (idx, (found, wanted)) in found.iter().zip(&expected).enumerate() {
            let scores = (found.score, wanted.score);
            assert!((scores.0 - scores.1).abs() <= TOLERANCE, "{n_beams} beams, {idx}: {scores:?}");
            let is_near = |other: &Finished| (other.score - wanted.score).abs() <= 2.0 * TOLERANCE;
            if expected.iter().filter(|other| is_near(other)).count() == 1 {
                assert_eq!(found.tokens, wanted.tokens, "{n_beams} beams, {idx}");
            }
        }
    }
    assert_eq!(on_card.steps.n_by_host(), 0, "the card makes all lists");
}
