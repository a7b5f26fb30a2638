//! The columns of guests, and their order.

use std::cmp::Reverse;

use trellis_client::GuestInfo;

use super::budget::Left;
use super::rates::Rates;
use crate::cli::output;
use crate::cli::ps::{acceptance, are_of_one_user, models, shown_short, state};
use crate::cli::table::{Align, Table};

/// By what guests are sorted. Those that are alike come by their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    TokensPerS,
    Pages,
    Cpu,
    Number,
}

impl Order {
    /// All, with their keys and names.
    pub(super) const ALL: [(char, &'static str, Self); 4] = [
        ('t', "tokens/s", Self::TokensPerS),
        ('p', "pages", Self::Pages),
        ('c', "cpu", Self::Cpu),
        ('i', "id", Self::Number),
    ];

    /// Brings guests into this order: the most first.
    pub(super) fn sort(self, guests: &mut [GuestInfo], rates: &Rates) {
        guests.sort_by_key(|guest| guest.guest_id);
        let by = |amount: &dyn Fn(&GuestInfo) -> f64, guests: &mut [GuestInfo]| {
            guests.sort_by(|a, b| amount(b).total_cmp(&amount(a)));
        };
        match self {
            // Whole tokens: those of equal speed keep their places.
            Self::TokensPerS => by(&|guest| rates.guest(guest.guest_id).tokens_per_s.round(), guests),
            Self::Cpu => by(&|guest| (100.0 * rates.guest(guest.guest_id).cpu).round(), guests),
            Self::Pages => guests.sort_by_key(|guest| Reverse(guest.n_pages)),
            Self::Number => {}
        }
    }
}

const USER: &str = "USER";

/// `8.3`, `210`: to as many digits as mean something.
pub(super) fn rate(per_s: f64) -> String {
    if per_s < 9.95 { format!("{per_s:.1}") } else { format!("{per_s:.0}") }
}

/// `25%`
pub(super) fn percent(part: f64) -> String {
    format!("{:.0}%", 100.0 * part)
}

/// Guests in the order in which they are given.
pub(super) fn table(guests: &[GuestInfo], rates: &Rates, name_of: impl Fn(u32) -> String) -> Table<11> {
    let mut table = Table::new([
        ("GUEST", Align::Right),
        (USER, Align::Left),
        ("PROGRAM", Align::Left),
        ("MODEL", Align::Left),
        ("STATE", Align::Left),
        ("TOKENS", Align::Right),
        ("TOK/S", Align::Right),
        ("PAGES", Align::Right),
        ("CPU", Align::Right),
        ("GUESSES", Align::Right),
        ("LEFT", Align::Left),
    ]);
    for (name, n_cells_min) in [("PROGRAM", 14), ("MODEL", 6), (USER, 6)] {
        table.squeeze(name, n_cells_min);
    }
    table.spare(&["CPU", "GUESSES", "TOKENS", "PAGES", "MODEL", "LEFT", USER, "STATE", "TOK/S"]);
    if are_of_one_user(guests) {
        table.leave_out(USER);
    }
    for guest in guests {
        let of_guest = rates.guest(guest.guest_id);
        table.push([
            guest.guest_id.to_string(),
            name_of(guest.uid),
            shown_short(&guest.program),
            models(guest),
            state(guest),
            output::count(guest.usage.n_tokens),
            rate(of_guest.tokens_per_s),
            guest.n_pages.to_string(),
            percent(of_guest.cpu),
            acceptance(guest),
            Left::of(guest).map_or_else(|| "-".to_owned(), Left::shown),
        ]);
    }
    table
}
