//! Texts and chats that are encoded in parts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use serde_json::{Value, json};
use trellis_engine::model::{
    ChatError, ChatTemplate, EncodeError, GenerationPrompt, GivenUp, Message, Role, SpecialTokens, Tokenizer,
    YieldPoint,
};

use super::bundled_path;
use super::tokenizer::pieces_json;

const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn bundled(name: &str) -> Value {
    let bytes = std::fs::read(bundled_path(name).join("tokenizer.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

/// `tokenizer.json` of many kinds: bundled, in the manner of published ones, and one that the library alone can cut ("a space before").
fn kinds() -> Vec<(&'static str, Value)> {
    let tiny = bundled("tiny");
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = tiny.clone();
        change(&mut changed);
        changed
    };
    vec![
        ("tiny", tiny.clone()),
        ("draft", bundled("draft")),
        ("gpt-2", with(&|json| json["pre_tokenizer"] = bytes(true))),
        (
            "qwen",
            with(&|json| {
                json["normalizer"] = json!({"type": "NFC"});
                json["pre_tokenizer"] =
                    json!({"type": "Sequence", "pretokenizers": [split(QWEN), bytes(false)]});
                json["added_tokens"][7]["special"] = json!(false);
                json["added_tokens"][7]["normalized"] = json!(true);
            }),
        ),
        (
            "deepseek",
            with(&|json| {
                let parts =
                    [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(r"\s+|\w+|\W"), bytes(false)];
                json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": parts});
                json["model"]["ignore_merges"] = json!(true);
            }),
        ),
        (
            "a space before",
            with(&|json| json["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true)),
        ),
        (
            "starcoder",
            with(&|json| {
                let digits = json!({"type": "Digits", "individual_digits": true});
                json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [digits, bytes(true)]});
                json["normalizer"] = json!({"type": "Sequence", "normalizers": []});
                json["model"]["continuing_subword_prefix"] = json!("");
                json["model"]["end_of_word_suffix"] = json!("");
            }),
        ),
        (
            "numbers",
            with(&|json| {
                let digits = json!({"type": "Digits", "individual_digits": false});
                json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [digits, bytes(true)]});
                json["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]});
            }),
        ),
        ("pieces", serde_json::from_str(&pieces_json()).unwrap()),
        ("llama", sentence_pieces()),
        (
            "gemma",
            changed(sentence_pieces(), &|json| {
                json["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
                json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "},
                    "behavior": "MergedWithPrevious", "invert": false});
                json["added_tokens"][2]["special"] = json!(false);
                json["added_tokens"][2]["normalized"] = json!(true);
            }),
        ),
        ("first", metaspace("first")),
        ("always", metaspace("always")),
        ("never", metaspace("never")),
    ]
}

fn changed(mut json: Value, change: &dyn Fn(&mut Value)) -> Value {
    change(&mut json);
    json
}

/// In the manner of Llama 2, with the merges of a bundled vocabulary.
fn sentence_pieces() -> Value {
    let tiny = bundled("tiny");
    let mut json: Value = serde_json::from_str(&pieces_json()).unwrap();
    let is_plain = |entry: &str| entry.chars().all(|c| c == 'Ġ' || c.is_ascii_graphic());
    let entry_of = |value: &Value| value.as_str().unwrap().replace('Ġ', "▁");
    let mut merges = Vec::new();
    let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
    let mut add = |entry: String| {
        let token = vocabulary.len();
        vocabulary.entry(entry).or_insert(json!(token));
    };
    ('!'..='~').chain(['世', 'é']).for_each(|c| add(c.to_string()));
    for merge in tiny["model"]["merges"].as_array().unwrap() {
        if [&merge[0], &merge[1]].iter().all(|part| is_plain(part.as_str().unwrap())) {
            let pair = [entry_of(&merge[0]), entry_of(&merge[1])];
            add(pair.concat());
            merges.push(json!(pair));
        }
    }
    assert!(merges.len() > 1_000, "{}", merges.len());
    json["model"]["merges"] = json!(merges);
    json
}

