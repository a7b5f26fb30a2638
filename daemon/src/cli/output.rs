//! Text for people, JSON for programs.
//!
//! A terminal obeys control characters, and those that turn the direction of a text: a name or a log line could set the
//! clipboard, make lines look like ours, or show words in another order than they have. What the commands themselves say
//! is shown with them escaped, wherever it goes, as git does; what a guest sends is its own, and goes to files and other
//! programs byte for byte, as with `ls`, and escaped to a terminal.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use super::error::CliError;

/// The reader for which a command writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Json,
}

/// Writes one line to standard output.
///
/// # Errors
/// [`CliError::OutputClosed`] when its reader is gone, which needs no more of it.
pub(crate) fn print_line(line: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(CliError::from_output)
}

/// Writes one value to standard output: as JSON in one line, or as the text that `to_text` makes of it.
///
/// # Errors
/// [`CliError::OutputClosed`] when its reader is gone.
pub(crate) fn print<T: Serialize + ?Sized>(
    format: Format,
    value: &T,
    to_text: impl FnOnce(&T) -> String,
) -> Result<(), CliError> {
    match format {
        Format::Json => print_line(&to_json(value)),
        Format::Text => {
            let text = to_text(value);
            if text.is_empty() { Ok(()) } else { print_line(&escaped(text.trim_end_matches('\n'))) }
        }
    }
}

/// The value in one line, whose strings hold no control characters as they are: JSON itself escapes only some.
pub(crate) fn to_json<T: Serialize + ?Sized>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("what the CLI prints has string keys and serialises");
    replaced(&json, is_obeyed, |c| format!("\\u{:04x}", u32::from(c))).into_owned()
}

/// Writes a remark to standard error. That its reader is gone is no reason to end.
pub(crate) fn remark(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", contained(text));
}

/// A line about what the command itself is doing: to people only, and beside the output.
pub(crate) fn note(format: Format, line: &str) {
    if format == Format::Text {
        remark(&format!("trellis: {line}"));
    }
}

/// Text of a guest as it goes to a stream. What goes to a file or another program goes as it is.
pub(crate) fn for_stream<'a>(text: &'a str, stream: &impl IsTerminal) -> Cow<'a, str> {
    if stream.is_terminal() { escaped(text) } else { Cow::Borrowed(text) }
}

/// Text of several lines, without what a terminal obeys: `\u{1b}` for what begins its commands.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    replaced(text, |c| is_obeyed(c) && !matches!(c, '\n' | '\t'), |c| c.escape_default().to_string())
}

/// Text that has to stay in its line.
pub(crate) fn escaped_line(text: &str) -> Cow<'_, str> {
    replaced(text, is_obeyed, |c| c.escape_default().to_string())
}

/// A line of JSON, in whose texts alone such characters may be.
pub(crate) fn escaped_json(line: &str) -> String {
    let code = |c: char| c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect();
    replaced(line, is_obeyed, code).into_owned()
}

/// As [`escaped`], as one remark: its further lines are two spaces in, so that none passes for another remark.
fn contained(text: &str) -> String {
    let text = escaped(text);
    let mut lines = text.split('\n');
    let mut contained = lines.next().unwrap_or_default().to_owned();
    for line in lines {
        contained.push_str(if line.starts_with("  ") { "\n" } else { "\n  " });
        contained.push_str(line);
    }
    contained
}

/// A line of a program that colours what it says: as [`escaped`], but for the colours, which end with the line.
pub(crate) fn escaped_but_colors(line: &str) -> String {
    let (mut shown, mut rest, mut is_colored) = (String::new(), line, false);
    while let Some(place) = rest.find('\u{1b}') {
        let (before, from) = rest.split_at(place);
        shown.push_str(&escaped(before));
        let n_bytes = color_length(from).unwrap_or(1);
        let (command, after) = from.split_at(n_bytes);
        if n_bytes > 1 {
            shown.push_str(command);
            is_colored = true;
        } else {
            shown.push_str(&escaped(command));
        }
        rest = after;
    }
    shown.push_str(&escaped(rest));
    if is_colored {
        shown.push_str("\u{1b}[0m");
    }
    shown
}

