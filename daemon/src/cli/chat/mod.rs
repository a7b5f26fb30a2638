//! `trellis chat`: the chat example, with its options spelled out, and a prompt where there is a terminal.
//!
//! - Comes in: one question; or lines, each a message; or, on a terminal, what the user writes at a prompt (`editor`), messages and
//!   commands (`command`) alike.
//! - Goes out: answers as they come, and to the guest behind them requests (`partner`).
//! - On a terminal this side leads the conversation (`talk`, `conversation`, `settings`) and can tell it to another guest: one that has
//!   ended, or another model, costs nothing of it. What is kept lies in the user's state folder (`store`).
//! - Must not happen: a conversation that ends because of an answer; something of it that another user can read.

mod command;
mod conversation;
mod editor;
mod finding;
mod partner;
mod settings;
mod store;
mod talk;

use std::io::{self, IsTerminal};

use clap::Args;
use trellis_client::StartOptions;

use super::connect::HomeArgs;
use super::error::CliError;
use super::fetch::RegistryArgs;
use super::output::Format;
use super::run::{self, UserInput, Wanted};
use super::seed::seed;

const EXAMPLES: &str = "\
Examples:
  trellis chat \"What is 37 + 48?\"       one question
  trellis chat --temperature 0.8        a conversation at a prompt; /help lists its commands
  trellis chat --verbose                says after each answer how fast it was
  trellis chat < questions.txt          a conversation from a file, one message a line

On a terminal, conversations that are saved and the lines of the prompt are kept in trellis/ of XDG_STATE_HOME
(~/.local/state), for you alone.";

/// The guest that it runs.
const GUEST: &str = "chat";

/// Talk to the model
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ChatArgs {
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// How freely the model chooses its words; 0 always takes the likeliest
    #[arg(long, value_name = "T", value_parser = temperature)]
    temperature: Option<f32>,
    /// The most tokens of one answer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// The seed; the same seed gives the same answers
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Say after each answer how many tokens it has, how fast they came, and how many of the prompt were computed before
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    home: HomeArgs,
    /// One question; without it, messages from a prompt, or from standard input, one a line
    prompt: Vec<String>,
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(format!("{text:?} is not a number of at least 0")),
    }
}

pub(crate) async fn chat(args: ChatArgs, format: Format) -> Result<(), CliError> {
    let is_led = args.prompt.is_empty() && format == Format::Text;
    if is_led && io::stdin().is_terminal() && io::stdout().is_terminal() {
        return talk::talk(args).await;
    }
    let input = if args.prompt.is_empty() { UserInput::Lines } else { UserInput::Nothing };
    let options = StartOptions { arguments: arguments(&args), seed: args.seed, ..StartOptions::default() };
    run::start(GUEST, &args.home, RegistryArgs::default(), options, input, Wanted::default(), format).await
}

fn arguments(args: &ChatArgs) -> Vec<String> {
    let options = [
        ("--system", args.system.clone()),
        ("--temperature", args.temperature.map(|value| value.to_string())),
        ("--max-tokens", args.max_tokens.map(|value| value.to_string())),
    ];
    let given = options.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
    let verbose = args.verbose.then(|| "--verbose".to_owned());
    let dashes = (!args.prompt.is_empty()).then(|| "--".to_owned());
    given.chain(verbose).chain(dashes).chain(args.prompt.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        args: ChatArgs,
    }

    fn guest_arguments(words: &[&str]) -> Vec<String> {
        arguments(&Alone::try_parse_from([&["chat"], words].concat()).expect("valid").args)
    }

    #[test]
    fn a_prompt_is_never_taken_for_an_option() {
        assert!(guest_arguments(&[]).is_empty());
        let words = ["--system", "Be brief = good.", "-v", "--temperature", "0.5", "--", "--seed", "it"];
        assert_eq!(
            guest_arguments(&words),
            ["--system=Be brief = good.", "--temperature=0.5", "--verbose", "--", "--seed", "it"]
        );
    }

    #[test]
    fn temperatures_are_numbers() {
        assert_eq!(temperature("0.7"), Ok(0.7));
        for text in ["NaN", "-1", "inf", "warm"] {
            assert!(temperature(text).is_err(), "{text}");
        }
    }
}
