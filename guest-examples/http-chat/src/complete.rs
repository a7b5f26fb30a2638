//! What follows texts, without a template.

use trellis_guest::{Context, Model, Result};

use crate::answer::{draw, forks, of_prompt};
use crate::prompt::computed;
use crate::reply::{About, Refusal, Reply, Usage};
use crate::request::{Complete, Prompt};
use crate::sampling;

pub(crate) fn complete(model: &Model, complete: &Complete) -> Result<(), Refusal> {
    let settings = &complete.settings;
    let sampler = sampling::sampler(model, settings)?;
    let mut usage = Usage::default();
    let mut answers = Vec::new();
    for prompt in &complete.prompts {
        let prompt = computed(of_prompt_text(model, prompt)?, 0)?;
        usage.prompt_tokens += prompt.n_tokens;
        usage.cached_tokens += prompt.n_cached;
        answers.push(forks(prompt.context, sampler.with_seed(sampler.seed()), settings.n)?);
    }
    Reply::Begun { model: &model.info().name, prompt_tokens: usage.prompt_tokens }.send()?;

    let mut choices = Vec::new();
    for (idx, answers) in answers.iter().enumerate() {
        let first = idx * settings.n as usize;
        if complete.echo {
            let text = text_of(model, &complete.prompts[idx])?;
            for choice in first..first + settings.n as usize {
                Reply::Piece { choice, text: &text, tokens: Vec::new() }.send()?;
            }
        }
        choices.extend(of_prompt(model, answers, settings, first)?);
    }
    usage.completion_tokens = draw(choices)?;
    Ok(Reply::Ended(usage).send()?)
}

/// A context of a text, which the model's first token begins; of tokens, of those alone.
pub(crate) fn of_prompt_text(model: &Model, prompt: &Prompt) -> Result<Context, Refusal> {
    let context = model.context()?;
    match prompt {
        Prompt::Text(text) => {
            context.append(model.info().bos_token.as_slice())?;
            context.append_text(text)?;
        }
        Prompt::Tokens(tokens) => context.append(tokens).about("prompt")?,
    }
    if context.length() == 0 {
        return Err(Refusal::invalid("prompt", "there is no token to go on from"));
    }
    Ok(context)
}

fn text_of(model: &Model, prompt: &Prompt) -> Result<String> {
    match prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Tokens(tokens) => model.decode(tokens),
    }
}
