//! A program with what it is given.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    DrawInputs, Machine, N_HANDLES_MAX, N_PARAMETERS_MAX, N_REPORTS_MAX, Outcome, Program, ProgramState,
};
use crate::batch::{OutputFault, Token};
use crate::port::{shared, shared_list_of, shared_option};
use crate::sampling::{Before, Bias, SamplerError, TokenMask};

/// A program that draws in the place of the fixed chain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PutOn {
    /// The program; it ends in a token.
    #[serde(with = "shared")]
    pub program: Arc<Program>,
    /// Its parameters; those that are not there are 0.
    pub parameters: Vec<f32>,
    /// The masks that it names; one that is not there allows all tokens.
    #[serde(with = "shared_list_of")]
    pub masks: Vec<Arc<TokenMask>>,
    /// The biases that it names; one that is not there is 0.
    #[serde(with = "shared_list_of")]
    pub biases: Vec<Arc<Bias>>,
    /// What may be drawn, whatever the program says; all tokens when `None`.
    #[serde(with = "shared_option")]
    pub within: Option<Arc<TokenMask>>,
    /// Where the first draw starts.
    pub start: DrawState,
}

impl PutOn {
    /// A program that is given nothing yet.
    #[must_use]
    pub fn new(program: Arc<Program>) -> Self {
        let start = program.first();
        Self { program, parameters: Vec::new(), masks: Vec::new(), biases: Vec::new(), within: None, start }
    }

    /// Checks what it is given against the vocabulary.
    pub(in crate::sampling) fn validate(&self, vocab_size: usize) -> Result<(), SamplerError> {
        let n_tokens = self.program.shape().vocab_size;
        if n_tokens != vocab_size {
            return Err(SamplerError::MaskSize { n_tokens, vocab_size });
        }
        if !self.program.ends_in_a_token() {
            return Err(SamplerError::EndsInARow);
        }
        self.check_given(vocab_size)
    }

    /// As [`Self::validate`], where its row is wanted and not a draw.
    pub(in crate::sampling) fn validate_for_row(&self, vocab_size: usize) -> Result<(), SamplerError> {
        let n_tokens = self.program.shape().vocab_size;
        if n_tokens != vocab_size {
            return Err(SamplerError::MaskSize { n_tokens, vocab_size });
        }
        if self.program.ends_in_a_token() || self.program.carries_on() {
            return Err(SamplerError::EndsInNoRow);
        }
        self.check_given(vocab_size)
    }

    fn check_given(&self, vocab_size: usize) -> Result<(), SamplerError> {
        let n_given = [
            ("parameters", self.parameters.len(), N_PARAMETERS_MAX),
            ("masks", self.masks.len(), N_HANDLES_MAX),
            ("biases", self.biases.len(), N_HANDLES_MAX),
        ];
        if let Some(&(what, n, max)) = n_given.iter().find(|(_, n, max)| n > max) {
            return Err(SamplerError::TooMany { what, n, max });
        }
        if let Some((idx, &value)) = self.parameters.iter().enumerate().find(|(_, value)| !value.is_finite())
        {
            return Err(SamplerError::Parameter { idx, value });
        }
        match self.masks.iter().chain(&self.within).find(|mask| mask.vocab_size() != vocab_size) {
            Some(mask) => Err(SamplerError::MaskSize { n_tokens: mask.vocab_size(), vocab_size }),
            None => self.biases.iter().try_for_each(|bias| bias.validate(vocab_size)),
        }
    }

    /// Draws the token after `n_tokens` tokens, one that `within` allows: no other is drawn from any row, and a program that
    /// comes by one otherwise has drawn nothing. The operation for the constraint's mask gives it.
    ///
    /// # Errors
    /// The logits hold a NaN; a row that is drawn from holds no token above −∞.
    pub fn draw(
        &self,
        machine: &mut Machine,
        logits: &[f32],    // [vocab_size]
        history: &[Token], // the last tokens, at least as many as the program looks at
        draw: DrawPlace<'_>,
    ) -> Result<(Token, Left), OutputFault> {
        let DrawPlace { start, within, .. } = draw;
        let place = self.place(logits, history, draw);
        let Outcome { end, state, reports } = machine.draw(&self.program, &place)?;
        if within.is_some_and(|within| !within.allows(end)) {
            return Err(OutputFault::NothingToDraw);
        }
        let next = DrawState { numbers: state, n_drawn: start.n_drawn.saturating_add(1) };
        Ok((end, Left { next, reports }))
    }

    /// The row in which the program ends.
    ///
    /// # Errors
    /// As for [`Self::draw`].
    pub(in crate::sampling) fn row(
        &self,
        machine: &mut Machine,
        logits: &[f32],    // [vocab_size]
        history: &[Token], // the last tokens, at least as many as the program looks at
        draw: DrawPlace<'_>,
    ) -> Result<Vec<f32>, OutputFault> {
        let place = self.place(logits, history, draw);
        Ok(machine.row(&self.program, &place)?.end)
    }

    fn place<'a>(&'a self, logits: &'a [f32], history: &'a [Token], draw: DrawPlace<'a>) -> DrawInputs<'a> {
        let DrawPlace { members, before, seed, start, within } = draw;
        DrawInputs {
            logits,
            members,
            history,
            n_tokens: before.n_tokens,
            position: before.position(),
            n_drawn: start.n_drawn,
            seed,
            parameters: &self.parameters,
            state: start.numbers,
            masks: &self.masks,
            biases: &self.biases,
            constraint: within,
            within,
        }
    }

    /// The memory that masks and biases take.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        let masks = self.masks.iter().map(|mask| size_of_val(mask.words()));
        masks.chain(self.biases.iter().map(|bias| bias.n_bytes())).sum()
    }
}

/// What a draw of a program depends on besides the logits and the tokens before it.
#[derive(Clone, Copy, Debug)]
pub struct DrawPlace<'a> {
    /// The logits of the other members of a mixture.
    pub members: &'a [&'a [f32]], // [vocab_size] each
    /// Tokens before the one that is drawn.
    pub before: Before,
    /// Key of the noise.
    pub seed: u64,
    /// Where the program starts.
    pub start: DrawState,
    /// What may be drawn; all tokens when `None`.
    pub within: Option<&'a TokenMask>,
}

/// Where a draw of a program starts: what the draw before it left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DrawState {
    /// The numbers that the program keeps.
    pub numbers: ProgramState,
    /// How many tokens the program has drawn in the context.
    pub n_drawn: u32,
}

/// What a draw of a program left besides its token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Left {
    /// Where the next draw starts.
    pub next: DrawState,
    /// What the program reports; as many as it says.
    pub reports: [f32; N_REPORTS_MAX],
}
