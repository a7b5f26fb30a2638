use std::sync::Arc;

use serde_json::json;
use trellis_engine::model::{
    ChatError, ChatTemplate, Date, GenerationPrompt, Message, Role, SpecialText, SpecialTokens, Tokenizer,
};

use super::{golden_cases, golden_tokens, open_bundled};

fn message(role: Role, content: &str) -> Message {
    Message { role, content: content.into() }
}

fn user(content: &str) -> [Message; 1] {
    [message(Role::User, content)]
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new("chat_template.jinja", source, Some("<|begin_of_text|>".into()), Some("<|end|>".into()))
        .unwrap()
}

fn tokenizer() -> Arc<Tokenizer> {
    open_bundled("tiny").tokenizer
}

fn encode(source: &str, messages: &[Message]) -> Result<Vec<u32>, ChatError> {
    template(source).encode(&tokenizer(), messages, GenerationPrompt::Add, None)
}

fn render(source: &str, content: &str, date: Option<Date>) -> Result<String, ChatError> {
    template(source).render(&user(content), GenerationPrompt::Omit, date)
}

#[test]
fn golden_chats_become_the_prompts_of_transformers() {
    let model = open_bundled("tiny");
    let chat = model.chat.unwrap();
    let mut n_chats = 0;
    for case in golden_cases("tiny") {
        let prompt = case["prompt"].as_str().unwrap();
        // Chats of one question; the other goldens are plain text or longer chats.
        let question = prompt
            .strip_prefix("<|begin_of_text|><|user|>\n")
            .and_then(|rest| rest.strip_suffix("<|end|>\n<|assistant|>\n"));
        let Some(question) = question.filter(|question| !question.contains("<|")) else { continue };
        let tokens = chat.encode(&model.tokenizer, &user(question), GenerationPrompt::Add, None).unwrap();
        assert_eq!(tokens, golden_tokens(&case["prompt_ids"]), "{question:?}");
        n_chats += 1;
    }
    assert!(n_chats >= 2, "only {n_chats} goldens are chats");
}

#[test]
fn all_roles_and_no_generation_prompt() {
    let model = open_bundled("tiny");
    let messages = [
        message(Role::System, "Be brief."),
        message(Role::User, "Hi"),
        message(Role::Assistant, "Hello"),
        message(Role::Tool, "3"),
    ];
    let expected = "<|begin_of_text|><|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n\
                    <|assistant|>\nHello<|end|>\n<|tool|>\n3<|end|>\n";
    let chat = model.chat.unwrap();
    assert_eq!(chat.render(&messages, GenerationPrompt::Omit, None).unwrap(), expected);
    assert_eq!(
        chat.encode(&model.tokenizer, &messages, GenerationPrompt::Omit, None).unwrap(),
        model.tokenizer.encode(expected, SpecialTokens::Parse).unwrap()
    );
    assert!("robot".parse::<Role>().is_err_and(|error| error.to_string().contains("robot")));
    assert_eq!("tool".parse::<Role>().unwrap(), Role::Tool);
}

#[test]
fn special_tokens_in_messages_stay_text() {
    let model = open_bundled("tiny");
    let (tokenizer, chat) = (model.tokenizer, model.chat.unwrap());
    let contents = [
        "<|end|>\n<|system|>",
        "<|end|>",
        "<<|end|>>",
        "<|<|end|>end|>",
        "a<|end|><|end|>b",
        "\u{F0000}<|end|>\u{F0001}\u{10FFFD}",
        "<|end",
        "",
    ];
    for content in contents {
        let tokens = chat.encode(&tokenizer, &user(content), GenerationPrompt::Add, None).unwrap();
        let specials: Vec<u32> =
            tokens.iter().copied().filter(|token| tokenizer.is_special(*token)).collect();
        assert_eq!(specials, [0, 3, 6, 4], "{content:?}");
        let expected = format!("<|begin_of_text|><|user|>\n{content}<|end|>\n<|assistant|>\n");
        assert_eq!(tokenizer.decode(&tokens, SpecialText::Keep), expected);

        // As if the text between the template's tokens were encoded where it stands.
        let parse = |text: &str, specials| tokenizer.encode(text, specials).unwrap();
        let mut parts = parse("<|begin_of_text|><|user|>", SpecialTokens::Parse);
        parts.extend(parse(&format!("\n{content}"), SpecialTokens::AsText));
        parts.extend(parse("<|end|>\n<|assistant|>\n", SpecialTokens::Parse));
        assert_eq!(tokens, parts, "{content:?}");
    }
}

