//! What the number of a limit counts.

/// The unit of a limit, which its name ends with or has in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Milliseconds.
    Ms,
    /// Things.
    Count,
}

impl Unit {
    /// That of the limit of this name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        match name {
            _ if name.ends_with("_ms") => Self::Ms,
            _ if name.contains("bytes") => Self::Bytes,
            _ => Self::Count,
        }
    }

    /// Its name for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Ms => "ms",
            Self::Count => "count",
        }
    }

    /// That of this name; things for a name that is not known.
    #[must_use]
    pub fn named(name: &str) -> Self {
        [Self::Bytes, Self::Ms].into_iter().find(|unit| unit.name() == name).unwrap_or(Self::Count)
    }

    /// A number for people, to its last digit: `256 KiB`, `60,000 ms`, `1,024`.
    #[must_use]
    pub fn shown(self, number: u64) -> String {
        match self {
            Self::Count => grouped(number),
            Self::Ms => format!("{} ms", grouped(number)),
            Self::Bytes => {
                let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
                let is_whole = |(bytes, _): &&(u64, _)| number >= *bytes && number.is_multiple_of(*bytes);
                match units.iter().find(is_whole) {
                    Some((bytes, unit)) => format!("{} {unit}", grouped(number / bytes)),
                    None => format!("{} bytes", grouped(number)),
                }
            }
        }
    }
}

/// `10,000,000`
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_units() {
        for (name, unit) in [
            ("limits.cpu_ms", Unit::Ms),
            ("limits.output_bytes_in_flight", Unit::Bytes),
            ("sessions.inbox_bytes_per_user", Unit::Bytes),
            ("limits.n_handles", Unit::Count),
            ("limits.constraint_states", Unit::Count),
        ] {
            assert_eq!(Unit::of(name), unit, "{name}");
            assert_eq!(Unit::named(unit.name()), unit);
        }
    }

    #[test]
    fn no_digit_is_lost() {
        let bytes =
            [0, 1023, 1 << 10, 1 << 20, (1 << 20) + 1, 3 << 29, 1 << 40].map(|n| Unit::Bytes.shown(n));
        let expected =
            ["0 bytes", "1,023 bytes", "1 KiB", "1 MiB", "1,048,577 bytes", "1,536 MiB", "1,024 GiB"];
        assert_eq!(bytes, expected);
        assert_eq!([Unit::Ms.shown(60_000), Unit::Count.shown(1_024)], ["60,000 ms", "1,024"]);
    }
}
