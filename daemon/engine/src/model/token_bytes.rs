//! The bytes that each token stands for.

use serde_json::Value;

use crate::batch::Token;

/// How a vocabulary writes bytes, by the `decoder` of `tokenizer.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ByteScheme {
    /// One printable character for each byte (GPT-2).
    ByteLevel,
    /// Text with a mark for space, and `<0xNN>` for single bytes (SentencePiece).
    Pieces {
        /// Replacements, in order.
        replacements: Vec<(String, String)>,
        /// Whether `<0xNN>` is a byte.
        byte_fallback: bool,
        /// Whether a text loses the one space that encoding put before it.
        strips_leading_space: bool,
    },
}

impl ByteScheme {
    /// Reads the `decoder` of a tokenizer; the error says what is not supported.
    pub(crate) fn from_decoder(decoder: &Value) -> Result<Self, String> {
        let single = std::slice::from_ref(decoder);
        let parts = match decoder.get("decoders").and_then(Value::as_array) {
            Some(parts) => parts.as_slice(),
            None => single,
        };
        let (mut replacements, mut byte_fallback, mut strips_leading_space) = (Vec::new(), false, false);
        for part in parts {
            let text = |value: &Value| value.as_str().map(str::to_owned);
            match part["type"].as_str() {
                Some("ByteLevel") => return Ok(Self::ByteLevel),
                Some("ByteFallback") => byte_fallback = true,
                Some("Fuse") => {}
                Some("Strip") => strips_leading_space |= part["content"] == " " && part["start"] != 0,
                Some("Replace") => match (text(&part["pattern"]["String"]), text(&part["content"])) {
                    (Some(from), Some(to)) if !from.is_empty() => replacements.push((from, to)),
                    _ => {
                        return Err(format!(
                            "decoder {part} is not supported; expected a plain string pattern"
                        ));
                    }
                },
                Some("Metaspace") => {
                    let mark = text(&part["replacement"]).ok_or("decoder Metaspace without replacement")?;
                    replacements.push((mark, " ".into()));
                    strips_leading_space |= part["prepend_scheme"] != "never";
                }
                _ => {
                    return Err(format!(
                        "decoder {} is not supported; expected ByteLevel, Metaspace, or Replace with ByteFallback",
                        part["type"]
                    ));
                }
            }
        }
        Ok(Self::Pieces { replacements, byte_fallback, strips_leading_space })
    }

    /// The bytes of a vocabulary entry.
    fn decode(&self, piece: &str, table: &ByteTable) -> Vec<u8> {
        match self {
            // A piece outside the alphabet stands for itself, as in the `tokenizers` crate.
            Self::ByteLevel => piece
                .chars()
                .map(|c| table.byte(c))
                .collect::<Option<_>>()
                .unwrap_or_else(|| piece.as_bytes().to_vec()),
            Self::Pieces { replacements, byte_fallback, .. } => {
                if let (true, Some(byte)) = (*byte_fallback, fallback_byte(piece)) {
                    return vec![byte];
                }
                let replaced = replacements
                    .iter()
                    .fold(piece.to_owned(), |text, (from, to)| text.replace(from.as_str(), to));
                replaced.into_bytes()
            }
        }
    }
}

/// The byte of a `<0xNN>` piece.
fn fallback_byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if two_digits { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The character that stands for each byte in the GPT-2 byte alphabet (`bytes_to_unicode` in its `encoder.py`): printable bytes of
/// Latin-1 are themselves, the others follow from U+0100 in order.
pub(crate) fn byte_characters() -> [char; 256] {
    let mut others = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => char::from(byte),
        _ => others.next().expect("there are more than bytes"),
    })
}

/// Bytes by their characters.
struct ByteTable {
    bytes: [Option<u8>; 0x144], // by code point
}

impl ByteTable {
    fn new() -> Self {
        let mut bytes = [None; 0x144];
        for (byte, character) in (0..=u8::MAX).zip(byte_characters()) {
            bytes[character as usize] = Some(byte);
        }
        Self { bytes }
    }

    fn byte(&self, c: char) -> Option<u8> {
        self.bytes.get(c as usize).copied().flatten()
    }
}

/// The bytes of every token, one after the other.
#[derive(Debug)]
pub(crate) struct TokenBytes {
    bytes: Vec<u8>,
    places: Vec<Option<(usize, usize)>>, // [n_tokens]: start and end in `bytes`
}

/// One entry of a vocabulary.
pub(crate) enum Entry {
    /// In the alphabet of the byte scheme.
    Piece(String),
    /// As it is.
    Text(String),
}

impl TokenBytes {
    /// Decodes the entries of tokens `0..n_tokens`; a vocabulary may have holes.
    pub(crate) fn new(
        scheme: &ByteScheme,
        n_tokens: usize,
        mut entry: impl FnMut(Token) -> Option<Entry>,
    ) -> Self {
        let table = ByteTable::new();
        let mut all = Self { bytes: Vec::new(), places: Vec::with_capacity(n_tokens) };
        for token in 0..n_tokens {
            let place = entry(token as Token).map(|entry| {
                let start = all.bytes.len();
                match entry {
                    Entry::Piece(piece) => all.bytes.extend(scheme.decode(&piece, &table)),
                    Entry::Text(text) => all.bytes.extend(text.bytes()),
                }
                (start, all.bytes.len())
            });
            all.places.push(place);
        }
        all
    }

    /// The bytes of a token; `None` for a token that the vocabulary does not know.
    pub(crate) fn get(&self, token: Token) -> Option<&[u8]> {
        let (start, end) = (*self.places.get(token as usize)?)?;
        Some(&self.bytes[start..end])
    }

    /// One more than the highest token.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }
}
