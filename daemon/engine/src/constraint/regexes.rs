//! What the regular expressions of a grammar may cost, before anything is worked out with them.
//!
//! The library counts the work of its lexer between steps, and a regular expression as a whole once it is built. One step, and
//! one expression, may take any time and memory meanwhile: `a?` 64,000 times over takes 8 GB for its first step. Both are
//! bounded here.

use std::collections::HashSet;

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
    let mut literals = Literals { text, at: 0 }.filter(|(at, _)| has_json || text.as_bytes()[*at] == b'/');
    literals.find_map(|(at, literal)| Some((at, too_many_classes(literal)?)))
}

/// At least as many as there are, also where the text is a JSON string with a regular expression in it.
fn n_classes(regex: &str) -> usize {
    let bytes = regex.as_bytes();
    let n_plain = bytes.iter().filter(|byte| matches!(byte, b'[' | b'.')).count();
    let is_named = |pair: &&[u8]| pair[0] == b'\\' && b"dDsSwWpPu".contains(&pair[1]);
    n_plain + bytes.windows(2).filter(is_named).count()
}

/// Texts between quotes and regular expressions between slashes, and where they begin.
struct Literals<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Iterator for Literals<'a> {
    type Item = (usize, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.text.as_bytes();
        let first = |from: usize, is_it: &dyn Fn(u8) -> bool| {
            bytes[from..].iter().position(|&byte| is_it(byte)).map_or(bytes.len(), |n| from + n)
        };
        while let Some(&byte) = bytes.get(self.at) {
            let from = self.at + 1;
            self.at = match byte {
                b'#' => first(from, &|byte| byte == b'\n'),
                b'/' if bytes.get(from) == Some(&b'/') => first(from, &|byte| byte == b'\n'),
                // The name of a special token.
                b'<' => {
                    match first(from, &|byte| matches!(byte, b'<' | b'>') || byte.is_ascii_whitespace()) {
                        end if bytes.get(end) == Some(&b'>') => end + 1,
                        _ => from,
                    }
                }
                b'"' | b'/' => {
                    let mut end = from;
                    while end < bytes.len() && bytes[end] != byte {
                        end += if bytes[end] == b'\\' { 2 } else { 1 };
                    }
                    let end = end.min(bytes.len());
                    self.at = end + 1;
                    return Some((from - 1, self.text.get(from..end)?));
                }
                _ => from,
            };
        }
        None
    }
}

/// What a step of the lexer may take at most, over all expressions of a grammar. The library counts its work, and looks at the
/// count between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Alternatives for the next byte, summed over the expressions.
    ///
    /// In a row, all that may be left out and the first that may not are alternatives, and so are those of each row that begins
    /// further in: the sum grows with the square of how many may be left out. Each takes 35 ns and 4 bytes.
    n_alternatives: u64,
    /// What is put together of alternatives: those of an intersection with those of each other part of it, and those of what is
    /// negated or repeated with each other, where bytes are in several of them.
    n_combinations: u64,
}

/// As many as the library lets a lexer take at its beginning, in all.
const N_ALTERNATIVES_MAX: u64 = 1_000_000;
const N_COMBINATIONS_MAX: u64 = 20_000_000;

/// Values of a byte.
const N_BYTES: u64 = 256;

