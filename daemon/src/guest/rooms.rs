//! Room for what takes many times its length of memory while it is under way, on no account of a guest: texts to encode, and grammars
//! to compile.
//!
//! While the library cuts a text into pieces and these into tokens, a byte of the text can be a piece of its own: two strings and the
//! place of each of their bytes in the whole, a list of tokens with a string each, and the row of all lists while they grow to twice
//! their length. That is 300 to 600 bytes for a byte, for a hundredth of a second to a second. What a grammar takes is not to be told
//! from its length: it is known where it was tried out, and counted by what is usual at most where it was not.

use trellis_engine::fair::Lane;

/// A text, or a grammar, shorter than this does not wait for the room of a longer one.
const SHORT_TEXT_BYTES: usize = 64 << 10;
const LONG_TEXT_BYTES: usize = 512 << 10;
const SMALL_GRAMMAR_BYTES: usize = 16 << 10;

/// What a byte of a grammar takes at most where it is one of those that are usual.
const MEMORY_PER_GRAMMAR_BYTE: usize = 3_300;

/// Pieces of work as they wait: each kind in a line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// What needs no room.
    Other,
    ShortText,
    LongText,
    HugeText,
    SmallGrammar,
    LargeGrammar,
}

impl Kind {
    pub(super) const N: usize = 6;
    pub(super) const ALL: [Self; Self::N] = [
        Self::Other,
        Self::ShortText,
        Self::LongText,
        Self::HugeText,
        Self::SmallGrammar,
        Self::LargeGrammar,
    ];

    pub(super) fn lane(self) -> Lane {
        Lane::numbered(self as usize)
    }

    /// Bytes that are under way at once, of one user and of all: 6 GiB of memory at the very worst, four of texts and two of
    /// grammars, and a tenth of that with what is usual. What is more by itself is under way alone of its kind.
    fn most(self) -> (usize, usize) {
        match self {
            Self::Other => (0, 0),
            Self::ShortText => (256 << 10, 1 << 20),
            Self::LongText => (512 << 10, 2 << 20),
            Self::HugeText => (1 << 20, 4 << 20),
            Self::SmallGrammar => (64 << 10, 256 << 10),
            Self::LargeGrammar => (128 << 10, 256 << 10),
        }
    }
}

/// The room that a piece of work takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    kind: Kind,
    n_bytes: usize,
}

impl Need {
    pub(crate) const NOTHING: Self = Self { kind: Kind::Other, n_bytes: 0 };

    /// That of a text which is encoded.
    pub(crate) fn of_text(n_bytes: usize) -> Self {
        let kind = match n_bytes {
            0..SHORT_TEXT_BYTES => Kind::ShortText,
            SHORT_TEXT_BYTES..LONG_TEXT_BYTES => Kind::LongText,
            _ => Kind::HugeText,
        };
        Self { kind, n_bytes }
    }

    /// That of a grammar of so many bytes which is compiled, and is known to take so much memory.
    pub(crate) fn of_tried_grammar(n_bytes: usize, memory_bytes: u64) -> Self {
        let by_memory = usize::try_from(memory_bytes).unwrap_or(usize::MAX) / MEMORY_PER_GRAMMAR_BYTE;
        Self::of_grammar(n_bytes.max(by_memory))
    }

    /// That of a grammar of so many bytes which is compiled.
    pub(crate) fn of_grammar(n_bytes: usize) -> Self {
        let kind = if n_bytes < SMALL_GRAMMAR_BYTES { Kind::SmallGrammar } else { Kind::LargeGrammar };
        Self { kind, n_bytes }
    }

    pub(super) fn kind(self) -> Kind {
        self.kind
    }
}

/// Bytes that are under way, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rooms([usize; Kind::N]);

impl Rooms {
    pub(super) fn begin(&mut self, need: Need) {
        self.0[need.kind as usize] += need.n_bytes;
    }

    pub(super) fn end(&mut self, need: Need) {
        self.0[need.kind as usize] -= need.n_bytes;
    }

    /// Whether one more has room among those of its user.
    pub(super) fn fit_of_user(&self, need: Need) -> bool {
        self.fit(need, need.kind.most().0)
    }

    /// Whether one more has room among those of all.
    pub(super) fn fit_of_all(&self, need: Need) -> bool {
        self.fit(need, need.kind.most().1)
    }

    fn fit(&self, need: Need, most: usize) -> bool {
        let under_way = self.0[need.kind as usize];
        under_way == 0 || under_way + need.n_bytes <= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_texts_have_room_beside_long_ones_and_the_longest_alone() {
        let (text, mut rooms) = (Need::of_text, Rooms::default());
        let longest = text(Kind::HugeText.most().1 + 1);
        rooms.begin(longest);
        assert!(!rooms.fit_of_all(text(LONG_TEXT_BYTES)), "there is more than may be");
        assert!(rooms.fit_of_all(text(LONG_TEXT_BYTES - 1)) && rooms.fit_of_all(text(SHORT_TEXT_BYTES - 1)));
        assert!(rooms.fit_of_user(Need::NOTHING) && rooms.fit_of_all(Need::of_grammar(usize::MAX >> 1)));
        rooms.end(longest);
        assert_eq!(rooms, Rooms::default());
        rooms.begin(text(Kind::LongText.most().0 - SHORT_TEXT_BYTES));
        assert!(rooms.fit_of_user(text(SHORT_TEXT_BYTES)), "just");
        assert!(!rooms.fit_of_user(text(SHORT_TEXT_BYTES + 1)));
        assert!(rooms.fit_of_all(text(SHORT_TEXT_BYTES + 1)));
    }

    #[test]
    fn small_grammars_do_not_wait_for_large_ones() {
        let (grammar, mut rooms) = (Need::of_grammar, Rooms::default());
        rooms.begin(grammar(256 << 10));
        assert!(!rooms.fit_of_all(grammar(SMALL_GRAMMAR_BYTES)));
        assert!(rooms.fit_of_all(grammar(SMALL_GRAMMAR_BYTES - 1)));
    }
}
