//! Chat templates: none runs for ever, and what people say never becomes a special token.

use std::sync::{Arc, LazyLock};

use trellis_engine::model::{
    ChatError, ChatTemplate, Date, GenerationPrompt, Message, Model, Role, SpecialText,
};

use crate::bundled;

/// Published templates, in short: those of the bundled models, of Llama 2 and of ChatML with a default.
const TEMPLATES: [&str; 3] = [
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}\
     {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}\
     {% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
    "{% if messages[0]['role'] != 'system' %}{{ '<|system|>\nBe brief.<|end|>\n' }}{% endif %}{% for m in messages %}\
     {{ '<|' + m['role'] + '|>\n' + m['content'] | tojson + '<|end|>' + '\n' }}{% endfor %}",
];

/// The longest message, in bytes, and the most of them.
const MESSAGE_BYTES_MAX: usize = 1 << 10;
const N_MESSAGES_MAX: usize = 8;

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| bundled::model("tiny"));

/// Renders a chat: one byte says with which template and how, the parts between bytes of 0 are the template, if it is none of
/// the published ones, and the messages, each after a byte for its speaker.
///
/// # Panics
/// A template that is published makes a special token of a message or refuses it, or the text of the tokens is not the text
/// that people are shown.
pub fn check(input: &[u8]) {
    let Some((&how, rest)) = input.split_first() else { return };
    let mut parts = rest.split(|&byte| byte == 0);
    let published = TEMPLATES.get(usize::from(how & 3));
    let template = match published {
        Some(template) => (*template).to_owned(),
        None => String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned(),
    };
    let end = if how & 4 == 0 { GenerationPrompt::Add } else { GenerationPrompt::Omit };
    let date = if how & 8 == 0 { None } else { Date::new(2024, 2, 29) };
    let messages: Vec<Message> = parts.take(N_MESSAGES_MAX).map(message).collect();

    let bos = Some("<|begin_of_text|>".to_owned());
    let template = match ChatTemplate::new("chat_template.jinja", &template, bos, Some("<|end|>".to_owned()))
    {
        Ok(template) => template,
        Err(error) => return assert!(error.to_string().contains("chat_template.jinja"), "{error}"),
    };
    let tokenizer = &MODEL.tokenizer;
    let shown = template.render(&messages, end, date);
    let encoded = template.encode(tokenizer, &messages, end, date);
    let are_plain = messages.iter().all(|message| !message.content.contains('<'));
    if let (Ok(shown), Ok(tokens), true) = (&shown, &encoded, are_plain) {
        assert_eq!(&tokenizer.decode(tokens, SpecialText::Keep), shown);
    }
    if published.is_none() || messages.is_empty() {
        return;
    }
    let n_specials = |tokens: &[u32]| tokens.iter().filter(|&&token| tokenizer.is_special(token)).count();
    let of_blank: Vec<Message> =
        messages.iter().map(|message| Message { content: "x".to_owned(), ..message.clone() }).collect();
    let blank = template.encode(tokenizer, &of_blank, end, date).expect("a published template takes it");
    match encoded {
        Ok(tokens) => assert_eq!(n_specials(&tokens), n_specials(&blank), "{messages:?}"),
        // What a template writes around a message may complete a special token with it.
        Err(ChatError::Injection) => assert!(!are_plain || how & 3 == 1, "{messages:?}"),
        Err(error) => panic!("{error}: {messages:?}"),
    }
}

fn message(bytes: &[u8]) -> Message {
    let (role, content) = bytes.split_first().unwrap_or((&0, &[]));
    let roles = [Role::User, Role::Assistant, Role::System, Role::Tool];
    let content = &content[..content.len().min(MESSAGE_BYTES_MAX)];
    Message { role: roles[usize::from(role % 4)], content: String::from_utf8_lossy(content).into_owned() }
}