/// In the manner of later files of that kind.
fn metaspace(before: &str) -> Value {
    changed(sentence_pieces(), &|json| {
        json["normalizer"] = json!(null);
        json["pre_tokenizer"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": before, "split": false});
    })
}

fn ours(json: &Value) -> Tokenizer {
    let bytes = serde_json::to_vec(json).unwrap();
    Tokenizer::from_json("tokenizer.json", &bytes, 8192).unwrap()
}

/// The library's own pipeline.
fn reference(json: &Value, specials: SpecialTokens) -> tokenizers::Tokenizer {
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(json).unwrap()).unwrap();
    tokenizer.set_encode_special_tokens(specials == SpecialTokens::AsText);
    tokenizer
}

/// Texts that are hard to cut, each of some kilobytes.
fn hard_texts() -> Vec<String> {
    let words = [
        "hello", " ", "it's", "\n", "\r\n", "  ", "42", "123456", "e\u{301}", "ｱ", "世界", "。", "<|end|>",
        "--", "\t", "🌱",
    ];
    let mut state = 7_u64;
    let mut mixed = || {
        let picks = (0..3_000).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            words[(state >> 33) as usize % words.len()]
        });
        picks.collect::<String>()
    };
    let mut texts = vec![mixed(), mixed(), mixed()];
    let long = [
        "a", " ", "\n", "abcdefgh", "!", "<|", "世", "e\u{301}", "\u{301}", "1", " \n", "\u{a0}", "Ż", "the",
    ];
    texts.extend(long.map(|text| text.repeat(6_000 / text.len())));
    texts.extend(long.map(|text| format!("so {} it's", text.repeat(2_000 / text.len()))));
    texts
}