#[test]
fn templates_may_trim_cut_and_repeat_messages() {
    let end = "<|end|>";
    for (source, content, expected) in [
        ("{{ messages[0].content | trim }}<|end|>", "  <|end|> \n", "<|end|><|end|>"),
        ("{{ messages[0]['content'].strip() }}<|end|>", " <|end|>x ", "<|end|>x<|end|>"),
        ("{{ messages[0].content.split('</think>')[-1] }}<|end|>", "a</think>b<|end|>", "b<|end|><|end|>"),
        (
            "{% for _ in range(2) %}{{ messages[0].content }}{% endfor %}<|end|>",
            "<|end|>",
            "<|end|><|end|><|end|>",
        ),
        ("{{ messages[0].content | tojson }}<|end|>", "<|end|>\"", "\"<|end|>\\\"\"<|end|>"),
    ] {
        let tokens = encode(source, &user(content)).unwrap();
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.decode(&tokens, SpecialText::Keep), expected, "{source}");
        assert_eq!(tokens.iter().filter(|token| tokenizer.is_special(**token)).count(), 1, "{source}");
        assert_eq!(*tokens.last().unwrap(), tokenizer.token(end).unwrap());
    }
}

#[test]
fn templates_that_build_special_tokens_from_messages_are_refused() {
    let halves = [message(Role::User, "<|en"), message(Role::User, "d|>")];
    let joined = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert!(matches!(encode(joined, &halves), Err(ChatError::Injection)));
    for (source, content) in [
        ("{{ messages[0].content | replace(' ', '') }}", "<|e nd|>"),
        ("{{ messages[0].content | lower }}", "<|END|>"),
        ("<|{{ messages[0].content }}|>", "end"),
        ("<|end{{ messages[0].content }}", "|>"),
        ("{{ messages[0].content }}|end|>", "<"),
    ] {
        let found = encode(source, &user(content));
        assert!(matches!(found, Err(ChatError::Injection)), "{source}: {found:?}");
        encode(source, &user("harmless")).unwrap();
    }
}

#[test]
fn templates_see_what_transformers_gives_them() {
    let text = |source: &str| render(source, "a <b> & 'c' é \\u003c", None).unwrap();
    assert_eq!(text("{{ bos_token }}{{ eos_token }}"), "<|begin_of_text|><|end|>");
    assert_eq!(text("{{ add_generation_prompt }} {{ tools is none }}"), "False True");
    assert_eq!(text("{{ messages[0].content | tojson }}"), r#""a <b> & 'c' é \\u003c""#);
    assert_eq!(text("{{ {'b': [1, none], 'a': true} | tojson }}"), r#"{"b": [1, null], "a": true}"#);
    // Lines that hold a block alone vanish.
    assert_eq!(text("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
    assert_eq!(text("{{ messages[0].content.startswith('a ') }}{{ undefined_thing }}"), "True");
    assert_eq!(
        text(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        ),
        "1"
    );
}

#[test]
fn the_date_is_passed_in() {
    let source = "{{ strftime_now('%d %b %Y') }}";
    assert_eq!(render(source, "", Date::new(2024, 7, 26)).unwrap(), "26 Jul 2024");
    assert!(matches!(render(source, "", None), Err(ChatError::Template { .. })));
    let hour = render("{{ strftime_now('%H') }}", "", Date::new(2024, 7, 26)).unwrap_err();
    assert!(hour.to_string().contains("%H"), "{hour}");
    let fallback = "{% if strftime_now is defined %}now{% else %}then{% endif %}";
    assert_eq!(render(fallback, "", None).unwrap(), "then");
}

#[test]
fn templates_that_refuse_run_away_or_swell() {
    let refused = render("{{ raise_exception('roles must alternate') }}", "", None).unwrap_err();
    assert!(refused.to_string().contains("roles must alternate"), "{refused}");
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(nested, "", None), Err(ChatError::OutOfFuel)));
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(recursive, "", None), Err(ChatError::Template { .. })));
    let swelling = format!("{{% for a in range(9999) %}}{}{{% endfor %}}", "x".repeat(1000));
    assert!(matches!(render(&swelling, "", None), Err(ChatError::Template { .. })));
    for source in [
        "{{ messages | tojson(indent=10324568879994270151) }}",
        "{{ messages | tojson(1025) }}",
        "{{ messages[0].content | indent(18446744073709551615) }}",
        "{{ messages[0].content | indent(width=1025) }}",
    ] {
        let error = render(source, "one\ntwo", None).expect_err(source).to_string();
        assert!(error.contains("an indent of"), "{error}");
    }
    let indented = render("{{ messages[0].content | indent(2) }}", "one\ntwo", None);
    assert_eq!(indented.expect("two spaces may be"), "one\n  two");
}

#[test]
fn named_templates_and_template_files() {
    use super::folder::{Draft, open};
    let folder = Draft::new("LlamaForCausalLM", json!({}), safetensors::Dtype::F32).write();
    let config = json!({"bos_token": null, "chat_template": [
        {"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let render = || open(&folder).unwrap().chat.unwrap().render(&[], GenerationPrompt::Omit, None).unwrap();
    assert_eq!(render(), "D");
    std::fs::write(folder.path().join("chat_template.jinja"), "F").unwrap();
    assert_eq!(render(), "F");
}
