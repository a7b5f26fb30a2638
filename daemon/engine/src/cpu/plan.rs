//! What a batch asks for, laid out token by token.

use crate::backend::{Limits, PAGE_LEN};
use crate::batch::{Batch, Evicted, Input, OutputKind, PageId, Row, SlotId, Token, Tokens};
use crate::sampling::Before;
use crate::steering::Steering;

/// One token to compute.
#[derive(Clone, Copy)]
pub(super) struct PlacedToken<'a> {
    pub(super) token: Token,
    /// What its key and its queries are rotated by.
    pub(super) rotation: usize,
    /// Cells of its context before its own.
    pub(super) cell: usize,
    /// Pages of its context.
    pub(super) pages: &'a [PageId],
    /// For a context from which tokens were evicted, and for a node of a tree of guesses.
    pub(super) evicted: Option<&'a Evicted<'a>>,
    /// What is added to what layers make of it.
    pub(super) steering: Option<&'a Steering>,
}

impl PlacedToken<'_> {
    /// The page that takes it, and where in that.
    pub(super) fn page(&self) -> (PageId, usize) {
        (self.pages[self.cell / PAGE_LEN], self.cell % PAGE_LEN)
    }
}

/// Where the hidden state of a token comes from.
#[derive(Clone, Copy)]
pub(super) enum Hidden {
    /// Out of the layers; index of the token among those of the step.
    Computed(usize),
    /// It was kept for this slot.
    Kept(SlotId),
}

/// Everything that is asked about one token's place.
pub(super) struct Question<'a> {
    /// The row that asks.
    pub(super) row_idx: usize,
    pub(super) hidden: Hidden,
    /// The slot that keeps the state.
    pub(super) keeper: Option<SlotId>,
    /// Tokens of the context up to this place.
    pub(super) history: Tokens<'a>,
    /// Tokens that were evicted.
    pub(super) n_evicted: usize,
    /// What to return, with the index among all outputs of the step.
    pub(super) requests: Vec<(usize, &'a OutputKind<'a>)>,
}

impl Question<'_> {
    /// What a draw there has before it.
    pub(super) fn before(&self) -> Before {
        Before { n_tokens: self.history.len(), n_evicted: self.n_evicted }
    }

    pub(super) fn needs_logits(&self) -> bool {
        self.requests
            .iter()
            .any(|(_, kind)| !matches!(kind, OutputKind::Embedding | OutputKind::Hidden { .. }))
    }
}

/// A hidden state that is asked for between layers.
#[derive(Clone, Copy)]
pub(super) struct Tap {
    /// Layers before it.
    pub(super) n_layers: usize,
    /// Index of the token among those of the step.
    pub(super) token_idx: usize,
    /// Its place among all outputs of the step.
    pub(super) output_idx: usize,
}

/// The attention of a token that is asked for.
#[derive(Clone, Copy)]
pub(super) struct Weighed<'a> {
    /// Index of the token among those of the step.
    pub(super) token_idx: usize,
    /// Tokens that it sees where no layer has a window.
    pub(super) n_tokens: usize,
    pub(super) layers: &'a [usize],
    /// Its place among all outputs of the step.
    pub(super) output_idx: usize,
}

/// The tokens of a batch and the questions about them.
pub(super) struct TokenLayout<'a> {
    pub(super) places: Vec<PlacedToken<'a>>,
    /// In the order of their layers.
    pub(super) taps: Vec<Tap>,
    pub(super) weighed: Vec<Weighed<'a>>,
    /// In the order of their tokens; one for each token that is asked about.
    pub(super) questions: Vec<Question<'a>>,
    pub(super) n_outputs: usize,
    /// The place of each row's first output among all of the step.
    pub(super) first_outputs: Vec<usize>,
}

