//! Models that ship inside the binary.

use serde_json::Value;
use trellis_engine::model::ModelSource;

/// Files by their names.
type Files = [(&'static str, &'static [u8])];

macro_rules! files {
    ($name:literal) => {
        &[
            files!($name, "config.json"),
            files!($name, "generation_config.json"),
            files!($name, "model.safetensors"),
            files!($name, "tokenizer.json"),
            files!($name, "tokenizer_config.json"),
        ]
    };
    ($name:literal, $file:literal) => {
        ($file, include_bytes!(concat!("../models/", $name, "/", $file)))
    };
}

// Statics: what is a constant in a function may be in the binary as often as the function is.
static TINY: &Files = files!("tiny");
static DRAFT: &Files = files!("draft");

/// Names of the bundled models, the default first.
pub const NAMES: [&str; 2] = ["tiny", "draft"];

/// The files of the bundled model of this name.
#[must_use]
pub fn source(name: &str) -> Option<ModelSource> {
    match name {
        "tiny" => Some(ModelSource::Embedded(TINY)),
        "draft" => Some(ModelSource::Embedded(DRAFT)),
        _ => None,
    }
}

/// Lets go of the memory in which the system has the bundled weights: whoever has loaded a model has weights of its own. They are read
/// from the program's file again if need be.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "what is said of memory by its address")]
pub(crate) fn let_go() {
    use rustix::mm::{Advice, madvise};
    let page_bytes = rustix::param::page_size();
    // A program that unpacks itself has its constants in memory that is nobody's file, which would be zeros then.
    let of_files = ranges_of_files();
    for (_, bytes) in TINY.iter().chain(DRAFT) {
        let start = bytes.as_ptr().align_offset(page_bytes);
        let whole = bytes.get(start..).unwrap_or_default();
        let n_bytes = whole.len() - whole.len() % page_bytes;
        let first = whole.as_ptr() as usize;
        if !of_files.iter().any(|range| range.start <= first && first + n_bytes <= range.end) {
            continue;
        }
        // SAFETY: only whole pages within `bytes`, which are constant data without addresses in it, and in a mapping of a file:
        // pages that nothing has written to. Reading them brings the same bytes again.
        let advised = unsafe { madvise(whole.as_ptr().cast_mut().cast(), n_bytes, Advice::LinuxDontNeed) };
        if let Err(error) = advised {
            tracing::debug!(%error, "the bundled models stay in memory");
        }
    }
}

/// Addresses at which this process has files that it does not write to.
#[cfg(target_os = "linux")]
fn ranges_of_files() -> Vec<std::ops::Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let range = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (addresses, modes) = (fields.next()?, fields.next()?);
        let is_of_file = fields.nth(2)? != "0" && !modes.contains('w');
        let (start, end) = addresses.split_once('-')?;
        let parse = |address| usize::from_str_radix(address, 16).ok();
        is_of_file.then_some(parse(start)?..parse(end)?)
    };
    maps.lines().filter_map(range).collect()
}

/// On other systems it is theirs to decide.
#[cfg(not(target_os = "linux"))]
pub(crate) fn let_go() {}

/// The tokenizer of the bundled models, for models that have none of their own.
pub(crate) fn tokenizer_json() -> &'static [u8] {
    let file = TINY.iter().find(|(name, _)| *name == "tokenizer.json");
    file.expect("a bundled model has all of its files").1
}

/// The same with words made up for a vocabulary of this size: a constraint then has bytes to look at for every token, as with
/// a model's own tokenizer. No text is encoded as one of them.
pub(crate) fn tokenizer_json_of(vocab_size: usize) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(tokenizer_json()).expect("the bundled file is JSON");
    let words = json["model"]["vocab"].as_object_mut().expect("it has a vocabulary");
    let n_known = words.len();
    for id in n_known..vocab_size {
        // Every other one begins with a space, as the byte-level alphabet writes it.
        let mut word = if id % 2 == 0 { "Ġ".to_owned() } else { String::new() };
        let mut rest = id;
        while rest > 0 {
            word.push(char::from(b"etaoinshrdlucmfwypvbgkqjxz"[rest % 26]));
            rest /= 26;
        }
        while words.contains_key(&word) {
            word.push('q');
        }
        words.insert(word, id.into());
    }
    serde_json::to_vec(&json).expect("it was JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_made_up_for_every_token_of_a_larger_vocabulary() {
        use trellis_engine::model::{SpecialTokens, Tokenizer};
        let [own, made] = [4096, 20_000]
            .map(|n| Tokenizer::from_json("tokenizer.json", &tokenizer_json_of(n), n).expect("a tokenizer"));
        let text = "The quick brown fox, twice.";
        let encode = |tokenizer: &Tokenizer| tokenizer.encode(text, SpecialTokens::AsText).expect("text");
        assert_eq!(encode(&own), encode(&made));
        assert!((4096..20_000).all(|token| made.token_bytes(token).is_some_and(|bytes| !bytes.is_empty())));
    }

    #[test]
    fn what_is_let_go_of_is_there_again() {
        let sum =
            || blake3::hash(TINY.iter().find(|(name, _)| name.ends_with("tensors")).expect("weights").1);
        let before = sum();
        let_go();
        assert_eq!(sum(), before);
    }

    #[test]
    fn every_name_has_its_files() {
        for name in NAMES {
            let source = source(name).expect("listed");
            let model = trellis_engine::model::Model::open(name, &source).expect("a whole model");
            assert_eq!(model.config.vocab_size, 4096);
        }
        assert!(source("llama").is_none());
    }
}
