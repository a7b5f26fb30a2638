//! The answer to a conversation.

use trellis_guest::{Beginning, Constraint, Context, Model, Result, Sampler, Thinking};

use crate::choice::{Choice, May};
use crate::prompt::{self, Prompt};
use crate::reply::{About, Refusal, Reply, Usage};
use crate::request::{Chat, Settings};
use crate::sampling;

/// Between what marks a model thinks.
const MARKS: [&str; 2] = ["<think>\n", "</think>\n\n"];

/// What a thought leaves of the context, whatever its budget: for its end, and an answer after it.
const N_ANSWER_TOKENS: u32 = 128;

/// Says that the time for thinking is over, so that the model knows why it answers.
const THOUGHT_ENOUGH: &str = "\nI have thought enough, and answer now.\n";

pub(crate) fn chat(model: &Model, chat: &Chat) -> Result<(), Refusal> {
    let settings = &chat.settings;
    let constraint = chat.constraint(model)?;
    let sampler = sampling::sampler(model, settings)?;
    let Prompt { context, n_tokens, n_cached } = prompt::of_chat(model, chat)?;
    let answers = forks(context, sampler, settings.n)?;
    let mut usage = Usage { prompt_tokens: n_tokens, cached_tokens: n_cached, ..Usage::default() };
    Reply::Begun { model: &model.info().name, prompt_tokens: n_tokens }.send()?;

    let may = if chat.tools.is_empty() { May::BeText } else { May::BeCall };
    let mut choices = Vec::new();
    for (idx, (context, sampler)) in answers.iter().enumerate() {
        let n_thought = match chat.thinking_budget {
            Some(budget) => think(idx, context, sampler, budget.min(settings.max_tokens.unwrap_or(budget)))?,
            None => 0,
        };
        usage.reasoning_tokens += n_thought;
        let max_tokens = settings.max_tokens.map(|n| n.saturating_sub(n_thought));
        keep_to(sampler, constraint.as_ref())?;
        choices.push(Choice::begin((idx, model), (context, sampler), settings, (max_tokens, may))?);
    }
    usage.completion_tokens = usage.reasoning_tokens + draw(choices)?;
    if let Some(name) = &chat.save {
        answers[0].0.save(name)?;
    }
    Ok(Reply::Ended(usage).send()?)
}

/// So many copies of a prompt, each with a sampler whose draws are its own.
pub(crate) fn forks(context: Context, sampler: Sampler, n: u32) -> Result<Vec<(Context, Sampler)>> {
    match n {
        1 => Ok(vec![(context, sampler)]),
        n => context.forks(u64::from(n), &sampler),
    }
}

/// Draws all choices side by side to their ends; their tokens.
pub(crate) fn draw(mut choices: Vec<Choice<'_>>) -> Result<u32, Refusal> {
    while choices.iter().any(|choice| !choice.is_over) {
        choices.iter_mut().try_for_each(Choice::advance)?;
    }
    Ok(choices.iter().map(|choice| choice.n_tokens).sum())
}

/// From here on, so that no thought has to keep to it.
fn keep_to(sampler: &Sampler, constraint: Option<&Constraint>) -> Result<(), Refusal> {
    match constraint {
        Some(constraint) => sampler.set_constraint(Some(constraint), &Beginning::FirstDraw).about("format"),
        None => Ok(()),
    }
}

/// Thinks for so many tokens at most; how many it were.
fn think(idx: usize, context: &Context, sampler: &Sampler, budget: u32) -> Result<u32, Refusal> {
    let [open, close] = MARKS;
    let budget = budget.min(context.capacity().saturating_sub(context.length() + N_ANSWER_TOKENS));
    if budget == 0 {
        return Ok(0);
    }
    // The last tenth of the budget is for coming to the end of a sentence.
    let thinking = Thinking::between(open, close).soft_budget(budget - budget / 10).hard_budget(budget);
    let thought = thinking.message(THOUGHT_ENOUGH).run(context, sampler).about("thinking_budget")?;
    Reply::Thought { choice: idx, text: &thought.text }.send()?;
    Ok(thought.n_tokens)
}

/// The choices of one prompt.
pub(crate) fn of_prompt<'a>(
    model: &'a Model,
    answers: &[(Context, Sampler)],
    settings: &'a Settings,
    first: usize,
) -> Result<Vec<Choice<'a>>, Refusal> {
    let begin = |(idx, (context, sampler)): (usize, &(Context, Sampler))| {
        let ends = (settings.max_tokens, May::BeText);
        Choice::begin((first + idx, model), (context, sampler), settings, ends)
    };
    answers.iter().enumerate().map(begin).collect()
}
