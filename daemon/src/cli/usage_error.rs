//! Mistakes in the arguments: as text for people, or as the object that all errors are with `--json`.

use std::ffi::OsStr;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use trellis_client::{ErrorBody, ErrorCode};

use super::error::{CANNOT, ErrorLine};
use super::output::{remark, to_json};

/// Says what is wrong with the arguments, or shows the help that they ask for; the exit status.
pub(super) fn say(error: &clap::Error) -> ExitCode {
    let asks = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asks || !wants_json(std::env::args_os().skip(1)) {
        error.exit();
    }
    let (body, hint) = told(error);
    remark(&to_json(&ErrorLine { error: body.into(), hint }));
    ExitCode::from(CANNOT)
}

/// Whether programs read the errors of such a command line. What is wrong may be what says whose an argument is, so that it counts
/// wherever it stands, up to what is for a guest alone.
fn wants_json(arguments: impl Iterator<Item = impl AsRef<OsStr>>) -> bool {
    arguments.take_while(|argument| argument.as_ref() != "--").any(|argument| argument.as_ref() == "--json")
}

/// The mistake as an error object, and what to do.
fn told(error: &clap::Error) -> (ErrorBody, Option<String>) {
    let text = error.render().to_string();
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    let part = |start: &str| {
        let rest = text.split("\n\n").find_map(|part| part.trim().strip_prefix(start))?;
        Some(rest.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let message = part("error: ").filter(|_| !is_help);
    let message = message.unwrap_or_else(|| "a command or an argument is missing".to_owned());
    let hint = part("tip: ").or_else(|| part("Usage: ").map(|usage| format!("usage: {usage}")));
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(" ")),
        _ => None,
    };
    let mut body = ErrorBody::new(ErrorCode::Other("usage".to_owned()), message);
    body.name = context(ContextKind::InvalidArg).or_else(|| context(ContextKind::InvalidSubcommand));
    body.value = context(ContextKind::InvalidValue);
    (body, hint)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    fn mistake(line: &str) -> (ErrorBody, Option<String>) {
        told(&Cli::try_parse_from(line.split_whitespace()).expect_err(line))
    }

    #[test]
    fn what_is_wrong_is_named() {
        let (body, hint) = mistake("trellis serve --device tpu");
        assert_eq!(body.value.as_deref(), Some("tpu"), "{body:?}");
        assert!(body.name.as_deref().is_some_and(|name| name.contains("--device")), "{body:?}");
        assert!(body.message.starts_with("invalid value 'tpu'"), "{body:?}");
        assert!(!body.message.contains('\n') && !body.message.contains("Usage"), "{body:?}");
        assert!(hint.is_none_or(|hint| !hint.contains('\n')));
        let (body, hint) = mistake("trellis ps --sockett /tmp/x");
        assert_eq!(body.name.as_deref(), Some("--sockett"), "{body:?}");
        assert!(hint.as_deref().is_some_and(|hint| hint.contains("--socket")), "{hint:?}");
        let (body, _) = mistake("trellis nothing");
        assert_eq!(body.name.as_deref(), Some("nothing"), "{body:?}");
        let (body, hint) = mistake("trellis stop");
        assert!(body.message.contains("required"), "{body:?}");
        assert!(hint.is_some_and(|hint| hint.starts_with("usage: trellis stop")));
        assert_eq!(mistake("trellis").0.message, "a command or an argument is missing");
    }

    #[test]
    fn json_counts_wherever_it_stands_before_what_is_a_guests() {
        let wants = |line: &str| wants_json(line.split_whitespace());
        for line in ["--json ps --x", "ps --x --json", "stop x --json"] {
            assert!(wants(line), "{line}");
        }
        for line in ["ps --x", "run --x -- --json", ""] {
            assert!(!wants(line), "{line}");
        }
    }
}
