//! A calendar date for chat templates, which is passed in and never read from a clock.

/// A day of the proleptic Gregorian calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Date {
    year: u16,
    month: u8,
    day: u8,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Date {
    /// A date, if there is such a day; `month` and `day` count from 1.
    pub fn new(year: u16, month: u8, day: u8) -> Option<Self> {
        let valid = (1..=9999).contains(&year)
            && (1..=12).contains(&month)
            && (1..=n_days_of_month(year, month)).contains(&day);
        valid.then_some(Self { year, month, day })
    }

    /// The date in UTC of a moment, in seconds since 1970-01-01T00:00Z; `None` after the year 9999.
    pub fn from_unix_s(unix_s: u64) -> Option<Self> {
        const N_DAYS_MAX: u64 = 2_932_896; // 9999-12-31
        let mut n_days = unix_s / 86_400;
        if n_days > N_DAYS_MAX {
            return None;
        }
        let mut year = 1970;
        while n_days >= 365 + u64::from(is_leap(year)) {
            n_days -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let mut month = 1;
        while n_days >= u64::from(n_days_of_month(year, month)) {
            n_days -= u64::from(n_days_of_month(year, month));
            month += 1;
        }
        Self::new(year, month, n_days as u8 + 1)
    }

    /// The date in a format of C's `strftime`; the error is the part of the format that is not supported.
    pub(crate) fn format(self, format: &str) -> Result<String, String> {
        let mut text = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let month = MONTHS[usize::from(self.month) - 1];
            let weekday = WEEKDAYS[self.weekday_idx()];
            text += &match chars.next() {
                Some('Y') => format!("{:04}", self.year),
                Some('y') => format!("{:02}", self.year % 100),
                Some('m') => format!("{:02}", self.month),
                Some('d') => format!("{:02}", self.day),
                Some('e') => format!("{:2}", self.day),
                Some('B') => month.to_owned(),
                Some('b' | 'h') => month[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('F') => format!("{:04}-{:02}-{:02}", self.year, self.month, self.day),
                Some('%') => "%".to_owned(),
                Some(other) => return Err(format!("%{other}")),
                None => return Err("%".to_owned()),
            };
        }
        Ok(text)
    }

    /// Days since Sunday, by Sakamoto's method.
    fn weekday_idx(self) -> usize {
        const SHIFTS: [usize; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = usize::from(self.year) - usize::from(self.month < 3);
        let shift = SHIFTS[usize::from(self.month) - 1];
        (year + year / 4 - year / 100 + year / 400 + shift + usize::from(self.day)) % 7
    }
}

fn is_leap(year: u16) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn n_days_of_month(year: u16, month: u8) -> u8 {
    match month {
        2 => 28 + u8::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_days_that_exist() {
        assert!(Date::new(2024, 2, 29).is_some());
        for (year, month, day) in
            [(2023, 2, 29), (1900, 2, 29), (2024, 0, 1), (2024, 13, 1), (2024, 4, 31), (0, 1, 1)]
        {
            assert_eq!(Date::new(year, month, day), None, "{year}-{month}-{day}");
        }
    }

    // Expected values are those of GNU date.
    #[test]
    fn formats_like_strftime() {
        let date = Date::new(2024, 7, 26).unwrap();
        assert_eq!(date.format("%d %b %Y").unwrap(), "26 Jul 2024");
        assert_eq!(date.format("%A, %B %e, %y: %F 100%%").unwrap(), "Friday, July 26, 24: 2024-07-26 100%");
        assert_eq!(Date::new(2000, 1, 1).unwrap().format("%a %m/%d").unwrap(), "Sat 01/01");
        assert_eq!(date.format("%H:%M").unwrap_err(), "%H");
        assert_eq!(date.format("%").unwrap_err(), "%");
    }

    #[test]
    fn counts_days_since_1970() {
        assert_eq!(Date::from_unix_s(0), Date::new(1970, 1, 1));
        assert_eq!(Date::from_unix_s(951_782_400), Date::new(2000, 2, 29));
        assert_eq!(Date::from_unix_s(951_868_799), Date::new(2000, 2, 29));
        assert_eq!(Date::from_unix_s(253_402_300_799), Date::new(9999, 12, 31));
        assert_eq!(Date::from_unix_s(253_402_300_800), None);
        assert_eq!(Date::from_unix_s(u64::MAX), None);
    }
}
