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

const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What is read, and by which names.
const PRES: [(Pre, &[&str]); 7] = [
    (
        Pre { patterns: &[LLAMA_3], ignores_merges: true, adds_bos: true },
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"],
    ),
    (
        Pre { patterns: &[LLAMA_3], ignores_merges: false, adds_bos: false },
        &["smaug-bpe", "dbrx", "glm4", "chatglm-bpe"],
    ),
    (
        Pre { patterns: &[QWEN_2], ignores_merges: false, adds_bos: false },
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
    ),
    (
        Pre { patterns: &[GPT_2], ignores_merges: false, adds_bos: false },
        &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
    ),
    (
        Pre { patterns: &[r"\p{N}", GPT_2], ignores_merges: false, adds_bos: false },
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
    ),
    (Pre { patterns: &[TEKKEN], ignores_merges: true, adds_bos: true }, &["tekken"]),
    (Pre { patterns: &[SEED_CODER], ignores_merges: false, adds_bos: false }, &["seed-coder"]),
];

impl Pre {
    pub(super) fn of(name: &str) -> Option<Self> {
        PRES.iter().find(|(_, names)| names.contains(&name)).map(|(pre, _)| *pre)
    }
}

/// The names that are known, for errors.
pub(super) fn known() -> String {
    let names: Vec<String> =
        PRES.iter().flat_map(|(_, names)| *names).map(|name| format!("{name:?}")).collect();
    format!("one of {}", names.join(", "))
}
