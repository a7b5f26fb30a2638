//! `trellis ps`: the user's running guests.

use clap::Args;
use nix::unistd::{Uid, User};
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

USER stands there where guests of several users do, which only root is shown. CLASS is that of the guest's user: `trellis
info` says what yours is due. MODEL is what the guest holds something of, a context for one; - is a guest that has nothing
of a model at this moment. ON HOST are pages, of all its PAGES, that made room for others; they come back before they are
computed with. IN VAIN are tokens that were decoded ahead or guessed and not wanted, CACHED those that the prefix cache
spared, WAITED the steps that went by while a context could have been in them; --json has them by cause. It also has what
each guest uses of its memory, time and budgets (used) and may use (limits), by the names that `trellis limits` has.";

/// List your running guests
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn ps(args: PsArgs, format: Format) -> Result<(), CliError> {
    let guests = args.socket.connect().await?.ps().await?;
    output::print(format, &guests, |guests| table(guests, name_of))
}

/// The name of a user, or its number where the machine has no name for it.
fn name_of(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
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

/// Whose guests they are is said where that is a question.
const USER: &str = "USER";

fn table(guests: &[GuestInfo], name_of: impl Fn(u32) -> String) -> String {
    let mut table = Table::new([
        ("GUEST", Align::Right),
        (USER, Align::Left),
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
    let are_of_one_user = guests.windows(2).all(|pair| pair[0].uid == pair[1].uid);
    if are_of_one_user {
        table.leave_out(USER);
    }
    for guest in guests {
        let class = guest.class.as_deref().unwrap_or("-");
        table.push([
            guest.guest_id.to_string(),
            if are_of_one_user { String::new() } else { name_of(guest.uid) },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_guests_they_are_is_said_where_they_are_of_several_users() {
        let guest =
            |guest_id, uid| GuestInfo { guest_id, uid, program: "chat".to_owned(), ..GuestInfo::default() };
        let name_of = |uid: u32| if uid == 7 { "ada".to_owned() } else { uid.to_string() };
        for guests in [vec![], vec![guest(1, 7)], vec![guest(1, 7), guest(2, 7)]] {
            let shown = table(&guests, name_of);
            assert!(shown.starts_with("GUEST  PROGRAM") && !shown.contains("ada"), "{shown}");
        }
        let shown = table(&[guest(1, 7), guest(2, 8)], name_of);
        let starts: Vec<&str> = shown.lines().map(|line| &line[..16]).collect();
        assert_eq!(starts, ["GUEST  USER  PRO", "    1  ada   cha", "    2  8     cha"]);
    }

    #[test]
    fn a_user_without_a_name_goes_by_its_number() {
        assert_eq!(name_of(u32::MAX - 9), (u32::MAX - 9).to_string());
    }
}
