//! How the tokens of a request are drawn.

use trellis_guest::{Result, Sampler, SamplerBuilder, seed};

use crate::request::Settings;

/// The sampler, without what the answer has to keep to.
pub(crate) fn sampler(settings: &Settings) -> Result<Sampler> {
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
