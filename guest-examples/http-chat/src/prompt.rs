//! The prompt of a conversation: messages in the model's template, or what follows a conversation that was kept.

use trellis_guest::{
    Chat as Template, ChatEnd, Context, Model, Result, Token, forget as forget_saved, usage,
};

use crate::reply::{About, Refusal, Reply, Usage};
use crate::request::{Chat, Message};
use crate::tools;

/// A prompt that is computed.
pub(crate) struct Prompt {
    pub(crate) context: Context,
    /// Its tokens.
    pub(crate) n_tokens: u32,
    /// Those of them that were not computed for it.
    pub(crate) n_cached: u32,
}

/// The context of a conversation, up to where the assistant answers.
pub(crate) fn of_chat(model: &Model, chat: &Chat) -> Result<Prompt, Refusal> {
    let (context, n_held) = match &chat.previous {
        None => {
            let context = model.context()?;
            context.append(&tokens_of_chat(model, chat)?)?;
            (context, 0)
        }
        Some(name) => {
            let context = model.saved_context(name)?;
            let n_held = context.length();
            context.append(&following(model, &context, chat)?)?;
            (context, n_held)
        }
    };
    computed(context, n_held)
}

/// Computes a prompt, of which so many tokens are there already.
pub(crate) fn computed(context: Context, n_held: u32) -> Result<Prompt, Refusal> {
    let n_found = usage().tokens_cached;
    context.prefill()?;
    let n_cached = n_held + (usage().tokens_cached - n_found) as u32;
    Ok(Prompt { n_tokens: context.length(), n_cached, context })
}

/// Says how many tokens a conversation is.
pub(crate) fn count(model: &Model, chat: &Chat) -> Result<(), Refusal> {
    let n_tokens = match &chat.previous {
        None => tokens_of_chat(model, chat)?.len(),
        Some(name) => {
            let context = model.saved_context(name)?;
            context.length() as usize + following(model, &context, chat)?.len()
        }
    };
    let prompt_tokens = n_tokens as u32;
    Ok(Reply::Ended(Usage { prompt_tokens, ..Usage::default() }).send()?)
}

/// Keeps a conversation no longer.
pub(crate) fn forget(name: &str) -> Result<(), Refusal> {
    forget_saved(name)?;
    Ok(Reply::Ended(Usage::default()).send()?)
}

fn tokens_of_chat(model: &Model, chat: &Chat) -> Result<Vec<Token>, Refusal> {
    let mut template = Template::new();
    let mut messages = &chat.messages[..];
    if let Some(tools) = chat.told_of_tools()? {
        let said = match messages.split_first() {
            Some((first, rest)) if first.role == "system" => {
                messages = rest;
                format!("{}\n\n{tools}", first.content)
            }
            _ => tools,
        };
        template.push("system", &said);
    }
    messages.iter().for_each(|message| push(&mut template, message));
    model.encode_chat(&template, ChatEnd::Assistant).about("messages")
}

fn push(template: &mut Template, message: &Message) {
    let mut content = message.content.clone();
    for call in &message.calls {
        if !content.is_empty() {
            content.push('\n');
        }
        content += &tools::written(call);
    }
    template.push(&message.role, &content);
}

/// The tokens that the messages are after a conversation: what the template makes of them after another one, whose last answer ends
/// as the one that was kept. What was said there, instructions included, is not looked at.
fn following(model: &Model, context: &Context, chat: &Chat) -> Result<Vec<Token>, Refusal> {
    let mut messages = &chat.messages[..];
    if let Some((first, rest)) = messages.split_first()
        && first.role == "system"
    {
        // A client that says its instructions each time says nothing new.
        let told = Template::new().system(&first.content);
        let begins = model.encode_chat(&told, ChatEnd::Message).about("messages")?;
        if !context.tokens().starts_with(&begins) {
            let message = "the conversation that this goes on with has other instructions, or none";
            return Err(Refusal::invalid("instructions", message));
        }
        messages = rest;
    }
    let mut template = Template::new().user("?").assistant("!");
    let before = model.encode_chat(&template, ChatEnd::Message).about("messages")?;
    messages.iter().for_each(|message| push(&mut template, message));
    let after = model.encode_chat(&template, ChatEnd::Assistant).about("messages")?;
    let end = before.iter().rposition(|&token| model.is_stop(token));
    let (Some(end), true) = (end, after.starts_with(&before)) else {
        let name = &model.info().name;
        let message = format!("the chat template of {name} does not let a conversation that was kept go on");
        return Err(Refusal::invalid("previous", message));
    };
    // An answer that was cut off lacks the token that ends it.
    let is_ended = context.tokens().last().is_some_and(|&token| model.is_stop(token));
    Ok(after[end + usize::from(is_ended)..].to_vec())
}
