//! How tokens are drawn.

use crate::bindings::trellis::host::samplers as raw;
use crate::panics::expect_host;
use crate::programs::library::{self, Chain, Penalties};
use crate::programs::{BiasId, Definition, MaskId, Program, TokenBias};
use crate::{Beginning, Constraint, Error, Model, Result, Token};

/// How a token is drawn from the model's distribution.
///
/// The settings act in a fixed order: mask, bias, repetition penalty, frequency and presence penalty,
/// temperature, top-k, top-p, min-p, draw. A draw depends on the seed, the position and the token alone, so
/// the same seed gives the same text whatever else the machine is doing.
#[derive(Debug)]
pub struct Sampler {
    raw: raw::Sampler,
    seed: u64,
}

impl Sampler {
    /// Always the most probable token.
    pub fn greedy() -> Self {
        expect_host();
        Self { raw: raw::Sampler::new(0), seed: 0 }
    }

    /// A random draw at temperature 1, to be adjusted and then built.
    pub fn seeded(seed: u64) -> SamplerBuilder<'static> {
        SamplerBuilder { seed, temperature: 1.0, ..SamplerBuilder::default() }
    }

    /// Draws by a program: what its last operation gives. The settings of the chain are not there then.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded) for objects.
    pub fn by_program(program: &Program, seed: u64) -> Result<Self> {
        Ok(Self { raw: raw::Sampler::by_program(&program.raw, seed)?, seed })
    }

    /// Changes the program's parameters, at most 16; those that are not given are 0.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) where one is not finite or there are too many, or where the sampler
    /// draws by the chain.
    pub fn set_parameters(&self, parameters: &[f32]) -> Result {
        Ok(self.raw.set_parameters(parameters)?)
    }

    /// Gives the program the masks that it names, in their order, at most 16.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) where there are too many, or where the sampler draws by the chain.
    pub fn set_program_masks(&self, masks: &[&TokenMask]) -> Result {
        let masks: Vec<_> = masks.iter().map(|mask| &mask.raw).collect();
        Ok(self.raw.set_program_masks(&masks)?)
    }

    /// Gives the program the biases that it names, in their order, at most 16.
    ///
    /// # Errors
    /// As [`set_program_masks`](Self::set_program_masks).
    pub fn set_program_biases(&self, biases: &[&TokenBias]) -> Result {
        let biases: Vec<_> = biases.iter().map(|bias| &bias.raw).collect();
        Ok(self.raw.set_program_biases(&biases)?)
    }

    /// Has what is drawn from now on keep to a constraint, or to none, beside all that the sampler says. Each call puts it on
    /// anew: a context that kept to it before begins again.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a text to begin after that is not 1 to 256 bytes long;
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange).
    pub fn set_constraint(&self, constraint: Option<&Constraint>, begins: &Beginning) -> Result {
        Ok(self.raw.set_constraint(constraint.map(Constraint::raw), begins)?)
    }

    /// The same settings with another seed.
    pub fn with_seed(&self, seed: u64) -> Self {
        Self { raw: self.raw.with_seed(seed), seed }
    }

    /// The seed of its draws.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Changes the divisor of the logits; 0 for the most probable token. Streams that are open already go on as they
    /// were, with this and with all other settings.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when it is negative or not finite.
    pub fn set_temperature(&self, temperature: f32) -> Result {
        Ok(self.raw.set_temperature(temperature)?)
    }

    /// Changes how many of the largest logits are kept; all when none.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for 0.
    pub fn set_top_k(&self, k: Option<u32>) -> Result {
        Ok(self.raw.set_top_k(k)?)
    }

    /// Changes the probability that the kept tokens reach together, in (0, 1]; all are kept when none.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when it is outside.
    pub fn set_top_p(&self, p: Option<f32>) -> Result {
        Ok(self.raw.set_top_p(p)?)
    }

    /// Changes the share of the most probable token's probability that a token needs, in [0, 1].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when it is outside.
    pub fn set_min_p(&self, p: Option<f32>) -> Result {
        Ok(self.raw.set_min_p(p)?)
    }

    /// Changes what divides positive and multiplies negative logits of seen tokens; 1 for nothing.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when it is not above 0.
    pub fn set_repetition_penalty(&self, penalty: f32) -> Result {
        Ok(self.raw.set_repetition_penalty(penalty)?)
    }

    /// Changes what is subtracted from a logit for every occurrence of the token; 0 for nothing.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when it is not finite.
    pub fn set_frequency_penalty(&self, penalty: f32) -> Result {
        Ok(self.raw.set_frequency_penalty(penalty)?)
    }

    /// Changes what is subtracted once from the logit of a seen token; 0 for nothing.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when it is not finite.
    pub fn set_presence_penalty(&self, penalty: f32) -> Result {
        Ok(self.raw.set_presence_penalty(penalty)?)
    }

    /// Changes how many of the last tokens the penalties look at; all of the context when none.
    ///
    /// # Errors
    /// None but those of the host itself.
    pub fn set_penalty_last_n(&self, n: Option<u32>) -> Result {
        Ok(self.raw.set_penalty_last_n(n)?)
    }

    /// Replaces what is added to the logits of at most 1,024 tokens; negative infinity forbids a token. Streams that are open
    /// already keep the bias that they were opened with. For more tokens there are [`SamplerBuilder::bias_where`], and
    /// [`TokenBias`] for programs.
    ///
    /// # Errors
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange), or
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a NaN, or for more tokens.
    pub fn set_bias(&self, bias: &[(Token, f32)]) -> Result {
        Ok(self.raw.set_bias(bias)?)
    }

    /// Replaces the tokens that may be drawn; all when none.
    ///
    /// # Errors
    /// [`ModelMismatch`](crate::Error::ModelMismatch).
    pub fn set_mask(&self, mask: Option<&TokenMask>) -> Result {
        Ok(self.raw.set_mask(mask.map(|mask| &mask.raw))?)
    }

    pub(crate) fn raw(&self) -> &raw::Sampler {
        &self.raw
    }
}

