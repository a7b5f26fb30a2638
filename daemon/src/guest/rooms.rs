//! Room for the texts that are encoded at once.
//!
//! While the library cuts a text into pieces and these into tokens, a byte of the text can be a piece of its own: two strings and the
//! place of each of their bytes in the whole, a list of tokens with a string each, and the row of all lists while they grow to twice
//! their length. That is 300 to 600 bytes for a byte, on no account of a guest, and for a hundredth of a second to a second.

use trellis_engine::fair::Lane;

/// A text shorter than this does not wait for the room of a longer one.
const SHORT_BYTES: usize = 64 << 10;

/// Bytes of short texts, and of long ones, that are encoded at once, of one user and of all: 3 GiB at the very worst, and a tenth of
/// that with plain text. A long text that is more by itself is encoded when no other is.
const SHORT_BYTES_OF_USER: usize = 256 << 10;
const SHORT_BYTES_OF_ALL: usize = 1 << 20;
const LONG_BYTES_OF_USER: usize = 1 << 20;
const LONG_BYTES_OF_ALL: usize = 4 << 20;

/// Pieces of work as they wait: each kind in a line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// All but texts to encode.
    Other,
    ShortText,
    LongText,
}

impl Kind {
    pub(super) const N: usize = 3;
    pub(super) const ALL: [Self; Self::N] = [Self::Other, Self::ShortText, Self::LongText];

    /// That of a piece which encodes so many bytes of text.
    pub(super) fn of(text_bytes: usize) -> Self {
        match text_bytes {
            0 => Self::Other,
            1..SHORT_BYTES => Self::ShortText,
            _ => Self::LongText,
        }
    }

    pub(super) fn lane(self) -> Lane {
        Lane::numbered(self as usize)
    }

    fn bytes_of_user(self) -> usize {
        match self {
            Self::Other => 0,
            Self::ShortText => SHORT_BYTES_OF_USER,
            Self::LongText => LONG_BYTES_OF_USER,
        }
    }

    fn bytes_of_all(self) -> usize {
        match self {
            Self::Other => 0,
            Self::ShortText => SHORT_BYTES_OF_ALL,
            Self::LongText => LONG_BYTES_OF_ALL,
        }
    }
}

/// Bytes of texts that are being encoded, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Texts([usize; Kind::N]);

impl Texts {
    pub(super) fn begin(&mut self, text_bytes: usize) {
        self.0[Kind::of(text_bytes) as usize] += text_bytes;
    }

    pub(super) fn end(&mut self, text_bytes: usize) {
        self.0[Kind::of(text_bytes) as usize] -= text_bytes;
    }

    /// Whether one more has room among those of its user.
    pub(super) fn fit_of_user(&self, kind: Kind, text_bytes: usize) -> bool {
        self.fit(kind, text_bytes, kind.bytes_of_user())
    }

    /// Whether one more has room among those of all.
    pub(super) fn fit_of_all(&self, kind: Kind, text_bytes: usize) -> bool {
        self.fit(kind, text_bytes, kind.bytes_of_all())
    }

    fn fit(&self, kind: Kind, text_bytes: usize, most: usize) -> bool {
        let under_way = self.0[kind as usize];
        under_way == 0 || under_way + text_bytes <= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_texts_have_room_beside_long_ones_and_the_longest_alone() {
        let mut texts = Texts::default();
        texts.begin(LONG_BYTES_OF_ALL + 1);
        assert!(!texts.fit_of_all(Kind::LongText, SHORT_BYTES), "there is more than may be");
        assert!(texts.fit_of_all(Kind::ShortText, SHORT_BYTES - 1) && texts.fit_of_user(Kind::Other, 0));
        texts.end(LONG_BYTES_OF_ALL + 1);
        assert_eq!(texts, Texts::default());
        texts.begin(LONG_BYTES_OF_USER - SHORT_BYTES);
        assert!(texts.fit_of_user(Kind::LongText, SHORT_BYTES), "just");
        assert!(!texts.fit_of_user(Kind::LongText, SHORT_BYTES + 1));
        assert!(texts.fit_of_all(Kind::LongText, SHORT_BYTES + 1));
    }
}