impl<'a> TokenLayout<'a> {
    /// # Panics
    /// The batch breaks its own rules or the limits, which is the scheduler's fault.
    pub(super) fn new(batch: &'a Batch<'_>, limits: &Limits, n_layers_max: usize) -> Self {
        assert!(batch.rows.len() <= limits.n_rows_max, "{} rows", batch.rows.len());
        let (taps, weighed) = (Vec::new(), Vec::new());
        let first_outputs = Vec::with_capacity(batch.rows.len());
        let mut plan =
            Self { places: Vec::new(), taps, weighed, questions: Vec::new(), n_outputs: 0, first_outputs };
        for (row_idx, row) in batch.rows.iter().enumerate() {
            check_row(row, limits);
            plan.first_outputs.push(plan.n_outputs);
            let first_idx = plan.places.len();
            let evicted = row.evicted.as_ref();
            let (rotation, cell) = evicted.map_or((row.start, row.start), |it| (it.rotation, it.cell));
            let tokens = row.tokens.iter_range(row.start..row.tokens.len()).enumerate();
            let steering_of = |position: usize| {
                row.steered.filter(|steered| position >= steered.from).map(|steered| steered.steering)
            };
            plan.places.extend(tokens.map(|(idx, token)| PlacedToken {
                token,
                rotation: rotation + idx,
                cell: cell + idx,
                pages: row.pages,
                evicted,
                steering: steering_of(row.start + idx),
            }));
            let first_question = plan.questions.len();
            for request in &row.outputs {
                let (position, n_tokens) = (request.position, row.tokens.len());
                let hidden = match position.checked_sub(row.start) {
                    Some(idx) if position < n_tokens => Hidden::Computed(first_idx + idx),
                    None if row.start == n_tokens && position + 1 == n_tokens => Hidden::Kept(row.slot),
                    _ => panic!("output at position {position} of {}..{n_tokens}", row.start),
                };
                let questions = &mut plan.questions[first_question..];
                let output_idx = plan.n_outputs;
                plan.n_outputs += 1;
                // That after all layers comes with the others.
                if let OutputKind::Hidden { n_layers } = request.kind
                    && n_layers < n_layers_max
                {
                    let Hidden::Computed(token_idx) = hidden else { panic!("no state of a layer is kept") };
                    plan.taps.push(Tap { n_layers, token_idx, output_idx });
                    continue;
                }
                if let OutputKind::Attention { layers } = request.kind {
                    let Hidden::Computed(token_idx) = hidden else { panic!("no query is kept") };
                    plan.weighed.push(Weighed { token_idx, n_tokens: position + 1, layers, output_idx });
                    continue;
                }
                let asked = (output_idx, &request.kind);
                let history = row.tokens.first(position + 1);
                match questions.binary_search_by_key(&history.len(), |question| question.history.len()) {
                    Ok(idx) => questions[idx].requests.push(asked),
                    Err(idx) => {
                        let is_kept = position + 1 == n_tokens && (row.slot.0 as usize) < limits.n_states;
                        let keeper = is_kept.then_some(row.slot);
                        let n_evicted = evicted.map_or(0, |it| it.n_evicted);
                        let requests = vec![asked];
                        let question = Question { row_idx, hidden, keeper, history, n_evicted, requests };
                        plan.questions.insert(first_question + idx, question);
                    }
                }
            }
        }
        plan.taps.sort_by_key(|tap| tap.n_layers);
        assert!(plan.places.len() <= limits.n_tokens_max, "{} tokens", plan.places.len());
        plan
    }
}

fn check_row(row: &Row<'_>, limits: &Limits) {
    assert_eq!(row.input, Input::Known, "one step is under way at a time");
    let n_tokens = row.tokens.len();
    assert!(row.start <= n_tokens, "a row of {n_tokens} tokens starts at {}", row.start);
    if row.start == n_tokens {
        let slot = row.slot.0 as usize;
        assert!(slot < limits.n_states && n_tokens > 0, "nothing is kept for slot {slot}");
        return;
    }
    assert!(n_tokens <= limits.n_positions_max, "{n_tokens} positions");
    let n_cells = row.evicted.map_or(n_tokens, |it| it.cell + n_tokens - row.start);
    assert!(row.pages.len() * PAGE_LEN >= n_cells, "{} pages for {n_cells} cells", row.pages.len());
    assert!(row.pages.iter().all(|page| (page.0 as usize) < limits.n_pages), "page out of range");
}
