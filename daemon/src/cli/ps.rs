//! `trellis ps`: the user's running guests.

use clap::Args;
use trellis_client::GuestInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use super::table::{Align, Table};

const EXAMPLES: &str = "\
Examples:
  trellis ps
  trellis ps --json | jq '.[] | select(.elapsed_ms > 60000) | .guest_id'
  trellis ps --json | jq '.[] | {guest_id, used: .used.cpu_ms, limit: .limits.cpu_ms}'

CLASS is that of the guest's user: `trellis info` says what yours is due. MODEL is what the guest holds something of, a context
for one; - is a guest that has nothing of a model at this moment. ON HOST are pages, of all its PAGES, that made room for
others; they come back before they are computed with. IN VAIN are tokens that were decoded ahead or guessed and not wanted,
CACHED those that the prefix cache spared, WAITED the steps that went by while a context could have been in them; --json has
them by cause. It also has what each guest uses of its memory, time and budgets (used) and may use (limits), by the names
that `trellis limits` has.";

/// List your running guests
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn ps(args: PsArgs, format: Format) -> Result<(), CliError> {
    let guests = args.socket.connect().await?.ps().await?;
    output::print(format, &guests, |guests| table(guests))
}

/// Letters of a name; what stands before them of a component's hash is never cut.
const N_PROGRAM_CHARS: usize = 24;

/// Letters of a class.
const N_CLASS_CHARS: usize = 12;

/// A program's name, as long as there is room: of what a client calls its component the end goes, not the hash.
fn shown(program: &str) -> String {
    let (label, hash) = program
        .rsplit_once('@')
        .map_or((program, String::new()), |(label, hash)| (label, format!("@{hash}")));
    let n_chars = N_PROGRAM_CHARS.saturating_sub(hash.len());
    label.chars().take(n_chars).collect::<String>() + &hash
}

fn table(guests: &[GuestInfo]) -> String {
    let mut table = Table::new([
        ("GUEST", Align::Right),
        ("PROGRAM", Align::Left),
        ("CLASS", Align::Left),
        ("MODEL", Align::Left),
        ("STATE", Align::Left),
        ("CONTEXTS", Align::Right),
        ("PAGES", Align::Right),
        ("ON HOST", Align::Right),
        ("MEMORY", Align::Right),
        ("TOKENS", Align::Right),
        ("IN VAIN", Align::Right),
        ("CACHED", Align::Right),
        ("WAITED", Align::Right),
        ("TIME", Align::Right),
    ]);
    for guest in guests {
        let class = guest.class.as_deref().unwrap_or("-");
        table.push([
            guest.guest_id.to_string(),
            shown(&guest.program),
            class.chars().take(N_CLASS_CHARS).collect(),
            if guest.models.is_empty() { "-".to_owned() } else { guest.models.join(", ") },
            guest.state.clone(),
            guest.n_contexts.to_string(),
            guest.n_pages.to_string(),
            guest.n_pages_on_host.to_string(),
            output::bytes(guest.memory_bytes),
            guest.usage.n_tokens.to_string(),
            guest.usage.n_tokens_in_vain.to_string(),
            guest.usage.n_tokens_cached.to_string(),
            guest.usage.n_steps_waited.to_string(),
            output::duration_ms(guest.elapsed_ms),
        ]);
    }
    table.render()
}