/// What is wrong with expressions of which a step could take too much.
pub(super) fn too_large_a_step(regexes: &ExprSet) -> Option<String> {
    let Step { n_alternatives, n_combinations } = Step::of(regexes);
    if n_alternatives > N_ALTERNATIVES_MAX {
        return Some(format!(
            "regular expressions of {n_alternatives} alternatives for a byte: at most {N_ALTERNATIVES_MAX} are taken. Whatever may \
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

impl Step {
    fn of(regexes: &ExprSet) -> Self {
        let mut sample = ExprSet::new(256);
        let [either, other] = [b"ab", b"cd"].map(|bytes| {
            let refs = bytes.map(|byte| sample.mk_byte(byte));
            sample.mk_byte_set_or(&refs)
        });
        let (row, text) = (sample.mk_concat(either, other), sample.mk_byte_literal(b"ab"));
        let (repeated, negated) = (sample.mk_repeat(row, 0, 9), sample.mk_not(row));
        let both = sample.mk_and(&mut vec![repeated, negated]);
        let [row, text, repeated, negated, both] =
            [row, text, repeated, negated, both].map(|regex| sample.get_tag(regex));
        // Each expression stands behind those that it is made of.
        let (mut alternatives, mut most) = (vec![0_u64; regexes.len()], vec![0_u64; regexes.len()]);
        let (mut n_alternatives, mut n_combinations, mut sizes) = (0_u64, 0_u64, Sizes::default());
        for idx in 1..regexes.len() {
            let regex = ExprRef::new(idx as u32);
            let (tag, parts) = (regexes.get_tag(regex), regexes.get_args(regex));
            let of = |part: &ExprRef| alternatives[part.as_usize()];
            let n = match parts {
                [first, rest] if tag == row => {
                    of(first).saturating_add(if regexes.is_nullable(*first) { of(rest) } else { 0 })
                }
                [] => 1,
                _ if tag == text => 1,
                parts => parts.iter().map(of).fold(0, u64::saturating_add),
            };
            alternatives[idx] = n;
            n_alternatives = n_alternatives.saturating_add(n);
            most[idx] = parts.iter().map(|part| most[part.as_usize()]).fold(n, u64::max);
            if tag == both {
                let sizes = parts.iter().map(|&part| sizes.of(regexes, part).max(2));
                n_combinations = n_combinations.saturating_add(sizes.fold(1, u64::saturating_mul));
            } else if tag == negated || tag == repeated {
                let n = most[idx];
                n_combinations = n_combinations.max(n.saturating_mul(n.min(N_BYTES)).saturating_mul(n) / 2);
            }
        }
        Self { n_alternatives, n_combinations }
    }
}

/// How many expressions others are made of: as many as there are ways to go on in them, but for repetitions, which come one by one.
#[derive(Default)]
struct Sizes {
    n_seen: u64,
}

impl Sizes {
    /// [`u64::MAX`] where it takes too long to know.
    fn of(&mut self, regexes: &ExprSet, regex: ExprRef) -> u64 {
        let (mut seen, mut open) = (HashSet::new(), vec![regex]);
        while let Some(regex) = open.pop() {
            if !seen.insert(regex) {
                continue;
            }
            self.n_seen += 1;
            if self.n_seen > N_COMBINATIONS_MAX {
                return u64::MAX;
            }
            open.extend(regexes.get_args(regex));
        }
        seen.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_counted_by_literal_as_the_library_has_them() {
        assert_eq!(n_classes(r"a\.[b-c]\w.\p{L}\\d"), 6, "at least");
        let text = "start: /[a]\\/[b]/ \"/[\" // /[[[[/\n  | <|a\"b|> /[c]/ # \"[[[[\n  | %json {\"pattern\": \"\\\"\\\\w\"}";
        let literals: Vec<&str> = Literals { text, at: 0 }.map(|(_, literal)| literal).collect();
        assert_eq!(literals, ["[a]\\/[b]", "/[", "[c]", "pattern", "\\\"\\\\w"]);
        for open in ["\"", "/", "\"\\", "/a\\", "<", "#"] {
            assert!(Literals { text: open, at: 0 }.count() <= 1, "{open}");
        }
        let many = "[a]".repeat(N_CLASSES_MAX);
        assert_eq!(too_many_classes(&many), None);
        let text = format!("start: /{many}/ /{many}/\nA: /é{many}./");
        assert_eq!(too_many_classes_in_lark(&text).map(|(at, _)| at), text.find("/é"));
    }
}
