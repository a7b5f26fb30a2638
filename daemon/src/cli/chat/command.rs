//! What a line at the prompt means.

use super::settings::Settings;
use crate::nearest;

/// How the commands look, and what they do. In the order of `/help`.
const COMMANDS: [(&str, &str, &str); 8] = [
    ("help", "", "this text"),
    ("clear", "", "begin anew; system message and settings stay"),
    ("system", "[TEXT]", "what the model is told first; alone, what that is"),
    ("set", "[NAME VALUE]", "how answers are drawn from now on; alone, what is set"),
    ("save", "[NAME]", "keep the conversation under a name"),
    ("load", "[NAME]", "go on with one that was kept; alone, which there are"),
    ("model", "[NAME]", "go on with another model; alone, which there are"),
    ("bye", "", "end, as does Ctrl-D"),
];

const KEYS: &str = "\
A message of several lines stands between two \"\"\", or has a backslash at the end
of each line but the last. Alt-Enter begins a new line as well, and what is
pasted is one message. One that begins with a slash is written with two.

The arrow keys and Ctrl-R bring back what was written before; a line that begins
with a space is not kept. Ctrl-C stops an answer, and what was said so far stays
said; at the prompt it clears the line.";

/// A line, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Input {
    Nothing,
    /// For the model.
    Message(String),
    Command(Command),
}

/// What the user asks of the chat itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Clear,
    System(Option<String>),
    /// A name and a value; nothing to be shown what is set.
    Set(Option<(String, String)>),
    Save(Option<String>),
    Load(Option<String>),
    Model(Option<String>),
    Bye,
}

/// Why a line means nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum Mistake {
    #[error("there is no command /{name}{}", if .hint.is_none() { "; /help lists them".to_owned() } else { .hint.to_string() })]
    Unknown { name: String, hint: nearest::Hint },
    #[error("/{name} takes nothing after it")]
    TakesNothing { name: &'static str },
    #[error("/set needs a name and a value, as in /set temperature 0.8")]
    NoValue,
}

/// The names of the commands.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    COMMANDS.iter().map(|(name, ..)| *name)
}

/// What `/help` says.
pub(super) fn help() -> String {
    let lines = COMMANDS.iter().map(|(name, arguments, does)| {
        let command = format!("/{name} {arguments}");
        format!("  {command:<20}{does}\n")
    });
    let lines: String = lines.collect();
    format!("{lines}\nSettings: {}.\n\n{KEYS}", Settings::names().collect::<Vec<_>>().join(", "))
}

/// Whether more lines belong to the message: it began with three quotes that have not come again.
pub(super) fn is_open(text: &str) -> bool {
    block(text).is_some_and(|rest| !rest.trim_end().ends_with(QUOTES))
}

const QUOTES: &str = "\"\"\"";

/// What follows the three quotes at the beginning.
fn block(text: &str) -> Option<&str> {
    text.trim_start().strip_prefix(QUOTES)
}

/// Reads a line, or the lines of one message.
///
/// # Errors
/// It begins with a slash and is no command.
pub(super) fn read(text: &str) -> Result<Input, Mistake> {
    if let Some(rest) = block(text)
        && let Some(inner) = rest.trim_end().strip_suffix(QUOTES)
    {
        let inner = inner.strip_prefix('\n').unwrap_or(inner);
        return Ok(message(inner.strip_suffix('\n').unwrap_or(inner)));
    }
    let trimmed = text.trim();
    match trimmed.strip_prefix('/') {
        None => Ok(message(trimmed)),
        Some(rest) if rest.starts_with('/') => Ok(message(rest)),
        Some(rest) => Ok(Input::Command(command(rest)?)),
    }
}

fn message(text: &str) -> Input {
    if text.trim().is_empty() { Input::Nothing } else { Input::Message(text.to_owned()) }
}

fn command(text: &str) -> Result<Command, Mistake> {
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim();
    let given = (!rest.is_empty()).then(|| rest.to_owned());
    let alone = |name, command| match rest.is_empty() {
        true => Ok(command),
        false => Err(Mistake::TakesNothing { name }),
    };
    match name {
        "help" => alone("help", Command::Help),
        "clear" => alone("clear", Command::Clear),
        "bye" => alone("bye", Command::Bye),
        "system" => Ok(Command::System(given)),
        "save" => Ok(Command::Save(given)),
        "load" => Ok(Command::Load(given)),
        "model" => Ok(Command::Model(given)),
        "set" if rest.is_empty() => Ok(Command::Set(None)),
        "set" => {
            let (name, value) = rest.split_once(char::is_whitespace).ok_or(Mistake::NoValue)?;
            Ok(Command::Set(Some((name.to_owned(), value.trim().to_owned()))))
        }
        _ => {
            let names = COMMANDS.map(|(name, ..)| name);
            Err(Mistake::Unknown { name: name.to_owned(), hint: nearest::hint(name, names) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_of(text: &str) -> String {
        match read(text) {
            Ok(Input::Message(message)) => message,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    fn command_of(text: &str) -> Command {
        match read(text) {
            Ok(Input::Command(command)) => command,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn a_message_is_what_the_model_gets() {
        assert_eq!(message_of(" What is 3 + 4? "), "What is 3 + 4?");
        assert_eq!(message_of("one\n  two"), "one\n  two");
        assert_eq!(message_of("//etc/passwd"), "/etc/passwd");
        assert_eq!(message_of("\"\"\"\n  a\n\n/b\n\"\"\""), "  a\n\n/b");
        assert_eq!(message_of("\"\"\"a b\"\"\""), "a b");
        for nothing in ["", " \n ", "\"\"\"\n\"\"\"", "\"\"\"\"\"\""] {
            assert_eq!(read(nothing).expect("no mistake"), Input::Nothing, "{nothing:?}");
        }
    }

    #[test]
    fn a_block_ends_with_the_quotes_that_it_began_with() {
        for open in ["\"\"\"", "\"\"\"a", "\"\"\"\na\nb"] {
            assert!(is_open(open), "{open:?}");
        }
        for closed in ["", "a", "\"\"", "\"\"\"\na\n\"\"\"", "\"\"\"a\"\"\" ", "say \"\"\""] {
            assert!(!is_open(closed), "{closed:?}");
        }
    }

    #[test]
    fn commands_are_read_with_what_follows_them() {
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(command_of("/bye"), Command::Bye);
        assert_eq!(
            command_of(" /system Be brief.  And kind. "),
            Command::System(text("Be brief.  And kind."))
        );
        assert_eq!(command_of("/system"), Command::System(None));
        assert_eq!(command_of("/set top_p  0.9"), Command::Set(Some(("top_p".to_owned(), "0.9".to_owned()))));
        assert_eq!(command_of("/set"), Command::Set(None));
        assert_eq!(command_of("/load sums"), Command::Load(text("sums")));
        assert_eq!(command_of("/model"), Command::Model(None));
        for name in names() {
            assert!(help().contains(&format!("/{name} ")), "{name}");
        }
    }

    #[test]
    fn a_wrong_command_is_told_the_right_one() {
        let said = |text: &str| read(text).expect_err(text).to_string();
        assert_eq!(said("/sytem x"), "there is no command /sytem; did you mean \"system\"?");
        assert_eq!(said("/quux"), "there is no command /quux; /help lists them");
        assert!(said("/").contains("/help"));
        assert_eq!(said("/bye now"), "/bye takes nothing after it");
        assert!(said("/set temperature").contains("a name and a value"));
    }

    #[test]
    fn the_help_fits_on_a_terminal() {
        let longest = help().lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{longest:?}");
    }
}
