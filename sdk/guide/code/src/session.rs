//! Messages, time and budgets.

use std::time::Duration;

use trellis_guest::{
    Chat, Context, Event, Inbox, Result, Sampler, Usage, emit, leaving, limits, messages, next_event,
    receive_within, time_left, try_receive, usage,
};

// ANCHOR: serve
/// Answers each message as it comes, until the client says that no more will.
pub fn serve(context: &Context) -> Result<usize> {
    let mut chat = Chat::new();
    let mut n_answers = 0;
    for message in messages() {
        chat.push("user", &message?);
        context.set_chat(&chat)?;
        let answer = context.generate(&Sampler::greedy()).max_tokens(64).emit().run()?;
        chat.push("assistant", &answer.text);
        emit!("\n")?;
        n_answers += 1;
    }
    Ok(n_answers)
}
// ANCHOR_END: serve

// ANCHOR: stop
/// Answers until it is done, or a message comes.
pub fn until_told(context: &Context) -> Result<Option<String>> {
    for piece in context.stream(&Sampler::greedy()).max_tokens(64).text()? {
        emit!("{}", piece?)?;
        if let Inbox::Message(message) = try_receive()? {
            return Ok(Some(message));
        }
    }
    Ok(None)
}
// ANCHOR_END: stop

// ANCHOR: within
/// A message, if one comes within a tenth of a second.
pub fn soon() -> Result<Option<String>> {
    Ok(match receive_within(Duration::from_millis(100))? {
        Inbox::Message(message) => Some(message),
        Inbox::NothingYet | Inbox::Closed => None,
    })
}
// ANCHOR_END: within

// ANCHOR: leaving
/// Answers messages until no more come, or the daemon is about to end: then all that was said is there for the next one.
pub fn keeping(context: &Context, name: &str) -> Result {
    loop {
        match next_event(None)? {
            Event::Message(message) => context.append_text(&message)?,
            Event::Leaving(_) => return context.save(name),
            Event::Closed | Event::NothingYet => return Ok(()),
        };
        for piece in context.stream(&Sampler::greedy()).max_tokens(64).text()? {
            emit!("{}", piece?)?;
            // What is said of the answer is kept as well.
            if leaving().is_some_and(|left| left < Duration::from_secs(2)) {
                break;
            }
        }
    }
}
// ANCHOR_END: leaving

// ANCHOR: budget
/// Whether there is time and budget for so many tokens more.
pub fn can_afford(n_tokens: u64) -> bool {
    let Usage { tokens, .. } = usage();
    time_left() > Duration::from_secs(2) && tokens.limit - tokens.used >= n_tokens
}
// ANCHOR_END: budget

// ANCHOR: limits
/// The part of its memory that the guest has grown into.
pub fn memory_in_use() -> f64 {
    let limits = limits();
    let memory = limits.iter().find(|limit| limit.name == "memory_bytes");
    memory.map_or(0.0, |memory| memory.used.unwrap_or_default() as f64 / memory.limit as f64)
}
// ANCHOR_END: limits

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked;

    #[test]
    fn without_a_client_no_message_comes() -> Result {
        let context = asked("What is 37 + 48?")?;
        assert_eq!(until_told(&context)?, None);
        assert_eq!(soon()?, None);
        assert_eq!(serve(&context)?, 0);
        let n_tokens = context.length();
        keeping(&context, "not saved")?;
        assert_eq!(context.length(), n_tokens, "nothing was said");
        assert!(context.model().saved_context("not saved").is_err(), "the daemon goes on");
        Ok(())
    }

    #[test]
    fn a_guest_knows_what_it_may_still_use() {
        assert!(can_afford(1000));
        assert!(!can_afford(u64::MAX));
        let part = memory_in_use();
        assert!(0.0 < part && part < 1.0, "{part}");
    }
}
