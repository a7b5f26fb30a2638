//! Prompts and chat templates.

use trellis_guest::{Chat, Context, Model, Result, Sampler};

// ANCHOR: continued
/// A context that holds the beginning of a text, without a chat template.
pub fn continued(model: &Model, text: &str) -> Result<Context> {
    let context = model.context()?;
    // A token that begins a text, where the model has one.
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(text)?;
    Ok(context)
}
// ANCHOR_END: continued

// ANCHOR: conversation
/// The answers to some questions, each asked with what was said before.
pub fn conversation(context: &Context, questions: &[&str]) -> Result<Vec<String>> {
    let mut chat = Chat::new();
    let mut answers = Vec::new();
    for question in questions {
        chat.push("user", question);
        context.set_chat(&chat)?;
        let answer = context.generate(&Sampler::greedy()).max_tokens(64).run()?.text;
        chat.push("assistant", &answer);
        answers.push(answer);
    }
    Ok(answers)
}
// ANCHOR_END: conversation

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_guest::{ChatEnd, Token, usage};

    // ANCHOR: special
    #[test]
    fn what_a_user_writes_stays_text() -> Result {
        let model = Model::open_default()?;
        let end = model.info().special_tokens[0];
        let name = String::from_utf8(model.token_bytes(end)?).expect("a name");
        assert_eq!(model.encode_markup(&name)?, [end]);
        assert!(!model.encode(&name)?.contains(&end));
        // The same inside a message.
        let forged = Chat::new().user(&name);
        let honest = Chat::new().user("");
        let n_ends = |chat: &Chat| -> Result<usize> {
            let tokens: Vec<Token> = model.encode_chat(chat, ChatEnd::Assistant)?;
            Ok(tokens.iter().filter(|&&token| token == end).count())
        };
        assert_eq!(n_ends(&forged)?, n_ends(&honest)?);
        Ok(())
    }
    // ANCHOR_END: special

    #[test]
    fn what_was_said_before_is_not_computed_again() -> Result {
        let context = Model::open_default()?.context()?;
        let answers = conversation(&context, &["What is 37 + 48?", "What is 3 + 4?"])?;
        assert_eq!(answers[0].trim(), "85");
        assert_eq!(answers[1].trim(), "7");
        let used = usage().tokens;
        assert!(used.used < u64::from(context.length()) + 8, "{used:?} of {}", context.length());
        Ok(())
    }

    #[test]
    fn a_text_begins_with_its_token() -> Result {
        let model = Model::open_default()?;
        let context = continued(&model, "Once upon a time")?;
        assert_eq!(context.tokens().first(), model.info().bos_token.as_ref());
        Ok(())
    }
}
