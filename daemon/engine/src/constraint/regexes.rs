//! What the regular expressions of a grammar may cost, before anything is worked out with them.
//!
//! The library counts the work of its lexer between steps, and a regular expression as a whole once it is built. One step, and
//! one expression, may take any time and memory meanwhile: `a?` 64,000 times over takes 8 GB for its first step. Both are
//! bounded here.

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
    let mut literals = Literals { text, at: 0 };
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

/// The most that one step of a lexer may have to look at: for each expression, its alternatives for the next byte.
///
/// In a row, all that may be left out and the first that may not are alternatives, and so are those of each row that begins
/// further in: the sum grows with the square of how many may be left out.
pub(super) fn n_alternatives(regexes: &ExprSet) -> u64 {
    let mut sample = ExprSet::new(256);
    let [either, other] = [b"ab", b"cd"].map(|bytes| {
        let refs = bytes.map(|byte| sample.mk_byte(byte));
        sample.mk_byte_set_or(&refs)
    });
    let (row, text) = (sample.mk_concat(either, other), sample.mk_byte_literal(b"ab"));
    let (row, text) = (sample.get_tag(row), sample.get_tag(text));
    // Each expression stands behind those that it is made of.
    let mut alternatives = vec![0_u64; regexes.len()];
    for idx in 1..regexes.len() {
        let regex = ExprRef::new(idx as u32);
        let (tag, parts) = (regexes.get_tag(regex), regexes.get_args(regex));
        let of = |part: &ExprRef| alternatives.get(part.as_usize()).copied().unwrap_or(0);
        let n = match parts {
            [first, rest] if tag == row => {
                of(first).saturating_add(if regexes.is_nullable(*first) { of(rest) } else { 0 })
            }
            [] => 1,
            _ if tag == text => 1,
            parts => parts.iter().map(of).fold(0, u64::saturating_add),
        };
        alternatives[idx] = n;
    }
    alternatives.into_iter().fold(0, u64::saturating_add)
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
