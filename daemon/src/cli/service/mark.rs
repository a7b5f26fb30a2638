//! The mark by which an installed program is known again: its hash, kept in the unit, where systemd passes over it. A program
//! that somebody else has put in that place is not taken away.

/// The section and the key. systemd leaves sections whose names begin with `X-` to others.
const SECTION: &str = "[X-Trellis]";
const KEY: &str = "Program=";

/// What a program is known by.
pub(super) fn of(program: &[u8]) -> String {
    blake3::hash(program).to_hex().to_string()
}

/// A unit with the mark of the program that belongs to it.
pub(super) fn put(unit: &str, mark: &str) -> String {
    format!("{unit}\n{SECTION}\n# What installing has put there, and uninstalling takes away.\n{KEY}{mark}\n")
}

/// The mark in a unit.
pub(super) fn find(unit: &str) -> Option<&str> {
    let (_, section) = unit.split_once(SECTION)?;
    section.lines().find_map(|line| line.strip_prefix(KEY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_into_a_unit_is_found_there() {
        let unit = put("[Service]\nProgram=no\n", &of(b"program"));
        assert_eq!(find(&unit), Some(of(b"program").as_str()));
        assert_eq!(find("[Service]\nProgram=no\n"), None);
        assert_ne!(of(b"program"), of(b"another"));
    }
}