/// Settings of a [`Sampler`] to be, checked all at once by [`build`](Self::build).
///
/// ```no_run
/// # use trellis_guest::{Result, Sampler};
/// # fn f() -> Result<()> {
/// let sampler = Sampler::seeded(7).temperature(0.8).top_p(0.95).build()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing before `build`"]
pub struct SamplerBuilder<'a> {
    constraint: Option<&'a Constraint>,
    seed: u64,
    temperature: f32,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    penalty_last_n: Option<u32>,
    bias: Vec<(Token, f32)>,
    bias_where: Option<(&'a TokenMask, f32)>,
}

impl<'a> SamplerBuilder<'a> {
    /// Divides the logits: below 1 for safer text, above 1 for wilder text, 0 for the most probable token.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Keeps the `k` largest logits.
    pub fn top_k(mut self, k: u32) -> Self {
        self.top_k = Some(k);
        self
    }

    /// Keeps the smallest set of most probable tokens that reaches this probability, in (0, 1].
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = Some(p);
        self
    }

    /// Drops tokens less probable than this share of the most probable, in [0, 1].
    pub fn min_p(mut self, p: f32) -> Self {
        self.min_p = Some(p);
        self
    }

    /// Divides positive and multiplies negative logits of seen tokens; 1 for none.
    pub fn repetition_penalty(mut self, penalty: f32) -> Self {
        self.repetition_penalty = Some(penalty);
        self
    }

    /// Subtracted from a logit for every occurrence of the token; 0 for none.
    pub fn frequency_penalty(mut self, penalty: f32) -> Self {
        self.frequency_penalty = Some(penalty);
        self
    }

    /// Subtracted once from the logit of a seen token; 0 for none.
    pub fn presence_penalty(mut self, penalty: f32) -> Self {
        self.presence_penalty = Some(penalty);
        self
    }

    /// How many of the last tokens the penalties look at; all of the context unless set.
    pub fn penalty_last_n(mut self, n: u32) -> Self {
        self.penalty_last_n = Some(n);
        self
    }

    /// Adds to the logits of these tokens, at most 1,024; negative infinity forbids one. For more tokens, which are to have the
    /// same, there is [`bias_where`](Self::bias_where).
    pub fn bias(mut self, bias: impl IntoIterator<Item = (Token, f32)>) -> Self {
        self.bias = bias.into_iter().collect();
        self
    }

    /// Adds a number to the logits of all tokens of a set, however many there are; negative infinity forbids them. Beside
    /// [`bias`](Self::bias), and in the same place of the order.
    ///
    /// The chain of settings is then drawn as a logit program, [`library::chain`], which draws the same. So the sampler has no
    /// settings that could be changed later, and a search by it no more beams than one by a program.
    /// With all other settings at once, biases of tokens among them, it costs more than a program may, which [`build`](Self::build) says.
    ///
    /// ```no_run
    /// # use trellis_guest::{Context, Result, Sampler, TokenMask};
    /// # fn f(context: &Context) -> Result<()> {
    /// let digits = |text: &[u8]| text.iter().any(u8::is_ascii_digit);
    /// let numbers = TokenMask::allow_where(context.model(), digits)?;
    /// let sampler = Sampler::seeded(7).temperature(0.8).bias_where(&numbers, -4.0).build()?;
    /// # Ok(()) }
    /// ```
    pub fn bias_where(mut self, tokens: &'a TokenMask, bias: f32) -> Self {
        self.bias_where = Some((tokens, bias));
        self
    }

    /// Has what is drawn keep to a constraint, from where a context first draws with it.
    pub fn constraint(mut self, constraint: &'a Constraint) -> Self {
        self.constraint = Some(constraint);
        self
    }

    /// The sampler.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) with the name, the value and the range of the
    /// first setting outside its range, or with what is too much of a program.
    pub fn build(self) -> Result<Sampler> {
        expect_host();
        let sampler = raw::Sampler::new(self.seed);
        sampler.set_temperature(self.temperature)?;
        if self.top_k.is_some() {
            sampler.set_top_k(self.top_k)?;
        }
        if self.top_p.is_some() {
            sampler.set_top_p(self.top_p)?;
        }
        if self.min_p.is_some() {
            sampler.set_min_p(self.min_p)?;
        }
        if let Some(penalty) = self.repetition_penalty {
            sampler.set_repetition_penalty(penalty)?;
        }
        if let Some(penalty) = self.frequency_penalty {
            sampler.set_frequency_penalty(penalty)?;
        }
        if let Some(penalty) = self.presence_penalty {
            sampler.set_presence_penalty(penalty)?;
        }
        if self.penalty_last_n.is_some() {
            sampler.set_penalty_last_n(self.penalty_last_n)?;
        }
        if !self.bias.is_empty() {
            sampler.set_bias(&self.bias)?;
        }
        let sampler = match self.bias_where {
            // The host has seen that each setting is as it may be.
            Some((tokens, bias)) => self.as_program(tokens, checked_bias(bias)?)?,
            None => Sampler { raw: sampler, seed: self.seed },
        };
        if let Some(constraint) = self.constraint {
            sampler.set_constraint(Some(constraint), &Beginning::FirstDraw)?;
        }
        Ok(sampler)
    }

    /// The same settings as a program, with a bias over a set.
    fn as_program(&self, tokens: &TokenMask, bias: f32) -> Result<Sampler> {
        let penalties = Penalties {
            last_n: self.penalty_last_n,
            repetition: self.repetition_penalty.unwrap_or(1.0),
            frequency: self.frequency_penalty.unwrap_or(0.0),
            presence: self.presence_penalty.unwrap_or(0.0),
        };
        let chain = Chain {
            mask: None,
            bias: (!self.bias.is_empty()).then_some(BiasId(0)),
            bias_over: Some((MaskId(0), bias)),
            penalties: Some(penalties)
                .filter(|it| (it.repetition, it.frequency, it.presence) != (1.0, 0.0, 0.0)),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p_log: self.min_p.filter(|&p| p > 0.0).map(f32::ln),
        };
        let definition = Definition::build(|b| library::chain(b, chain));
        let sampler = Sampler::by_program(&tokens.model.program(&definition)?, self.seed)?;
        sampler.set_program_masks(&[tokens])?;
        if !self.bias.is_empty() {
            sampler.set_program_biases(&[&TokenBias::sparse(&tokens.model, &self.bias)?])?;
        }
        Ok(sampler)
    }
}

