//! The vocabulary of a GGUF file as a `tokenizer.json`, so that one tokenizer serves both.
//!
//! Texts become the tokens that llama.cpp makes of them: with `gpt2` by merges of byte pairs, without Unicode normalisation; with
//! `llama` in the manner of SentencePiece, by the scores of its pieces, with a space before each text that is added.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::super::config_file::VOCAB_SIZE_MAX;
use super::super::error::ModelError;
use super::super::fields::Fields;
use super::super::folder::TOKENIZER_BYTES_MAX;
use super::ends::ends;
use super::header::{Header, Texts, Value, shortened};
use super::pre::{Pre, known};
use crate::batch::Token;

/// The longest entry of which merges are made; published ones are below 100 bytes.
const PIECE_BYTES_MAX: usize = 256;
/// All merges of a vocabulary of 256,000 pieces take a tenth of it.
const MERGES_BYTES_MAX: u64 = 128 << 20;

/// Of a published vocabulary of 131,072 tokens there are 270,000.
const N_MERGES_MAX: usize = 4 * VOCAB_SIZE_MAX;

/// All texts of a published vocabulary of 262,144 tokens take 4 MB, and the merges of one of 131,072 take 6 MB.
const TOKENS_BYTES_MAX: usize = 16 << 20;
const MERGE_TEXTS_BYTES_MAX: usize = 48 << 20;

/// Of files in the manner of SentencePiece that do not say, as in llama.cpp.
const BOS_OF_PIECES: usize = 1;
const EOS_OF_PIECES: usize = 2;

/// What SentencePiece writes for a space.
const MARK: &str = "▁";

/// What `tokenizer.ggml.token_type` says of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// What is made of the keys of `tokenizer.ggml`.
#[derive(Debug)]
pub(in super::super) struct Vocabulary {
    /// In the form of the `tokenizers` library.
    pub(in super::super) tokenizer_json: Vec<u8>,
    /// The token that texts begin with.
    pub(in super::super) bos_token: Option<Token>,
    /// What a chat template sees of them.
    pub(in super::super) bos_text: Option<String>,
    pub(in super::super) eos_text: Option<String>,
    pub(in super::super) stop_tokens: Vec<Token>,
}

/// The entries, of which those that stand for nothing are left out.
struct Entries<'a> {
    texts: &'a [&'a str],
    kinds: Vec<Kind>,
    tokens: HashMap<&'a str, Token>,
}

/// # Errors
/// [`ModelError::Field`] for a vocabulary of another kind, and for lists that do not fit one another.
pub(super) fn vocabulary(header: &Header, fields: &Fields) -> Result<Vocabulary, ModelError> {
    let texts = match header.values.get("tokenizer.ggml.tokens") {
        Some(Value::Texts(texts)) if texts.len() > 0 => texts,
        _ => return Err(fields.error("tokenizer.ggml.tokens", "a list of texts")),
    };
    // Before anything is made of them, which takes many times their bytes.
    fits(fields, "tokenizer.ggml.tokens", texts, VOCAB_SIZE_MAX, TOKENS_BYTES_MAX)?;
    if let Some(Value::Texts(merges)) = header.values.get("tokenizer.ggml.merges") {
        fits(fields, "tokenizer.ggml.merges", merges, N_MERGES_MAX, MERGE_TEXTS_BYTES_MAX)?;
    }
    let is_pieces = match fields.text("tokenizer.ggml.model")? {
        Some("gpt2") => false,
        Some("llama") => true,
        _ => return Err(fields.error("tokenizer.ggml.model", "\"gpt2\" or \"llama\"")),
    };
    let texts: Vec<&str> = texts.iter().collect();
    let default = |token: usize| Some(token).filter(|token| is_pieces && *token < texts.len());
    let id = |key: &str| fields.count(key, 0, texts.len() - 1);
    let bos = id("tokenizer.ggml.bos_token_id")?.or(default(BOS_OF_PIECES));
    let eos = id("tokenizer.ggml.eos_token_id")?.or(default(EOS_OF_PIECES));

    let mut entries = Entries::of(&texts, kinds(header, fields, &texts)?, fields)?;
    let ends = ends(fields, texts.len(), &entries.tokens, eos)?;
    for token in ends.controls {
        entries.kinds[token as usize] = Kind::Control;
    }
    let (mut tokenizer, adds_bos) = match is_pieces {
        false => byte_pairs(header, fields, &entries)?,
        true => (pieces(header, fields, &entries)?, true),
    };
    tokenizer["version"] = "1.0".into();
    tokenizer["added_tokens"] = entries.added();

    let said = fields.flag("tokenizer.ggml.add_bos_token")?;
    if said == Some(true) && bos.is_none() {
        return Err(fields.error("tokenizer.ggml.bos_token_id", "a token, since add_bos_token is true"));
    }
    let text = |id: Option<usize>| id.map(|id| texts[id].to_owned());
    let tokenizer_json = tokenizer.to_string().into_bytes();
    if tokenizer_json.len() as u64 > TOKENIZER_BYTES_MAX {
        let expected = format!("a tokenizer of at most {TOKENIZER_BYTES_MAX} bytes");
        return Err(fields.error("tokenizer.ggml.tokens", expected));
    }
    Ok(Vocabulary {
        tokenizer_json,
        bos_token: bos.filter(|_| said.unwrap_or(adds_bos)).map(|id| id as Token),
        bos_text: text(bos),
        eos_text: text(eos),
        stop_tokens: ends.tokens,
    })
}

