//! What the rows of a step ask for together. A row for which the step carries too little waits for the next one: a device
//! that had to be waited for would hold up all the others.

use std::collections::HashSet;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use super::histories::n_history_pages_of;
use super::{ContextState, Plan, Scheduler};
use crate::backend::{AskLimits, Limits};
use crate::batch::{OutputKind, OutputRequest, Requests, Within};
use crate::job::Stage;
use crate::sampling::Sampler;
use crate::steering::Steered;

/// Bytes of a bias, and of the mask's part for so many tokens.
const BIAS_BYTES: usize = 8;
const N_MASK_TOKENS_PER_BYTE: usize = 8;

/// What a step carries for its outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    whole_bytes: usize,
    n_top_entries: usize,
    n_scores: usize,
    mask_bytes: usize,
    late_mask_bytes: usize,
    given_bytes: usize,
    n_history_pages: usize,
}

/// What the rows of a step are given: masks and biases of programs, and what is added to tokens, by address. A device brings
/// each of them once.
#[derive(Debug, Default)]
pub(super) struct Given(HashSet<usize>);

impl Given {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Bytes of what a row is given and no row before it was.
    fn n_bytes_besides(&self, requests: &[OutputRequest<'_>], steered: Option<Steered<'_>>) -> usize {
        let things = things_of(requests, steered).filter(|(address, _)| !self.0.contains(address));
        things.map(|(_, n_bytes)| n_bytes).sum()
    }

    fn take(&mut self, requests: &[OutputRequest<'_>], steered: Option<Steered<'_>>) {
        self.0.extend(things_of(requests, steered).map(|(address, _)| address));
    }
}

/// What a row is given, with its bytes. All draws of a row are by one sampler.
fn things_of(
    requests: &[OutputRequest<'_>],
    steered: Option<Steered<'_>>,
) -> impl Iterator<Item = (usize, usize)> {
    let put_on = requests.iter().find_map(|request| match &request.kind {
        OutputKind::Program { sampler, .. } => sampler.program.as_deref(),
        _ => None,
    });
    let of_program = put_on.into_iter().flat_map(|put_on| {
        let masks = put_on.masks.iter();
        let masks = masks.map(|mask| (Arc::as_ptr(mask) as usize, size_of_val(mask.words())));
        masks.chain(put_on.biases.iter().map(|bias| (Arc::as_ptr(bias) as usize, bias.n_bytes())))
    });
    let added =
        steered.map(|Steered { steering, .. }| (ptr::from_ref(steering) as usize, steering.n_bytes()));
    of_program.chain(added)
}

impl Asked {
    /// What one row asks for, of a step that is given so much.
    pub(super) fn of(
        requests: &[OutputRequest<'_>],
        steered: Option<Steered<'_>>,
        limits: &Limits,
        given: &Given,
    ) -> Self {
        let given_bytes = given.n_bytes_besides(requests, steered);
        let first = Self { given_bytes, ..Self::default() };
        requests.iter().fold(first, |sum, request| sum.plus(Self::of_one(request, limits)))
    }

    fn of_one(request: &OutputRequest<'_>, limits: &Limits) -> Self {
        let (vocab_size, asks) = (limits.vocab_size, limits.asks);
        let row = Self { whole_bytes: vocab_size * size_of::<f32>(), ..Self::default() };
        let of_mask = vocab_size.div_ceil(N_MASK_TOKENS_PER_BYTE);
        let draw = |sampler: &Sampler, mask_bytes: usize, late_mask_bytes: usize| {
            let mask_bytes = mask_bytes + sampler.bias.len() * BIAS_BYTES;
            Self { mask_bytes, late_mask_bytes, ..Self::default() }
        };
        match &request.kind {
            OutputKind::Sample(sampler) if sampler.mask.is_none() => draw(sampler, 0, 0),
            OutputKind::Sample(sampler) => draw(sampler, of_mask, 0),
            OutputKind::Masked { sampler, mask: Some(_) } => draw(sampler, of_mask, 0),
            OutputKind::Masked { sampler, mask: None } => draw(sampler, 0, of_mask),
            OutputKind::Program { within: Within::All, .. } | OutputKind::Mixed | OutputKind::Keep(_) => {
                Self::default()
            }
            OutputKind::Program { within: Within::Mask(_), .. } => {
                Self { mask_bytes: of_mask, ..Self::default() }
            }
            OutputKind::Program { within: Within::Late, .. } => {
                Self { late_mask_bytes: of_mask, ..Self::default() }
            }
            OutputKind::Top { n } if *n <= asks.n_top_max => Self { n_top_entries: *n, ..Self::default() },
            OutputKind::Scores(tokens) if tokens.len() <= asks.n_scores => {
                Self { n_scores: tokens.len(), ..Self::default() }
            }
            OutputKind::Ranked { sampler, within, n }
                if *n <= asks.n_top_max && sampler.program.is_none() =>
            {
                let is_masked = within.is_some() || sampler.mask.is_some();
                Self { n_top_entries: *n, ..draw(sampler, if is_masked { of_mask } else { 0 }, 0) }
            }
            OutputKind::Top { .. }
            | OutputKind::Ranked { .. }
            | OutputKind::Scores(_)
            | OutputKind::Full
            | OutputKind::Logits => row,
            OutputKind::Embedding | OutputKind::Hidden { .. } => {
                Self { whole_bytes: limits.hidden_size * size_of::<f32>(), ..Self::default() }
            }
            // They come back beside the lists, of whose entries each is half as long.
            OutputKind::Attention { .. } => {
                Self { n_top_entries: (request.position + 1).div_ceil(2), ..Self::default() }
            }
        }
    }

    /// The same with draws that look at so many pages of tokens beside those of their contexts.
    pub(super) fn looking_at(self, n_history_pages: usize) -> Self {
        Self { n_history_pages, ..self }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            whole_bytes: self.whole_bytes + other.whole_bytes,
            n_top_entries: self.n_top_entries + other.n_top_entries,
            n_scores: self.n_scores + other.n_scores,
            mask_bytes: self.mask_bytes + other.mask_bytes,
            late_mask_bytes: self.late_mask_bytes + other.late_mask_bytes,
            given_bytes: self.given_bytes + other.given_bytes,
            n_history_pages: self.n_history_pages + other.n_history_pages,
        }
    }

    /// With a row's, if the step carries both. The first row to ask for something gets it in any case.
    pub(super) fn with(self, row: Self, limits: &AskLimits) -> Option<Self> {
        let both = self.plus(row);
        let fits = |sum: usize, of_row: usize, limit: usize| sum <= limit || sum == of_row || of_row == 0;
        let all_fit = fits(both.whole_bytes, row.whole_bytes, limits.whole_bytes)
            && fits(both.n_top_entries, row.n_top_entries, limits.n_top_entries)
            && fits(both.n_scores, row.n_scores, limits.n_scores)
            && fits(both.mask_bytes, row.mask_bytes, limits.mask_bytes)
            && fits(both.late_mask_bytes, row.late_mask_bytes, limits.late_mask_bytes)
            && fits(both.given_bytes, row.given_bytes, limits.given_bytes)
            && fits(both.n_history_pages, row.n_history_pages, limits.n_history_pages);
        all_fit.then_some(both)
    }
}

impl Plan {
    /// Takes in what a row asks, which was found to fit.
    pub(super) fn take_asked<'a>(
        &mut self,
        asked: Asked,
        steered: Option<Steered<'_>>,
        requests: impl FnOnce() -> Requests<'a>,
    ) {
        let gives_more = asked.given_bytes > self.asked.given_bytes;
        self.asked = asked;
        if gives_more {
            self.given.take(&requests(), steered);
        }
    }
}

impl Scheduler {
    /// What the step asks for with a row of a context that has work; `None` if it does not carry so much. Of a job whose rows
    /// ride it is known beforehand.
    pub(super) fn asked_with(
        &self,
        context: &ContextState,
        tokens: Range<usize>,
        n_tokens: usize,
        plan: &Plan,
    ) -> Option<Asked> {
        let work = context.work.as_ref()?;
        if work.member().is_some_and(|member| member.stage == Stage::Rides) {
            return Some(plan.asked);
        }
        let n_history_pages = n_history_pages_of(context, &tokens, n_tokens);
        let mut requests = work.outputs(tokens.start, tokens.end, n_tokens);
        // As the device counts: without what was evicted before the row.
        let n_evicted = tokens.start - context.kv.row_index(tokens.start);
        requests.iter_mut().for_each(|request| request.position -= n_evicted);
        let steered = match tokens.is_empty() {
            true => None,
            false => context.kv.steered(tokens.start, tokens.end),
        };
        let row = Asked::of(&requests, steered, &self.limits, &plan.given).looking_at(n_history_pages);
        plan.asked.with(row, &self.limits.asks)
    }

    /// Where a row of a context ends for which the step carries what it asks, and what is asked with it. A prompt is computed
    /// up to the token whose output it is for: that one then decodes, and has its turn among those. A mean over hidden states is
    /// made of as many as the step still brings back.
    pub(super) fn end_asking(
        &self,
        context: &ContextState,
        tokens: Range<usize>,
        n_tokens: usize,
        plan: &Plan,
    ) -> Option<(usize, Asked)> {
        let Range { start, end } = tokens;
        if let Some(asked) = self.asked_with(context, start..end, n_tokens, plan) {
            return Some((end, asked));
        }
        let work = context.work.as_ref()?;
        // Of tokens that all ask for something, as many as the step still carries.
        if work.asks_of_each() {
            let shorter = std::iter::successors(Some(end - start), |n| Some(n / 2)).skip(1);
            return shorter.take_while(|&n| n > 0).find_map(|n| {
                let asked = self.asked_with(context, start..start + n, n_tokens, plan)?;
                Some((start + n, asked))
            });
        }
        let asks_nothing = end - 1 > start && work.outputs(start, end - 1, n_tokens).is_empty();
        let asked = asks_nothing.then(|| self.asked_with(context, start..end - 1, n_tokens, plan))?;
        asked.map(|asked| (end - 1, asked))
    }
}

#[cfg(test)]
mod tests {
    use trellis_programs::BiasId;

    use super::*;
    use crate::batch::{Others, Start};
    use crate::sampling::program::{Definition, Program, PutOn, RowShape};
    use crate::sampling::{Bias, TokenMask};

    #[test]
    fn rows_fit_together_up_to_each_limit_and_one_alone_always() {
        let asks = AskLimits {
            whole_bytes: 8_000,
            n_top_max: 50,
            n_top_entries: 60,
            n_scores: 100,
            mask_bytes: 130,
            late_mask_bytes: 130,
            given_bytes: 5000,
            n_history_pages: 30,
        };
        let limits = Limits { asks, hidden_size: 16, ..Limits::of_nothing(4, 16) };
        let (few, many) = (vec![0; 60], vec![0; 101]);
        let given = Given::default();
        let of = |kind| Asked::of(&[OutputRequest { position: 0, kind }], None, &limits, &given);
        let with = |sum: Asked, kind| sum.with(of(kind), &asks);
        let nothing = Asked::default();

        // A vocabulary of 1000 takes 4000 bytes, and so does a list that is too long, and too many scores.
        let two = with(with(nothing, OutputKind::Full).unwrap(), OutputKind::Top { n: 51 }).unwrap();
        assert_eq!(with(two, OutputKind::Full), None);
        assert_eq!(with(two, OutputKind::Scores(&many)), None);
        assert_eq!(with(two, OutputKind::Embedding), None);
        assert!(with(two, OutputKind::Top { n: 50 }).is_some(), "of another kind");
        let hidden = with(nothing, OutputKind::Embedding).unwrap();
        assert_eq!(hidden, Asked { whole_bytes: 64, ..nothing });

        let top = with(nothing, OutputKind::Top { n: 40 }).unwrap();
        assert_eq!(with(top, OutputKind::Top { n: 21 }), None);
        let scores = with(nothing, OutputKind::Scores(&few)).unwrap();
        assert_eq!(with(scores, OutputKind::Scores(&few)), None);

        let mask = Arc::new(TokenMask::all(limits.vocab_size));
        let masked = Sampler { mask: Some(mask), ..Sampler::greedy() };
        let drawn = with(nothing, OutputKind::Sample(&masked)).unwrap();
        assert_eq!(drawn.mask_bytes, 125);
        assert_eq!(with(drawn, OutputKind::Sample(&masked)), None);
        let greedy = Sampler::greedy();
        assert_eq!(with(drawn, OutputKind::Sample(&greedy)), Some(drawn));

        let sampler = Arc::new(Sampler::greedy());
        let late = with(drawn, OutputKind::Masked { sampler: &sampler, mask: None }).unwrap();
        assert_eq!((late.mask_bytes, late.late_mask_bytes), (125, 125));
        assert_eq!(with(late, OutputKind::Masked { sampler: &sampler, mask: None }), None);

        let bias = |value| Arc::new(Bias::Dense(vec![value; 1000]));
        let program = |bias: &Arc<Bias>| {
            let definition = Definition::build(|b| (b.logits() + b.bias(BiasId(0))).argmax());
            let shape = RowShape { vocab_size: 1000, n_positions: 16 };
            let put_on = PutOn::new(Arc::new(Program::new(definition, shape).expect("it is in order")));
            let put_on = PutOn { biases: vec![bias.clone()], ..put_on };
            Sampler { program: Some(Box::new(put_on)), ..Sampler::greedy() }
        };
        let (first, second) = (bias(1.0), bias(2.0));
        let [one, same, other] = [&first, &first, &second].map(program);
        let draw = |sampler| {
            let kind = OutputKind::Program {
                sampler,
                start: Start::Before,
                within: Within::All,
                others: Others::NONE,
            };
            [OutputRequest { position: 0, kind }]
        };
        let mut given = Given::default();
        let sum = nothing.with(Asked::of(&draw(&one), None, &limits, &given), &asks).expect("it fits");
        given.take(&draw(&one), None);
        assert_eq!(sum.given_bytes, 4000);
        assert_eq!(sum.with(Asked::of(&draw(&same), None, &limits, &given), &asks), Some(sum), "it is there");
        assert_eq!(sum.with(Asked::of(&draw(&other), None, &limits, &given), &asks), None);

        let search = Arc::new(Sampler { mask: masked.mask.clone(), ..Sampler::greedy() });
        let ranked = of(OutputKind::Ranked { sampler: &search, within: None, n: 7 });
        assert_eq!(
            ranked,
            Asked { n_top_entries: 7, mask_bytes: 125, ..nothing },
            "a list is made on the device"
        );
        let one = Arc::new(one);
        let of_program = of(OutputKind::Ranked { sampler: &one, within: None, n: 7 });
        assert_eq!(
            of_program,
            Asked { whole_bytes: 4000, ..nothing },
            "a program's row is looked at on the host"
        );

        let apart = nothing.with(nothing.looking_at(40), &asks).expect("nothing else looks at tokens apart");
        assert_eq!(apart.with(nothing.looking_at(1), &asks), None);
        assert_eq!(apart.with(nothing, &asks), Some(apart));

        let narrow = AskLimits { whole_bytes: 1, ..asks };
        assert!(nothing.with(of(OutputKind::Full), &narrow).is_some(), "nobody else asks for a row");
    }
}
