//! Digests of content, as descriptors and references of OCI have them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const ALGORITHM: &str = "sha256:";
const N_BYTES: usize = 32;

/// A SHA-256 of content: `sha256:` and 64 hexadecimal digits. No other algorithm is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Digest([u8; N_BYTES]);

impl Digest {
    /// That of some content.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digits alone.
    pub(crate) fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ALGORITHM}{}", self.hex())
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let digits = text.strip_prefix(ALGORITHM)?.as_bytes();
            let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            if digits.len() != 2 * N_BYTES || !digits.iter().all(is_digit) {
                return None;
            }
            let mut bytes = [0; N_BYTES];
            for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
                *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
            }
            Some(Self(bytes))
        };
        read().ok_or_else(|| format!("{text:?} is no digest: sha256: and 64 digits from 0 to f are one"))
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_writing_is_a_digest() {
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest: Digest = text.parse().expect("a digest");
        assert_eq!((digest, digest.to_string().as_str()), (Digest::of(b""), text));
        for other in [
            "sha512:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "sha256:E3B0C44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "sha256:../../../../../../../../../../../../../../../../../../etc/passwd00",
            "sha256:e3b0",
            "sha256:",
            "",
        ] {
            assert!(other.parse::<Digest>().is_err(), "{other}");
        }
    }
}
