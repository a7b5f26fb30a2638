//! Tokens that end a text, and those that are special whatever type the file gives them: what `llama-vocab.cpp` of llama.cpp makes of keys and,
//! where a file does not say, of the texts of tokens (`special_eog_ids` there).

use std::collections::{BTreeSet, HashMap};

use super::super::error::ModelError;
use super::super::fields::Fields;
use crate::batch::Token;

/// Texts of tokens that end a turn or a text, whatever the file calls them.
const TEXTS: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// What a token is for where a model fills in the middle of a text.
struct Part {
    /// The keys that name it, the older one last.
    keys: &'static [&'static str],
    /// How it is written where no key names it.
    texts: &'static [&'static str],
    /// Whether what is filled in ends with it: padding, and what parts one file or repository from the next.
    is_end: bool,
}

const PARTS: [Part; 6] = [
    Part {
        keys: &["tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"],
        texts: &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        is_end: false,
    },
    Part {
        keys: &["tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"],
        texts: &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        is_end: false,
    },
    Part {
        keys: &["tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"],
        texts: &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        is_end: false,
    },
    Part {
        keys: &["tokenizer.ggml.fim_pad_token_id"],
        texts: &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
        is_end: true,
    },
    Part {
        keys: &["tokenizer.ggml.fim_rep_token_id"],
        texts: &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
        is_end: true,
    },
    Part { keys: &["tokenizer.ggml.fim_sep_token_id"], texts: &["<|file_sep|>"], is_end: true },
];

/// What is known of the tokens of a vocabulary by their roles.
pub(super) struct Ends {
    /// In order.
    pub(super) tokens: Vec<Token>,
    /// Tokens that are special, be they of another type in the file.
    pub(super) controls: Vec<Token>,
}

/// Of a vocabulary by its texts; `eos` is what the file, or its kind, names as the end of a text.
///
/// # Errors
/// [`ModelError::Field`] for a key with a number that no token has.
pub(super) fn ends(
    fields: &Fields,
    n_tokens: usize,
    tokens: &HashMap<&str, Token>,
    eos: Option<usize>,
) -> Result<Ends, ModelError> {
    let named = |key: &str| fields.count(key, 0, n_tokens - 1).map(|token| token.map(|token| token as Token));
    let of_text = |text: &&str| tokens.get(text).copied();
    let mut controls: Vec<Token> = TEXTS.iter().filter_map(of_text).collect();
    let mut all: BTreeSet<Token> = controls.iter().copied().collect();
    all.extend(eos.map(|token| token as Token));
    all.extend(named("tokenizer.ggml.eot_token_id")?);
    all.extend(named("tokenizer.ggml.eom_token_id")?);
    for part in &PARTS {
        let mut token = None;
        for key in part.keys {
            token = token.or(named(key)?);
        }
        if token.is_none() {
            token = part.texts.iter().find_map(of_text);
            controls.extend(token);
        }
        all.extend(token.filter(|_| part.is_end));
    }
    let has = |all: &BTreeSet<Token>, text: &str| tokens.get(text).is_some_and(|token| all.contains(token));
    let calls = has(&all, "<|call|>") || has(&all, "<|calls|>");
    // Where a call or the last channel of an answer has an end of its own, this one only parts a message from the next.
    if calls && (has(&all, "<|return|>") && has(&all, "<|call|>") || has(&all, "<|flush|>")) {
        tokens.get("<|end|>").map(|token| all.remove(token));
    }
    if has(&all, "<|tool_response>") {
        tokens.get("</s>").map(|token| all.remove(token));
    }
    Ok(Ends { tokens: all.into_iter().collect(), controls })
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    const VOCABULARY: [&str; 12] = [
        "a",
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<|fim_pad|>",
        "[PAD]",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "</s>",
        "<|tool_response>",
    ];

    fn of(fields: &Value, texts: &[&'static str], eos: Option<usize>) -> Result<Ends, String> {
        let map: &Map<String, Value> = fields.as_object().expect("an object");
        let tokens = texts.iter().enumerate().map(|(token, text)| (*text, token as Token)).collect();
        ends(&Fields::new("x.gguf", map), texts.len(), &tokens, eos).map_err(|error| error.to_string())
    }

    #[test]
    fn tokens_are_known_by_keys_and_by_texts() {
        let found = of(&json!({}), &VOCABULARY[..8], Some(0)).expect("in order");
        assert_eq!(found.tokens, [0, 1, 3, 5, 6, 7]);
        assert_eq!(found.controls, [7, 1, 2, 3, 5, 6]);
        let keys = json!({
            "tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 4, "tokenizer.ggml.fim_pad_token_id": 0,
            "tokenizer.ggml.prefix_token_id": 3,
        });
        let found = of(&keys, &VOCABULARY[..5], None).expect("in order");
        assert_eq!((found.tokens.as_slice(), found.controls.as_slice()), (&[0, 1, 2, 4][..], &[1][..]));
        let refused = of(&json!({"tokenizer.ggml.fim_sep_token_id": 5}), &VOCABULARY[..5], None);
        assert!(refused.err().is_some_and(|said| said.contains("fim_sep_token_id is 5")));
    }

    #[test]
    fn what_parts_messages_is_no_end_where_others_are() {
        let found = of(&json!({}), &VOCABULARY, Some(10)).expect("in order");
        assert_eq!(found.tokens, [1, 3, 5, 6, 8, 9, 11]);
        assert!(found.controls.contains(&7) && found.controls.contains(&10));
        let solar = of(&json!({}), &["<|end|>", "<|calls|>", "<|flush|>"], None).expect("in order");
        assert_eq!(solar.tokens, [1, 2]);
    }
}