/// The bytes of a command with which a text begins, if all it does is to choose bold, a colour of the text, or neither:
/// one could also hide what follows.
fn color_length(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\u{1b}[")?.split_once('m')?.0;
    let numbers: Vec<u8> = parameters.split(';').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    let is_color = |number: &u8| matches!(number, 0 | 1 | 22 | 30..=37 | 39 | 90..=97);
    let is_plain = matches!(numbers[..], [38, 5, _] | [1, 38, 5, _]) || numbers.iter().all(is_color);
    is_plain.then_some("\u{1b}[m".len() + parameters.len())
}

/// Whether a terminal may do something else with it than show it where it stands: control characters, breaks of lines
/// and paragraphs, and what Unicode lists as `Bidi_Control` (UAX #9).
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn replaced(text: &str, is_replaced: fn(char) -> bool, by: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(is_replaced) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(|c| if is_replaced(c) { by(c) } else { c.to_string() }).collect())
}

/// `1.5 MB`, in powers of 1000.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut scaled = n as f64;
    let mut unit = 0;
    while scaled >= 999.5 && unit + 1 < units.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    if unit == 0 || scaled >= 99.95 {
        format!("{scaled:.0} {}", units[unit])
    } else {
        format!("{scaled:.1} {}", units[unit])
    }
}

/// `7.3 M`, in powers of 1000.
pub(crate) fn count(n: u64) -> String {
    bytes(n).trim_end_matches('B').trim_end().to_uppercase()
}

/// `850 ms`, `12.3 s`, `4 min 10 s`, `3 h 12 min`.
pub(crate) fn duration_ms(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms} ms"),
        1..60 => format!("{:.1} s", ms as f64 / 1000.0),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_get_no_control_characters() {
        let text = "a\tb\n\u{1b}]52;c;x\u{7}\r\u{9b}1m é";
        assert_eq!(escaped(text), "a\tb\n\\u{1b}]52;c;x\\u{7}\\r\\u{9b}1m é");
        assert_eq!(escaped_line("a\tb\né"), "a\\tb\\né");
        // Looks like another line, or like other words.
        for c in ['\u{61c}', '\u{200f}', '\u{2028}', '\u{202e}', '\u{2066}', '\u{2069}'] {
            let (shown, json) =
                (format!("a\\u{{{:x}}}b", u32::from(c)), format!("\"a\\u{:04x}b\"", u32::from(c)));
            let text = format!("a{c}b");
            assert_eq!(
                (escaped(&text).as_ref(), escaped_line(&text).as_ref()),
                (shown.as_str(), shown.as_str())
            );
            assert_eq!(to_json(&text), json);
        }
        let json = to_json(text);
        assert_eq!(json, "\"a\\tb\\n\\u001b]52;c;x\\u0007\\r\\u009b1m é\"");
        assert_eq!(serde_json::from_str::<String>(&json).expect("it is JSON"), text);
    }

    #[test]
    fn a_remark_is_seen_to_be_one() {
        assert_eq!(
            contained("error: no\nhint: run this\n  as this"),
            "error: no\n  hint: run this\n  as this"
        );
        assert_eq!(contained("one line"), "one line");
    }

    #[test]
    fn of_what_programs_do_to_a_terminal_only_colors_are_left() {
        let line = "\u{1b}[1m\u{1b}[38;5;9merror\u{1b}[0m\u{1b}[1;92m: no\u{1b}[0m";
        assert_eq!(escaped_but_colors(line), format!("{line}\u{1b}[0m"));
        assert_eq!(escaped_but_colors("a\tplain line"), "a\tplain line");
        for (text, shown) in [
            ("\u{1b}]52;c;x\u{7}", "\\u{1b}]52;c;x\\u{7}"),
            ("\u{1b}[8mhidden", "\\u{1b}[8mhidden"),
            ("\u{1b}[2Jm", "\\u{1b}[2Jm"),
            ("\u{1b}[mx", "\\u{1b}[mx"),
            ("a\r\u{202e}b", "a\\r\\u{202e}b"),
            ("\u{1b}", "\\u{1b}"),
        ] {
            assert_eq!(escaped_but_colors(text), shown);
        }
    }

    #[test]
    fn numbers_for_people() {
        let shown = [0, 999, 1000, 1500, 123_456, 999_499, 999_500, 1_500_000_000].map(bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.0 kB", "1.5 kB", "123 kB", "999 kB", "1.0 MB", "1.5 GB"]);
        assert_eq!([12, 7_340_032].map(count), ["12", "7.3 M"]);
        let shown = [0, 850, 12_300, 250_000, 11_520_000].map(duration_ms);
        assert_eq!(shown, ["0 ms", "850 ms", "12.3 s", "4 min 10 s", "3 h 12 min"]);
    }
}