/// What the host says of a [`bias`](SamplerBuilder::bias): negative infinity forbids a token, the rest has no meaning.
fn checked_bias(bias: f32) -> Result<f32> {
    if bias.is_nan() || bias == f32::INFINITY {
        return Err(Error::InvalidArgument {
            name: "bias".to_owned(),
            value: bias.to_string(),
            expected: "a number below +inf".to_owned(),
        });
    }
    Ok(bias)
}

/// A set of tokens that may be drawn, held by the host.
#[derive(Debug)]
pub struct TokenMask {
    raw: raw::TokenMask,
    model: Model,
}

impl TokenMask {
    /// Allows these tokens and no others.
    ///
    /// # Errors
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange).
    pub fn allow(model: &Model, tokens: &[Token]) -> Result<Self> {
        Ok(Self { raw: raw::TokenMask::allow(model.raw(), tokens)?, model: model.clone() })
    }

    /// Allows all tokens but these.
    ///
    /// # Errors
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange).
    pub fn forbid(model: &Model, tokens: &[Token]) -> Result<Self> {
        Ok(Self { raw: raw::TokenMask::forbid(model.raw(), tokens)?, model: model.clone() })
    }

    /// One bit for each token of the vocabulary, 64 a word, lowest bit first: 1 allows it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) where there are not as many words as that takes.
    pub fn from_bits(model: &Model, bits: &[u64]) -> Result<Self> {
        Ok(Self { raw: raw::TokenMask::from_bits(model.raw(), bits)?, model: model.clone() })
    }

    /// Allows the tokens whose bytes pass the test. Special tokens and others that stand for no text are not asked about,
    /// and not allowed. Asks the host for the vocabulary, once for each [`Model`].
    ///
    /// # Errors
    /// None but those of the host itself.
    pub fn allow_where(model: &Model, mut test: impl FnMut(&[u8]) -> bool) -> Result<Self> {
        let vocabulary = model.vocabulary()?;
        let mut bits = vec![0; vocabulary.len().div_ceil(64)];
        for (token, bytes) in vocabulary.iter().enumerate() {
            if !bytes.is_empty() && test(bytes) {
                bits[token / 64] |= 1 << (token % 64);
            }
        }
        Self::from_bits(model, &bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_a_number_or_forbids() {
        for bias in [f32::NEG_INFINITY, -2.5, 0.0, f32::MAX] {
            assert_eq!(checked_bias(bias), Ok(bias));
        }
        for (bias, said) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
            let refused = checked_bias(bias).expect_err("it has no meaning");
            assert_eq!(refused.to_string(), format!("bias is {said}, expected a number below +inf"));
        }
    }
}
