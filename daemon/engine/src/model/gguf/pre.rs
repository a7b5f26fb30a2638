//! How texts are cut into words before byte pairs are merged, by the name in `tokenizer.ggml.pre`. Expressions are those of the
//! models' own `tokenizer.json`; names, and what is alike, are those of `llama-vocab.cpp` of llama.cpp.

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pre {
    /// One after the other; each find is a word.
    pub(super) patterns: &'static [&'static str],
    /// Whether a word that is an entry is its token, whatever the merges make of it.
    pub(super) ignores_merges: bool,
    /// Whether a text begins with the token of its beginning, unless the file says.
    pub(super) adds_bos: bool,
}

const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The names, for errors.
pub(super) const KNOWN: &str = "\"llama-bpe\", \"llama3\", \"llama-v3\", \"smaug-bpe\", \"dbrx\", \"qwen2\", \"deepseek-r1-qwen\", \"gpt-2\", \
    \"smollm\", \"tekken\" or \"pixtral\"";

impl Pre {
    pub(super) fn of(name: &str) -> Option<Self> {
        let (patterns, ignores_merges, adds_bos): (&[&str], _, _) = match name {
            "llama-bpe" | "llama3" | "llama-v3" => (&[LLAMA_3], true, true),
            "smaug-bpe" | "dbrx" => (&[LLAMA_3], false, false),
            "qwen2" | "deepseek-r1-qwen" => (&[QWEN_2], false, false),
            "gpt-2" => (&[GPT_2], false, false),
            "smollm" => (&[r"\p{N}", GPT_2], false, false),
            "tekken" | "pixtral" => (&[TEKKEN], true, true),
            _ => return None,
        };
        Some(Self { patterns, ignores_merges, adds_bos })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_that_errors_tell_is_known() {
        let names: Vec<&str> = KNOWN.split('"').skip(1).step_by(2).collect();
        assert!(names.len() == 11 && names.iter().all(|name| Pre::of(name).is_some()), "{names:?}");
        assert!(Pre::of("default").is_none());
    }
}
