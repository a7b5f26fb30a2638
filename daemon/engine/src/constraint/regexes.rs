//! What the regular expressions of a grammar may cost, before anything is worked out with them.
//!
//! The library counts the work of its lexer between steps, and a regular expression as a whole once it is built. One step, and
//! one expression, may take any time and memory meanwhile: `a?` 64,000 times over takes 8 GB for its first step. Both are
//! bounded here.

use std::collections::HashMap;

use llguidance::derivre::ExprRef;
use llguidance::derivre::raw::ExprSet;

/// Classes of characters in one regular expression: each is up to some 700 ranges, and takes a millisecond.
const N_CLASSES_MAX: usize = 1 << 10;

/// What is wrong with a regular expression that has more classes of characters than are taken.
pub(super) fn too_many_classes(regex: &str) -> Option<String> {
    let n_classes = n_classes(regex);
    (n_classes > N_CLASSES_MAX).then(|| {
        format!(
            "a regular expression of {n_classes} classes of characters: at most {N_CLASSES_MAX} are taken"
        )
    })
}

/// The first literal of a Lark grammar that is too much as a regular expression: where it begins, and why.
pub(super) fn too_many_classes_in_lark(text: &str) -> Option<(usize, String)> {
    // Quoted texts are expressions where they are within JSON.
    let has_json = text.contains("%json") || text.contains("%regex");
    let is_regex = |piece: &Piece<'_>| match piece.kind {
        PieceKind::Regex => true,
        PieceKind::Quoted => has_json,
        PieceKind::Comment => false,
    };
    Pieces { text, at: 0 }.filter(is_regex).find_map(|piece| Some((piece.at, too_many_classes(piece.inner)?)))
}

/// Where a word stands in a Lark grammar, outside of comments, quotes and regular expressions.
pub(super) fn places_in_lark<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let mut pieces = Pieces { text, at: 0 }.peekable();
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        while pieces.next_if(|piece| piece.end <= at).is_some() {}
        pieces.peek().is_none_or(|piece| at < piece.at)
    })
}

/// At least as many as there are, also where the text is a JSON string with a regular expression in it.
fn n_classes(regex: &str) -> usize {
    let bytes = regex.as_bytes();
    let n_plain = bytes.iter().filter(|byte| matches!(byte, b'[' | b'.')).count();
    let is_named = |pair: &&[u8]| pair[0] == b'\\' && b"dDsSwWpPu".contains(&pair[1]);
    n_plain + bytes.windows(2).filter(is_named).count()
}

/// What of a Lark grammar is not rules.
#[derive(Debug)]
struct Piece<'a> {
    kind: PieceKind,
    at: usize,
    end: usize,
    /// Without what encloses it.
    inner: &'a str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceKind {
    Comment,
    Quoted,
    Regex,
}

struct Pieces<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        let bytes = self.text.as_bytes();
        let first = |from: usize, is_it: &dyn Fn(u8) -> bool| {
            bytes[from..].iter().position(|&byte| is_it(byte)).map_or(bytes.len(), |n| from + n)
        };
        while let Some(&byte) = bytes.get(self.at) {
            let (at, from) = (self.at, self.at + 1);
            let is_comment = byte == b'#' || byte == b'/' && bytes.get(from) == Some(&b'/');
            if is_comment || matches!(byte, b'"' | b'/') {
                let mut end = from;
                if is_comment {
                    end = first(from, &|byte| byte == b'\n');
                } else {
                    while end < bytes.len() && bytes[end] != byte {
                        end += if bytes[end] == b'\\' { 2 } else { 1 };
                    }
                }
                let end = end.min(bytes.len());
                self.at = end + 1;
                let kind = match byte {
                    _ if is_comment => PieceKind::Comment,
                    b'"' => PieceKind::Quoted,
                    _ => PieceKind::Regex,
                };
                return Some(Piece { kind, at, end: self.at, inner: self.text.get(from..end)? });
            }
            self.at = match byte {
                // The name of a special token.
                b'<' => {
                    match first(from, &|byte| matches!(byte, b'<' | b'>') || byte.is_ascii_whitespace()) {
                        end if bytes.get(end) == Some(&b'>') => end + 1,
                        _ => from,
                    }
                }
                _ => from,
            };
        }
        None
    }
}