/// Whether a list is one of which something can be made.
fn fits(
    fields: &Fields,
    key: &str,
    texts: &Texts,
    n_texts_max: usize,
    n_bytes_max: usize,
) -> Result<(), ModelError> {
    match texts.len() > n_texts_max || texts.n_bytes() > n_bytes_max {
        true => {
            Err(fields.error(key, format!("at most {n_texts_max} texts of {n_bytes_max} bytes together")))
        }
        false => Ok(()),
    }
}

/// What each token is. One without a text stands for nothing.
fn kinds(header: &Header, fields: &Fields, texts: &[&str]) -> Result<Vec<Kind>, ModelError> {
    let (key, n_tokens) = ("tokenizer.ggml.token_type", texts.len());
    let unless_empty = |text: &str, kind| if text.is_empty() { Kind::Unused } else { kind };
    let numbers = match header.values.get(key) {
        None => return Ok(texts.iter().map(|text| unless_empty(text, Kind::Normal)).collect()),
        Some(Value::Numbers(numbers)) if numbers.len() == n_tokens => numbers,
        Some(_) => return Err(fields.error(key, format!("a number for each of {n_tokens} tokens"))),
    };
    let kind = |number: Option<serde_json::Number>| match number.and_then(|number| number.as_u64()) {
        Some(1) => Ok(Kind::Normal),
        Some(2) => Ok(Kind::Unknown),
        Some(3) => Ok(Kind::Control),
        Some(4) => Ok(Kind::UserDefined),
        Some(5) => Ok(Kind::Unused),
        Some(6) => Ok(Kind::Byte),
        _ => Err(fields.error(key, "numbers from 1 to 6")),
    };
    let both = numbers.iter().zip(texts);
    both.map(|(number, text)| kind(number).map(|kind| unless_empty(text, kind))).collect()
}

impl<'a> Entries<'a> {
    fn of(texts: &'a [&'a str], kinds: Vec<Kind>, fields: &Fields) -> Result<Self, ModelError> {
        let mut tokens = HashMap::with_capacity(texts.len());
        for (token, (&text, kind)) in texts.iter().zip(&kinds).enumerate() {
            if *kind == Kind::Unused {
                continue;
            }
            if let Some(other) = tokens.insert(text, token as Token) {
                let expected =
                    format!("each text once; tokens {other} and {token} are both {:?}", shortened(text));
                return Err(fields.error("tokenizer.ggml.tokens", expected));
            }
        }
        Ok(Self { texts, kinds, tokens })
    }

    fn iter(&self) -> impl Iterator<Item = (Token, &'a str, Kind)> {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        all.map(|(token, (text, kind))| (token as Token, *text, *kind))
            .filter(|(.., kind)| *kind != Kind::Unused)
    }

    /// The vocabulary of the model; the tokens that are looked for before it are entries as well, which is what gives them their
    /// numbers.
    fn vocab(&self) -> Json {
        self.iter()
            .map(|(token, text, _)| (text.to_owned(), Json::from(token)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    fn added(&self) -> Json {
        let added = self.iter().filter_map(|(token, text, kind)| {
            let is_special = match kind {
                Kind::Control | Kind::Unknown => true,
                Kind::UserDefined => false,
                _ => return None,
            };
            Some(json!({
                "id": token, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": is_special,
            }))
        });
        added.collect()
    }
}

/// A vocabulary of byte pairs, and whether a text begins with a token for it.
fn byte_pairs(header: &Header, fields: &Fields, entries: &Entries) -> Result<(Json, bool), ModelError> {
    let pre = fields.text("tokenizer.ggml.pre")?.and_then(Pre::of);
    let pre = pre.ok_or_else(|| fields.error("tokenizer.ggml.pre", known()))?;
    let Some(Value::Texts(merges)) = header.values.get("tokenizer.ggml.merges") else {
        return Err(fields.error("tokenizer.ggml.merges", "a list of texts"));
    };
    let merges: Vec<(&str, &str)> = merges
        .iter()
        .map(|merge| {
            // The first may itself begin with what parts them.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let place = merge[first..].find(' ').map(|idx| first + idx);
            place.map(|idx| (&merge[..idx], &merge[idx + 1..])).ok_or_else(|| {
                let expected = format!("two entries in each, parted by a space, not {:?}", shortened(merge));
                fields.error("tokenizer.ggml.merges", expected)
            })
        })
        .collect::<Result<_, _>>()?;
    let splits = pre.patterns.iter().map(|pattern| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    });
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits.chain([bytes]).collect::<Json>()},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {
            "type": "BPE", "vocab": entries.vocab(), "merges": merges, "ignore_merges": pre.ignores_merges,
            "byte_fallback": false, "fuse_unk": false,
        },
    });
    Ok((tokenizer, pre.adds_bos))
}

