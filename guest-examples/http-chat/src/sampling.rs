//! How the tokens of a request are drawn.

use trellis_guest::{Error, Model, Result, Sampler, SamplerBuilder, seed};

use crate::request::Settings;

/// The sampler, without what the answer has to keep to.
pub(crate) fn sampler(model: &Model, settings: &Settings) -> Result<Sampler> {
    let vocab_size = model.info().vocab_size;
    // Before anything is drawn, which is when the host would say so.
    if let Some(&(token, _)) = settings.logit_bias.iter().find(|(token, _)| *token >= vocab_size) {
        return Err(Error::TokenOutOfRange { token, vocab_size });
    }
    let mut builder: SamplerBuilder<'_> = Sampler::seeded(seed())
        .temperature(settings.temperature)
        .frequency_penalty(settings.frequency_penalty)
        .presence_penalty(settings.presence_penalty)
        .bias(settings.logit_bias.iter().copied());
    if let Some(p) = settings.top_p {
        builder = builder.top_p(p);
    }
    if let Some(k) = settings.top_k {
        builder = builder.top_k(k);
    }
    if let Some(p) = settings.min_p {
        builder = builder.min_p(p);
    }
    if let Some(penalty) = settings.repetition_penalty {
        builder = builder.repetition_penalty(penalty);
    }
    builder.build()
}
