//! Contexts that are decoded together: guidance, contrast, experts, ensembles.

use crate::bindings::trellis::host::decoding as raw;
use crate::context::only;
use crate::{Candidate, Context, Generate, Result, Sampler, StreamOptions};

/// A context whose sampler's program is given the logits of others as well: `member(0)` is the first of them, up to 8. What
/// is drawn is appended to all. It is drawn as of the first context: its position, history, state and constraint, and the
/// log-probability is what the model says there.
///
/// ```no_run
/// # use trellis_guest::{Context, Mixture, Model, Result, Sampler};
/// use trellis_guest::programs::{Definition, Source, library};
///
/// # fn f(model: &Model, prompted: &Context, bare: &Context) -> Result<String> {
/// let definition = Definition::build(|b| {
///     let x = library::guidance(b.logits(), b.member(0), b.parameter(0));
///     library::temperature(x, 0.8).draw(Source::SEED)
/// });
/// let sampler = Sampler::by_program(&model.program(&definition)?, 7)?;
/// sampler.set_parameters(&[1.5])?;
/// let text = Mixture::of(prompted, [bare]).generate(&sampler).max_tokens(64).run()?.text;
/// # Ok(text) }
/// ```
///
/// All are contexts of one model, or of several with one tokenizer: an expert and an amateur, say. Those of one model ride
/// in one step and are decoded ahead; of several, each token waits for a step of each model, and for whole rows of logits
/// to leave the device where the models are on several or it has no room for rows. Each is named once only; streams and
/// generations of a mixture take no guesses.
#[derive(Clone, Debug)]
pub struct Mixture<'a> {
    first: &'a Context,
    others: Vec<&'a Context>,
}

impl<'a> Mixture<'a> {
    /// A mixture of a context and others.
    pub fn of(first: &'a Context, others: impl IntoIterator<Item = &'a Context>) -> Self {
        Self { first, others: others.into_iter().collect() }
    }

    /// Draws one token and appends it to all. For many mixtures at once see [`step_mixtures`].
    ///
    /// # Errors
    /// Those of [`Context::step`]; [`InvalidArgument`](crate::Error::InvalidArgument) for more than 8 others, for a sampler
    /// without a program, and for a context that is named twice; [`ModelMismatch`](crate::Error::ModelMismatch) for models with
    /// different tokenizers.
    pub fn step(&self, sampler: &Sampler) -> Result<Candidate> {
        step_mixtures([(self, sampler)]).map(only)
    }

    /// As [`Context::generate`]: the others get and keep what the first does.
    pub fn generate(&self, sampler: &'a Sampler) -> Generate<'a> {
        self.first.generate(sampler).mixed_with(self.others.clone())
    }

    /// As [`Context::stream`]: each token is appended to the others too.
    pub fn stream(&self, sampler: &'a Sampler) -> StreamOptions<'a> {
        self.first.stream(sampler).mixed_with(self.others.clone())
    }
}

/// Draws a token for each mixture and appends it to all its contexts, all in one batch.
///
/// # Errors
/// Those of [`Mixture::step`]; one mistake and no context is changed.
pub fn step_mixtures<'a>(
    requests: impl IntoIterator<Item = (&'a Mixture<'a>, &'a Sampler)>,
) -> Result<Vec<Candidate>> {
    let requests: Vec<_> = requests
        .into_iter()
        .map(|(mixture, sampler)| raw::StepRequest {
            context: mixture.first.raw(),
            sampler: sampler.raw(),
            others: mixture.others.iter().map(|other| other.raw()).collect(),
        })
        .collect();
    Ok(raw::step(&requests)?)
}