#[test]
fn the_tokens_are_those_of_the_library_with_every_kind_of_vocabulary() {
    for (name, json) in kinds() {
        let tokenizer = ours(&json);
        for specials in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let reference = reference(&json, specials);
            for text in hard_texts() {
                let tokens = tokenizer.encode(&text, specials).unwrap();
                let expected = reference.encode_fast(text.as_str(), false).unwrap();
                let shown: String = text.chars().take(40).collect();
                assert!(tokens == expected.get_ids(), "{name}, {specials:?}: {shown:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_texts_have_the_tokens_of_the_library(
        parts in prop::collection::vec(prop_oneof![
            "\\PC{0,8}", "[ \\n\\r\\t]{1,6}", "[a-zA-Z']{1,9}", "[0-9]{1,5}", "[\\u{300}-\\u{320}가-힣ぁ-ん一-龥é]{1,6}",
            Just("<|end|>".to_owned()), Just("<|user|>\n".to_owned()), Just("<|".to_owned()), Just("</s>".to_owned()),
        ], 0..40),
    ) {
        let text = parts.concat();
        for (name, json) in kinds() {
            let tokens = ours(&json).encode(&text, SpecialTokens::Parse).unwrap();
            let expected = reference(&json, SpecialTokens::Parse).encode_fast(text.as_str(), false).unwrap();
            prop_assert_eq!(&tokens, expected.get_ids(), "{}", name);
        }
    }
}

/// Yield points that give up at the one of this number, and how many were reached.
fn giving_up_at(number: usize) -> (YieldPoint, Arc<AtomicUsize>) {
    let n_reached = Arc::new(AtomicUsize::new(0));
    let counted = n_reached.clone();
    let yields = YieldPoint::new(move || {
        if counted.fetch_add(1, Ordering::Relaxed) >= number { Err(GivenUp) } else { Ok(()) }
    });
    (yields, n_reached)
}

#[cfg(target_os = "linux")]
#[test]
fn a_part_takes_milliseconds_at_most() {
    use std::sync::Mutex;
    use std::time::Duration;

    use rustix::time::{ClockId, clock_gettime};

    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    // One that the library cuts takes the whole of these texts at once.
    let in_parts = kinds().into_iter().filter(|(name, _)| *name != "a space before");
    for (name, json) in in_parts {
        let tokenizer = ours(&json);
        for part in ["a", "the quick brown fox ", " ", "\n", "世", "!", "<|", "<|end|>", "a1 "] {
            // A run of white space is one match of an expression.
            let n_bytes = if part.trim().is_empty() { 64 << 10 } else { 1 << 20 };
            let text = part.repeat(n_bytes / part.len());
            let longest_part = || {
                let times = Arc::new(Mutex::new((now(), Duration::ZERO)));
                let noted = times.clone();
                let yields = YieldPoint::new(move || {
                    let mut times = noted.lock().unwrap();
                    let at = now();
                    *times = (at, times.1.max(at - times.0));
                    Ok(())
                });
                times.lock().unwrap().0 = now();
                tokenizer.encode_in_parts(&text, SpecialTokens::Parse, &yields).unwrap();
                yields.reach().unwrap();
                times.lock().unwrap().1
            };
            // A processor that others make slow counts as the text's own time: the quickest of a few tries tells.
            let mut longest = longest_part();
            for _ in 0..4 {
                if longest < Duration::from_millis(10) {
                    break;
                }
                longest = longest.min(longest_part());
            }
            println!("{name}, {part:?}: {longest:?}");
            assert!(longest < Duration::from_millis(20), "{name}, {part:?}: {longest:?}");
        }
    }
}

#[test]
fn what_is_given_up_ends_there() {
    for (name, json) in kinds() {
        let tokenizer = ours(&json);
        let (yields, n_reached) = giving_up_at(3);
        let text = "one two three ".repeat(10_000);
        let given_up = tokenizer.encode_in_parts(&text, SpecialTokens::Parse, &yields);
        assert!(matches!(given_up, Err(EncodeError::GivenUp(GivenUp))), "{name}");
        assert_eq!(n_reached.load(Ordering::Relaxed), 4, "{name}");
    }
}

#[test]
fn a_chat_is_given_up_wherever_it_is() {
    let tokenizer = ours(&bundled("tiny"));
    let source =
        "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}";
    let template = ChatTemplate::new("chat", source, None, None).unwrap();
    let message =
        |n: usize| Message { role: Role::User, content: format!("{n} words and more. ").repeat(40) };
    let messages: Vec<_> = (0..20).map(message).collect();
    let encode = |yields: &YieldPoint| {
        template.encode_in_parts(&tokenizer, &messages, GenerationPrompt::Omit, None, yields)
    };
    let (yields, n_reached) = giving_up_at(usize::MAX);
    assert_eq!(encode(&yields).unwrap(), encode(&YieldPoint::NONE).unwrap());
    let n_all = n_reached.load(Ordering::Relaxed);
    assert!(n_all > 200, "{n_all} for each message and each word");
    for number in (0..n_all).step_by(n_all / 50) {
        let (yields, n_reached) = giving_up_at(number);
        let given_up = encode(&yields).expect_err("given up");
        let is_given_up = matches!(
            given_up,
            ChatError::GivenUp(GivenUp) | ChatError::Encode(EncodeError::GivenUp(GivenUp))
        );
        assert!(is_given_up, "{given_up}");
        assert!(n_reached.load(Ordering::Relaxed) <= number + 8, "it goes on after {number}");
    }
}

#[test]
fn a_template_that_only_looks_at_messages_is_given_up() {
    let tokenizer = ours(&bundled("tiny"));
    let source = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new("chat", source, None, None).unwrap();
    let messages: Vec<_> = (0..200).map(|_| Message { role: Role::User, content: String::new() }).collect();
    let n_before = 3 + 200;
    let (yields, n_reached) = giving_up_at(n_before + 100);
    let given_up = template.encode_in_parts(&tokenizer, &messages, GenerationPrompt::Omit, None, &yields);
    assert!(matches!(given_up, Err(ChatError::GivenUp(GivenUp))), "{given_up:?}");
    let n_reached = n_reached.load(Ordering::Relaxed);
    assert!(n_reached < 20_000, "{n_reached} of 40,000 looks");
}
