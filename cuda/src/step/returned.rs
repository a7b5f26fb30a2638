//! What a step returned, as the engine reads it.

use trellis_engine::batch::{Candidate, Output, OutputFault};
use trellis_engine::sampling::program::{DrawState, Left};

use super::words::from_words;
use crate::ops::logits::{OutputRow, RowOutput};
use crate::ops::program::ProgramOutput;
use crate::ops::topn::Ranked;

/// Words of one [`RowOutput`].
const ROW_WORDS: usize = size_of::<RowOutput>() / 4;
/// Words of one [`ProgramOutput`].
const PROGRAM_WORDS: usize = size_of::<ProgramOutput>() / 4;

/// Where the output for a request lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Not decided yet.
    Unset,
    /// A drawn token.
    Drawn { output_idx: usize },
    /// A token that a program drew, after so many.
    Programmed { output_idx: usize, program_idx: usize, n_drawn: u32 },
    /// A token that is drawn once its mask has come.
    Late { output_idx: usize },
    /// No token: its mask did not come.
    SatOut,
    /// A list of the most probable tokens.
    Top { output_idx: usize },
    /// The same after what a sampler makes of the row.
    Ranked { output_idx: usize },
    /// Scores of given tokens.
    Scores { output_idx: usize },
    /// Log-probabilities, in the place of the logits; the first word among those of rows that come back whole, where there
    /// was room.
    Full { output_idx: usize, group_idx: usize, logits_row: usize, start: Option<usize> },
    /// Logits as they are, of which the host makes what was asked once they are there; their first word among rows that
    /// come back whole.
    Raw { start: usize },
    /// The hidden state after the final norm, likewise.
    Hidden { group_idx: usize, logits_row: usize, start: Option<usize> },
    /// A hidden state between layers: which of those that come back.
    Tapped { state: usize },
    /// Attention: the first of its numbers among those that come back, and how many.
    Attention { start: usize, n: usize },
    /// Logits that the host has to look at.
    Host { group_idx: usize, logits_row: usize },
    /// Nothing: the logits go to their place on the device, checked by this output row.
    Kept { output_idx: usize },
    /// Nothing: the logits are mixed into a draw.
    Mixed,
    /// Nothing: the logits are mixed into a draw that the host makes.
    MixedByHost { group_idx: usize, logits_row: usize },
}

impl Place {
    /// Whether the host fetches something for it while the step is launched, which then waits for the device.
    pub(crate) fn is_fetched(self) -> bool {
        self.is_drawn_from()
            || matches!(self, Self::Hidden { start: None, .. } | Self::Full { start: None, .. })
    }

    /// Whether the host draws from its logits.
    pub(crate) fn is_drawn_from(self) -> bool {
        matches!(self, Self::Host { .. } | Self::MixedByHost { .. })
    }
}

/// What came back in one copy: output rows, what programs gave, then scores and top lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returned<'a> {
    pub(crate) words: &'a [u32],
    pub(crate) starts: ReturnedStarts,
}

/// Where parts of it begin.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReturnedStarts {
    /// What programs gave.
    pub(crate) programs: usize,
    /// Scores and top lists.
    pub(crate) extra: usize,
}

impl ReturnedStarts {
    /// Behind so many output rows, and what so many programs gave.
    pub(crate) fn of(n_outputs: usize, n_programs: usize) -> Self {
        let programs = (n_outputs * ROW_WORDS).next_multiple_of(4);
        Self { programs, extra: (programs + n_programs * PROGRAM_WORDS).next_multiple_of(4) }
    }
}

impl Returned<'_> {
    /// The token that a program drew for an output row, and what it left.
    pub(crate) fn programmed(
        &self,
        output_idx: usize,
        program_idx: usize,
        n_drawn: u32,
    ) -> Result<Output, OutputFault> {
        let candidate = self.drawn(output_idx)?;
        let start = self.starts.programs + program_idx * PROGRAM_WORDS;
        let ProgramOutput { reports, state, .. } = from_words::<ProgramOutput>(self.words, start, 1)[0];
        let next = DrawState { numbers: state, n_drawn: n_drawn.saturating_add(1) };
        Ok(Output::Programmed(candidate, Box::new(Left { next, reports })))
    }

    /// The token that an output row drew.
    pub(crate) fn drawn(&self, output_idx: usize) -> Result<Candidate, OutputFault> {
        let output = self.output(output_idx);
        match output.fault() {
            Some(fault) => Err(fault),
            None => Ok(Candidate { token: output.token, logprob: output.logprob }),
        }
    }

    /// Whether the logits of an output row were numbers.
    pub(crate) fn check(&self, output_idx: usize) -> Result<(), OutputFault> {
        match self.output(output_idx).fault() {
            // That concerns the draw alone.
            None | Some(OutputFault::NothingToDraw) => Ok(()),
            Some(fault) => Err(fault),
        }
    }

    /// The list of the most probable tokens of an output row.
    pub(crate) fn top(&self, output_idx: usize, row: &OutputRow) -> Result<Output, OutputFault> {
        let entropy = self.output(output_idx).entropy;
        Ok(Output::Top { candidates: self.list(output_idx, row)?, entropy })
    }

    /// The same after what a sampler makes of the row.
    pub(crate) fn ranked(&self, output_idx: usize, row: &OutputRow) -> Result<Output, OutputFault> {
        Ok(Output::Ranked(self.list(output_idx, row)?))
    }

    fn list(&self, output_idx: usize, row: &OutputRow) -> Result<Vec<Candidate>, OutputFault> {
        self.check(output_idx)?;
        let output = self.output(output_idx);
        let start = self.starts.extra + row.top_start as usize * 2;
        let ranked: &[Ranked] = from_words(self.words, start, output.n_top as usize);
        Ok(ranked.iter().map(|&Ranked { token, logprob }| Candidate { token, logprob }).collect())
    }

    /// The scores of an output row.
    pub(crate) fn scores(&self, output_idx: usize, row: &OutputRow) -> Result<Output, OutputFault> {
        self.check(output_idx)?;
        let start = self.starts.extra + row.score_start as usize;
        Ok(Output::Scores(from_words(self.words, start, row.n_scores as usize).to_vec()))
    }

    fn output(&self, output_idx: usize) -> RowOutput {
        from_words::<RowOutput>(self.words, output_idx * ROW_WORDS, 1)[0]
    }
}