/// What a step of the lexer may take at most, over all expressions of a grammar, or so many of them as are too much. The library counts its work, and looks at the
/// count between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Alternatives for the next byte, summed over the expressions.
    ///
    /// In a row, all that may be left out and the first that may not are alternatives, and so are those of each row that begins
    /// further in: the sum grows with the square of how many may be left out. Each takes 35 ns and 4 bytes.
    n_alternatives: u64,
    /// What is put together of alternatives: those of an intersection's parts with each other, for each byte, and those of what is
    /// negated or repeated with each other.
    n_combinations: u64,
}

/// As many as the library lets a lexer take at its beginning, in all.
const N_ALTERNATIVES_MAX: u64 = 1_000_000;
const N_COMBINATIONS_MAX: u64 = 20_000_000;

/// Values of a byte.
const N_BYTES: usize = 256;

/// What is wrong with expressions of which a step could take too much.
pub(super) fn too_large_a_step(regexes: &ExprSet) -> Option<String> {
    let Step { n_alternatives, n_combinations } = Step::of(regexes);
    if n_alternatives > N_ALTERNATIVES_MAX {
        return Some(format!(
            "regular expressions of at least {n_alternatives} alternatives for a byte: at most {N_ALTERNATIVES_MAX} are taken. Whatever may \
             be left out has those of what follows as well"
        ));
    }
    (n_combinations > N_COMBINATIONS_MAX).then(|| {
        format!(
            "regular expressions of which up to {n_combinations} alternatives are put together: at most {N_COMBINATIONS_MAX} are \
             taken. An intersection has those of one part with those of each other one"
        )
    })
}

/// How the library tells kinds of expressions apart, as far as it matters here.
#[derive(Clone, Copy)]
struct Tags {
    row: u8,
    /// Bytes, and what comes after them.
    text: u8,
    repeated: u8,
    negated: u8,
    both: u8,
}

fn tag(regexes: &ExprSet, regex: ExprRef) -> u8 {
    regexes.get_tag(regex) as u8
}

impl Tags {
    fn new() -> Self {
        let mut sample = ExprSet::new(N_BYTES);
        let [either, other] = [b"ab", b"cd"].map(|bytes| {
            let refs = bytes.map(|byte| sample.mk_byte(byte));
            sample.mk_byte_set_or(&refs)
        });
        let (row, text) = (sample.mk_concat(either, other), sample.mk_byte_literal(b"ab"));
        let (repeated, negated) = (sample.mk_repeat(row, 0, 9), sample.mk_not(row));
        let both = sample.mk_and(&mut vec![repeated, negated]);
        let [row, text, repeated, negated, both] =
            [row, text, repeated, negated, both].map(|regex| tag(&sample, regex));
        Self { row, text, repeated, negated, both }
    }
}

impl Step {
    fn of(regexes: &ExprSet) -> Self {
        let tags = Tags::new();
        // Each expression stands behind those that it is made of.
        let (mut alternatives, mut most) = (vec![0_u64; regexes.len()], vec![0_u64; regexes.len()]);
        let (mut n_alternatives, mut n_combinations) = (0_u64, 0_u64);
        let mut overlaps = Overlaps { tags, known: HashMap::new() };
        for idx in 1..regexes.len() {
            if n_alternatives > N_ALTERNATIVES_MAX || n_combinations > N_COMBINATIONS_MAX {
                break;
            }
            let regex = ExprRef::new(idx as u32);
            let (tag, parts) = (tag(regexes, regex), regexes.get_args(regex));
            let of = |part: &ExprRef| alternatives[part.as_usize()];
            let n = match parts {
                [first, rest] if tag == tags.row => {
                    of(first).saturating_add(if regexes.is_nullable(*first) { of(rest) } else { 0 })
                }
                [] => 1,
                _ if tag == tags.text => 1,
                parts => parts.iter().map(of).fold(0, u64::saturating_add),
            };
            alternatives[idx] = n;
            n_alternatives = n_alternatives.saturating_add(n);
            most[idx] = parts.iter().map(|part| most[part.as_usize()]).fold(n, u64::max);
            if tag == tags.both {
                let part = |&part: &ExprRef| overlaps.most_of(regexes, part).min(most[part.as_usize()]);
                let n = parts.iter().map(part).fold(N_BYTES as u64, u64::saturating_mul);
                n_combinations = n_combinations.saturating_add(n);
            } else if tag == tags.negated || tag == tags.repeated {
                let n = most[idx];
                let n = n.saturating_mul(n.min(N_BYTES as u64)).saturating_mul(n) / 2;
                n_combinations = n_combinations.max(n);
            }
        }
        Self { n_alternatives, n_combinations }
    }
}

