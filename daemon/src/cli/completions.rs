//! `trellis completions`: what a shell needs to complete commands and options.

use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;

use super::Cli;
use super::error::CliError;
use super::output;

const EXAMPLES: &str = "\
Examples:
  trellis completions bash > ~/.local/share/bash-completion/completions/trellis
  trellis completions zsh > ~/.zfunc/_trellis         with ~/.zfunc in fpath
  trellis completions fish > ~/.config/fish/completions/trellis.fish";

/// Print what a shell needs to complete commands and options
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    output::print_line(script(args.shell).trim_end())
}

fn script(shell: Shell) -> String {
    let all = Cli::command();
    // The processes of a daemon are for nobody to type.
    let shown = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut command = Command::new("trellis").args(all.get_arguments().cloned()).subcommands(shown);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "trellis", &mut script);
    String::from_utf8(script).expect("the help is text")
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn every_shell_hears_of_commands_and_options() {
        for shell in Shell::value_variants() {
            let script = script(*shell);
            for word in ["doctor", "uninstall", "verbose"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
            assert!(!script.contains("worker"), "{shell}");
        }
    }
}