/// A vocabulary of pieces with scores.
fn pieces(header: &Header, fields: &Fields, entries: &Entries) -> Result<Json, ModelError> {
    let n_tokens = entries.texts.len();
    let scores = match header.values.get("tokenizer.ggml.scores") {
        Some(Value::Numbers(numbers)) if numbers.len() == n_tokens => {
            numbers.iter().map(|number| number.and_then(|number| number.as_f64()))
        }
        _ => {
            let expected = format!("a number for each of {n_tokens} tokens");
            return Err(fields.error("tokenizer.ggml.scores", expected));
        }
    };
    let scores: Vec<f64> = scores
        .collect::<Option<_>>()
        .ok_or_else(|| fields.error("tokenizer.ggml.scores", "finite numbers"))?;
    let merges = merges_by_score(fields, entries, &scores)?;
    let prefixes = fields.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": MARK});
    let mut normalizers = vec![replace];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": MARK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefixes {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": MARK}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = entries.iter().find(|(.., kind)| *kind == Kind::Unknown).map(|(_, text, _)| text);
    Ok(json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "vocab": entries.vocab(), "merges": merges, "unk_token": unknown, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false,
        },
    }))
}

/// What SentencePiece does, as merges: of two neighbours that together are a piece, those of the best score come first. So does
/// `LlamaConverter` in `convert_slow_tokenizer.py` of transformers. Special tokens are nobody's merge: text never becomes one.
fn merges_by_score<'a>(
    fields: &Fields,
    entries: &Entries<'a>,
    scores: &[f64],
) -> Result<Vec<(&'a str, &'a str)>, ModelError> {
    let (mut merges, mut n_bytes) = (Vec::new(), 0_u64);
    for (token, text, kind) in entries.iter() {
        if !matches!(kind, Kind::Normal | Kind::UserDefined) {
            continue;
        }
        if text.len() > PIECE_BYTES_MAX {
            let expected =
                format!("pieces of at most {PIECE_BYTES_MAX} bytes; token {token} has {}", text.len());
            return Err(fields.error("tokenizer.ggml.tokens", expected));
        }
        let mut own = Vec::new();
        for (idx, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(idx);
            if let (Some(&first), Some(&second)) = (entries.tokens.get(left), entries.tokens.get(right)) {
                own.push((first, second, left, right));
                n_bytes += text.len() as u64;
            }
        }
        if n_bytes > MERGES_BYTES_MAX || merges.len() + own.len() > N_MERGES_MAX {
            let expected =
                format!("pieces with at most {N_MERGES_MAX} merges of {MERGES_BYTES_MAX} bytes together");
            return Err(fields.error("tokenizer.ggml.tokens", expected));
        }
        own.sort_unstable();
        let n_chars = |text: &str| text.chars().count();
        merges.extend(own.into_iter().map(|(_, _, left, right)| {
            ((scores[token as usize], n_chars(left), n_chars(right)), (left, right))
        }));
    }
    merges.sort_by(|((score, left, right), _), (other, _)| {
        other.0.total_cmp(score).then(other.1.cmp(left)).then(other.2.cmp(right))
    });
    Ok(merges.into_iter().map(|(_, merge)| merge).collect())
}