/// How many alternatives there are for each byte, in expressions that stand in an intersection.
struct Overlaps {
    tags: Tags,
    known: HashMap<ExprRef, Overlap>,
}

struct Overlap {
    /// Its own, by byte.
    own: Box<[u32; N_BYTES]>,
    /// The most for any byte, of itself and of all that it is made of.
    most: u32,
}

/// So many expressions have their alternatives counted byte by byte: a kilobyte each.
const N_OVERLAPS_MAX: usize = 20_000;

impl Overlaps {
    /// The most alternatives for one byte, wherever one is in an expression; [`u64::MAX`] where too many are known already.
    fn most_of(&mut self, regexes: &ExprSet, regex: ExprRef) -> u64 {
        let mut open = vec![regex];
        while let Some(&next) = open.last() {
            let n_open = open.len();
            open.extend(regexes.get_args(next).iter().filter(|part| !self.known.contains_key(part)));
            if open.len() > n_open {
                continue;
            }
            open.pop();
            if self.known.contains_key(&next) {
                continue;
            }
            if self.known.len() == N_OVERLAPS_MAX {
                return u64::MAX;
            }
            let overlap = self.overlap(regexes, next);
            self.known.insert(next, overlap);
        }
        u64::from(self.known[&regex].most)
    }

    /// That of an expression whose parts are known.
    fn overlap(&self, regexes: &ExprSet, regex: ExprRef) -> Overlap {
        let (tag, parts) = (tag(regexes, regex), regexes.get_args(regex));
        let mut own = Box::new([0_u32; N_BYTES]);
        let mut join = |part: &ExprRef, join: fn(u32, u32) -> u32| {
            own.iter_mut().zip(self.known[part].own.iter()).for_each(|(n, &part)| *n = join(*n, part));
        };
        match parts {
            [first, rest] if tag == self.tags.row => {
                join(first, u32::saturating_add);
                if regexes.is_nullable(*first) {
                    join(rest, u32::saturating_add);
                }
            }
            // The library tells its bytes apart.
            [_] if tag == self.tags.negated => own.fill(1),
            [first, others @ ..] if tag == self.tags.both => {
                join(first, u32::saturating_add);
                others.iter().for_each(|part| join(part, u32::saturating_mul));
            }
            _ if parts.is_empty() || tag == self.tags.text => {
                let regex = regexes.get(regex);
                let may_come = |byte| u32::from(!regex.surely_no_match(byte));
                own.iter_mut().zip(0..=u8::MAX).for_each(|(n, byte)| *n = may_come(byte));
            }
            parts => parts.iter().for_each(|part| join(part, u32::saturating_add)),
        }
        let of_parts = parts.iter().map(|part| self.known[part].most);
        let most = own.iter().copied().chain(of_parts).fold(0, u32::max);
        Overlap { own, most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_counted_by_literal_as_the_library_has_them() {
        assert_eq!(n_classes(r"a\.[b-c]\w.\p{L}\\d"), 6, "at least");
        let text = "start: /[a]\\/[b]/ \"/[\" // /[[[[/\n  | <|a\"b|> /[c]/ # \"[[[[\n  | %json {\"pattern\": \"\\\"\\\\w\"}";
        let pieces: Vec<(PieceKind, &str)> =
            Pieces { text, at: 0 }.map(|piece| (piece.kind, piece.inner)).collect();
        use PieceKind::{Comment, Quoted, Regex};
        let expected = [
            (Regex, "[a]\\/[b]"),
            (Quoted, "/["),
            (Comment, "/ /[[[[/"),
            (Regex, "[c]"),
            (Comment, " \"[[[["),
            (Quoted, "pattern"),
            (Quoted, "\\\"\\\\w"),
        ];
        assert_eq!(pieces, expected);
        for open in ["\"", "/", "\"\\", "/a\\", "<", "#"] {
            assert!(Pieces { text: open, at: 0 }.count() <= 1, "{open}");
        }
        let text = "%json // %json\n \"%json\" %json /%json/ %json";
        assert_eq!(places_in_lark(text, "%json").collect::<Vec<_>>(), [0, 24, 38]);
        let many = "[a]".repeat(N_CLASSES_MAX);
        assert_eq!(too_many_classes(&many), None);
        let text = format!("start: /{many}/ /{many}/\nA: /é{many}./");
        assert_eq!(too_many_classes_in_lark(&text).map(|(at, _)| at), text.find("/é"));
    }
}
