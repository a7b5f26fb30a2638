//! Decoding ahead of the host.
//!
//! The token that a step draws stays on the device as well. When every row of a step is expected to go on with its
//! token, the next step is put into the stream at once, before the host has seen the tokens: a *guess* of what the
//! engine will ask for. Whatever the host does between two steps, it does while the device works.
//!
//! A guess that is not asked for does no harm. It writes keys and values of one position into pages that its contexts
//! held alone, past everything they have computed; a position is read only after a step wrote it for whoever reads it,
//! and the stream keeps all writes in order.

use std::collections::HashMap;

use trellis_engine::batch::{FollowUp, Output, OutputKind, PageId, Row, SlotId, Token};
use trellis_engine::sampling::Sampler;

use crate::ops::attention::PAGE_LEN;
use crate::step::StepRow;
use crate::steps::InFlight;

/// A step that was put into the stream unasked.
#[derive(Debug)]
pub(crate) struct Guess {
    rows: HashMap<SlotId, GuessedRow>,
    pub(crate) in_flight: InFlight,
}

#[derive(Debug)]
struct GuessedRow {
    /// Among the guess's rows.
    idx: usize,
    position: usize,
    /// Of the context, up to the one that takes the position.
    pages: Vec<PageId>,
    sampler: Sampler,
    /// The token at the position, once the host knows it.
    token: Option<Token>,
}

/// The rows that follow a batch when all goes on as expected; `None` when that is not expected of every row, or there
/// is no place for a token.
pub(crate) fn successors<'a>(rows: &'a [Row<'a>]) -> Option<Vec<StepRow<'a>>> {
    let successor = |row: &'a Row<'a>| match row.follow_up {
        FollowUp::Expected => StepRow::successor(row),
        FollowUp::Unknown => None,
    };
    rows.iter().map(successor).collect()
}

impl Guess {
    /// Notes what was put into the stream: the successors of these rows.
    pub(crate) fn new(rows: &[Row<'_>], in_flight: InFlight) -> Self {
        let guessed = |(idx, row): (usize, &Row<'_>)| {
            let OutputKind::Sample(sampler) = row.outputs.last()?.kind else { return None };
            let position = row.tokens.len();
            let pages = row.pages[..=position / PAGE_LEN].to_vec();
            Some((row.slot, GuessedRow { idx, position, pages, sampler: sampler.clone(), token: None }))
        };
        Self { rows: rows.iter().enumerate().filter_map(guessed).collect(), in_flight }
    }

    /// Takes in what the rows before the guess drew.
    pub(crate) fn learn(&mut self, slot: SlotId, outputs: &[Output]) {
        if let (Some(row), Some(Output::Sampled(drawn))) = (self.rows.get_mut(&slot), outputs.last()) {
            row.token = Some(drawn.token);
        }
    }

    /// The row of the guess that computes exactly what `row` asks for.
    pub(crate) fn row(&self, row: &Row<'_>) -> Option<usize> {
        let guessed = self.rows.get(&row.slot)?;
        let [request] = &row.outputs[..] else { return None };
        let OutputKind::Sample(sampler) = request.kind else { return None };
        let is_same = row.start == guessed.position
            && row.tokens.len() == guessed.position + 1
            && Some(row.tokens[guessed.position]) == guessed.token
            && row.pages.starts_with(&guessed.pages)
            && request.position == guessed.position
            && *sampler == guessed.sampler;
        is_same.then_some(guessed.idx)
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::batch::{Candidate, OutputRequest};

    use super::*;

    fn row<'a>(slot: u32, tokens: &'a [Token], start: usize, sampler: &'a Sampler) -> Row<'a> {
        Row {
            slot: SlotId(slot),
            tokens,
            start,
            pages: (0..tokens.len() as u32 / 16 + 1).map(|idx| PageId(10 * slot + idx)).collect(),
            outputs: vec![OutputRequest { position: tokens.len() - 1, kind: OutputKind::Sample(sampler) }],
            follow_up: FollowUp::Expected,
        }
    }

    fn drawn(token: Token) -> Output {
        Output::Sampled(Candidate { token, logprob: -1.0 })
    }

    #[test]
    fn a_guess_answers_exactly_what_was_guessed() {
        let sampler = Sampler { temperature: 1.0, seed: 7, ..Sampler::greedy() };
        let (a, b) = ([1, 2, 3], [4; 16]);
        let before = [row(0, &a, 2, &sampler), row(1, &b, 15, &sampler)];
        assert_eq!(successors(&before).expect("both go on").len(), 2);
        let mut guess = Guess::new(&before, InFlight::default());
        guess.learn(SlotId(0), &[drawn(50)]);
        guess.learn(SlotId(1), &[drawn(60)]);

        let (next_a, next_b) = ([1, 2, 3, 50], [&b[..], &[60]].concat());
        assert_eq!(guess.row(&row(0, &next_a, 3, &sampler)), Some(0));
        assert_eq!(guess.row(&row(1, &next_b, 16, &sampler)), Some(1), "in a page of its own");

        assert_eq!(guess.row(&row(0, &[1, 2, 3, 51], 3, &sampler)), None, "another token");
        assert_eq!(guess.row(&row(0, &next_a, 2, &sampler)), None, "cut back");
        assert_eq!(guess.row(&row(2, &next_a, 3, &sampler)), None, "another context");
        let other = Sampler { seed: 8, ..sampler.clone() };
        assert_eq!(guess.row(&row(0, &next_a, 3, &other)), None, "another sampler");
        let mut moved = row(0, &next_a, 3, &sampler);
        moved.pages[0] = PageId(99);
        assert_eq!(guess.row(&moved), None, "another page");
        let mut asked = row(0, &next_a, 3, &sampler);
        asked.outputs.push(OutputRequest { position: 3, kind: OutputKind::Full });
        assert_eq!(guess.row(&asked), None, "more is asked");
        let failed = Guess::new(&before, InFlight::default());
        assert_eq!(failed.row(&row(0, &next_a, 3, &sampler)), None, "what was drawn is not known");
    }

    #[test]
    fn nothing_is_guessed_unless_all_go_on() {
        let sampler = Sampler::greedy();
        let (a, full) = ([1, 2, 3], [4; 16]);
        let mut last = row(0, &a, 2, &sampler);
        last.follow_up = FollowUp::Unknown;
        assert!(successors(&[row(1, &a, 2, &sampler), last]).is_none());
        let mut no_place = row(0, &full, 15, &sampler);
        no_place.pages.truncate(1);
        assert!(successors(&[no_place]).is_none());
    }
}
