//! Times on the command line.

use std::time::Duration;

/// A number of seconds, with a fraction if need be.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| format!("{text} is no time: seconds are 0 to {}", u64::MAX))
}

/// As [`seconds`], and long enough for something to happen.
pub(crate) fn some_seconds(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        time if time < Duration::from_millis(1) => {
            Err(format!("{text} is not a time of at least a millisecond"))
        }
        time => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_bounded() {
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert_eq!(some_seconds("1.5"), Ok(Duration::from_millis(1500)));
        assert!(some_seconds("0").is_err());
        for text in ["", "soon", "-1", "NaN", "inf", "1e400"] {
            assert!(seconds(text).is_err() && some_seconds(text).is_err(), "{text}");
        }
    }
}
