//! `trellis ps`: the user's running guests.

use clap::Args;
use nix::unistd::{Uid, User};
use trellis_client::GuestInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use super::table::{Align, Table};
use super::width::screen_width;

const EXAMPLES: &str = "\
Examples:
  trellis ps
  trellis ps --wide
  trellis ps --json | jq '.[] | select(.elapsed_ms > 60000) | .guest_id'
  trellis ps --json | jq '.[] | {guest_id, used: .used.cpu_ms, limit: .limits.cpu_ms}'

Lines fit the terminal, or 80 columns where there is none; `trellis top` shows the same as it changes.

GUEST    its number, for `trellis stop`
USER     whose it is, where guests of several users are listed, which only root is shown
PROGRAM  its name; of a component what its client calls it and the beginning of its hash
MODEL    what it holds something of, a context for one; - where it has nothing of a model at this moment
STATE    running or waiting: for its model, its client or time; or how much of its prompts is computed. Of a guest that was
         started with `trellis run --detach` also whether somebody is attached to it; ended, while its end is kept
TOKENS   computed for it, those in vain included
PAGES    KV pages that its contexts hold
TIME     since its start

With --wide, as long as lines come to be:

CLASS    of its user: `trellis info` says what yours is due
CONTEXTS open
ON HOST  pages, of all its PAGES, that made room for others; they come back before they are computed with
MEMORY   its linear memory
IN VAIN  tokens that were decoded ahead or guessed and not wanted
GUESSES  the part of guessed tokens that were right; - where none were guessed
CACHED   tokens that the prefix cache spared
REOPENED tokens of saved contexts that came from disk, and were not computed again
WAITED   steps that went by while a context could have been in them

--json has these by cause, and what each guest uses of its memory, time and budgets (used) and may use (limits), by the names
that `trellis limits` has.";

/// List your running guests
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsArgs {
    /// Show all columns, however long lines come to be
    #[arg(long)]
    wide: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn ps(args: PsArgs, format: Format) -> Result<(), CliError> {
    let guests = args.socket.connect(format).await?.ps().await?;
    output::print(format, &guests, |guests| match args.wide {
        true => table(guests, name_of).render(),
        false => narrow(guests, name_of, screen_width()),
    })
}

/// The name of a user, or its number where the machine has no name for it.
pub(super) fn name_of(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Letters of a name; what stands before them of a component's hash is never cut.
const N_PROGRAM_CHARS: usize = 24;

/// Letters of a component's hash, where lines have to fit.
const N_HASH_CHARS: usize = 6;

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

/// As [`shown`], of a hash what tells two apart.
pub(super) fn shown_short(program: &str) -> String {
    match program.rsplit_once('@') {
        Some((label, hash)) => {
            let n_chars = N_PROGRAM_CHARS - 1 - N_HASH_CHARS;
            let (label, hash): (String, String) =
                (label.chars().take(n_chars).collect(), hash.chars().take(N_HASH_CHARS).collect());
            format!("{label}@{hash}")
        }
        None => shown(program),
    }
}

/// What a guest does, or how much is computed of the prompts that it waits for.
pub(super) fn state(guest: &GuestInfo) -> String {
    let GuestInfo { n_prompt_tokens: n_all, n_prompt_tokens_left: n_left, .. } = *guest;
    match n_all.checked_sub(n_left) {
        Some(n_done) if n_left > 0 => format!("prefill {}%", 100 * u128::from(n_done) / u128::from(n_all)),
        _ if guest.is_detached => {
            let by = if guest.is_attached { "attached" } else { "detached" };
            format!("{}, {by}", guest.state)
        }
        _ => guest.state.clone(),
    }
}

/// The part of guessed tokens that were right.
pub(super) fn acceptance(guest: &GuestInfo) -> String {
    match guest.usage.n_tokens_guessed {
        0 => "-".to_owned(),
        n => format!("{:.0}%", 100.0 * guest.usage.n_tokens_guessed_right as f64 / n as f64),
    }
}

/// The models of a guest.
pub(super) fn models(guest: &GuestInfo) -> String {
    if guest.models.is_empty() { "-".to_owned() } else { guest.models.join(", ") }
}

/// Whether these are guests of one user, or of none: whose they are is said where that is a question.
pub(super) fn are_of_one_user(guests: &[GuestInfo]) -> bool {
    guests.windows(2).all(|pair| pair[0].uid == pair[1].uid)
}

const USER: &str = "USER";

/// The columns of most use, in lines of so many cells.
fn narrow(guests: &[GuestInfo], name_of: impl Fn(u32) -> String, n_cells: usize) -> String {
    let mut table = Table::new([
        ("GUEST", Align::Right),
        (USER, Align::Left),
        ("PROGRAM", Align::Left),
        ("MODEL", Align::Left),
        ("STATE", Align::Left),
        ("TOKENS", Align::Right),
        ("PAGES", Align::Right),
        ("TIME", Align::Right),
    ]);
    for (name, n_cells_min) in [("PROGRAM", 14), ("MODEL", 6), (USER, 6)] {
        table.squeeze(name, n_cells_min);
    }
    table.spare(&["PAGES", "MODEL", "TIME", USER, "TOKENS", "STATE"]);
    if are_of_one_user(guests) {
        table.leave_out(USER);
    }
    for guest in guests {
        table.push([
            guest.guest_id.to_string(),
            name_of(guest.uid),
            shown_short(&guest.program),
            models(guest),
            state(guest),
            guest.usage.n_tokens.to_string(),
            guest.n_pages.to_string(),
            output::duration_ms(guest.elapsed_ms),
        ]);
    }
    table.render_in(n_cells)
}

fn table(guests: &[GuestInfo], name_of: impl Fn(u32) -> String) -> Table<17> {
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
        ("GUESSES", Align::Right),
        ("CACHED", Align::Right),
        ("REOPENED", Align::Right),
        ("WAITED", Align::Right),
        ("TIME", Align::Right),
    ]);
    if are_of_one_user(guests) {
        table.leave_out(USER);
    }
    for guest in guests {
        let class = guest.class.as_deref().unwrap_or("-");
        table.push([
            guest.guest_id.to_string(),
            name_of(guest.uid),
            shown(&guest.program),
            class.chars().take(N_CLASS_CHARS).collect(),
            models(guest),
            state(guest),
            guest.n_contexts.to_string(),
            guest.n_pages.to_string(),
            guest.n_pages_on_host.to_string(),
            output::bytes(guest.memory_bytes),
            guest.usage.n_tokens.to_string(),
            guest.usage.n_tokens_in_vain.to_string(),
            acceptance(guest),
            guest.usage.n_tokens_cached.to_string(),
            guest.usage.n_tokens_reopened.to_string(),
            guest.usage.n_steps_waited.to_string(),
            output::duration_ms(guest.elapsed_ms),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use trellis_client::GuestUsage;
    use unicode_width::UnicodeWidthStr;

    use super::super::width::N_CELLS;
    use super::*;

    fn guest(guest_id: u64, uid: u32) -> GuestInfo {
        GuestInfo { guest_id, uid, program: "chat".to_owned(), ..GuestInfo::default() }
    }

    #[test]
    fn whose_guests_they_are_is_said_where_they_are_of_several_users() {
        let name_of = |uid: u32| if uid == 7 { "ada".to_owned() } else { uid.to_string() };
        for guests in [vec![], vec![guest(1, 7)], vec![guest(1, 7), guest(2, 7)]] {
            for shown in [table(&guests, name_of).render(), narrow(&guests, name_of, N_CELLS)] {
                assert!(shown.starts_with("GUEST  PROGRAM") && !shown.contains("ada"), "{shown}");
            }
        }
        let guests = [guest(1, 7), guest(2, 8)];
        for shown in [table(&guests, name_of).render(), narrow(&guests, name_of, N_CELLS)] {
            let starts: Vec<&str> = shown.lines().map(|line| &line[..16]).collect();
            assert_eq!(starts, ["GUEST  USER  PRO", "    1  ada   cha", "    2  8     cha"]);
        }
    }

    #[test]
    fn lines_fit_the_screen_whatever_guests_are_called_and_have_used() {
        let usage = GuestUsage { n_tokens: 123_456_789, ..GuestUsage::default() };
        let large = |uid| GuestInfo {
            guest_id: 12_345_678,
            uid,
            program: "世界\u{1b}[2J a very long name of a component@0123456789ab".to_owned(),
            models: vec!["Llama-3.2-1B-Instruct".to_owned(), "tiny".to_owned()],
            state: "waiting".to_owned(),
            n_pages: 1_234_567,
            n_prompt_tokens: 1000,
            n_prompt_tokens_left: 625,
            elapsed_ms: 3_000_000,
            usage: usage.clone(),
            ..GuestInfo::default()
        };
        let guests = [guest(1, 7), large(7), large(8)];
        for n_cells in [20, 40, 80, 200] {
            let shown = narrow(&guests, |uid| format!("user-of-number-{uid}"), n_cells);
            assert!(shown.lines().all(|line| line.width() <= n_cells), "{n_cells}: {shown}");
            assert!(shown.contains("12345678") && !shown.contains('\u{1b}'), "{shown}");
        }
        let shown = narrow(&guests, |uid| format!("user-of-number-{uid}"), N_CELLS);
        assert!(shown.contains("prefill 37%") && shown.contains("TOKENS"), "{shown}");
    }

    #[test]
    fn the_part_of_guesses_that_were_right_is_shown_where_there_were_some() {
        let usage = GuestUsage { n_tokens_guessed: 8, n_tokens_guessed_right: 6, ..GuestUsage::default() };
        let guests = [GuestInfo { usage, ..guest(1, 7) }, guest(2, 7)];
        assert_eq!(guests.each_ref().map(acceptance), ["75%", "-"]);
        assert!(table(&guests, name_of).render().contains("GUESSES"));
    }

    #[test]
    fn tokens_from_disk_are_in_the_wide_table() {
        let usage = GuestUsage { n_tokens_cached: 3, n_tokens_reopened: 999, ..GuestUsage::default() };
        let shown = table(&[GuestInfo { usage, ..guest(1, 7) }], name_of).render();
        let (head, line) = shown.split_once('\n').expect("a line for the guest");
        let column = |name: &str| head.find(name).expect("it is a column") + name.len();
        assert!(line[..column("REOPENED")].ends_with(" 999"), "{shown}");
        assert!(line[..column("CACHED")].ends_with(" 3"), "{shown}");
    }

    #[test]
    fn a_user_without_a_name_goes_by_its_number() {
        assert_eq!(name_of(u32::MAX - 9), (u32::MAX - 9).to_string());
    }
}
