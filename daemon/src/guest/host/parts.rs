//! Long work in parts for a guest, and JSON that is read so.

use std::io::{BufReader, Read};
use std::time::Duration;

use serde::de::IgnoredAny;
use trellis_engine::model::{GivenUp, YieldPoint};

use super::types::HostError;
use crate::guest::error::GuestFault;
use crate::guest::rooms::Need;
use crate::guest::run::whole_ms;
use crate::guest::store::GuestState;

/// JSON up to this length is read at once, in well below a millisecond.
const SHORT_JSON_BYTES: usize = 64 << 10;

/// Bytes of JSON between two yield points.
const PART_BYTES: usize = 8 << 10;

impl GuestState {
    /// Does work in parts on a thread beside those that guests share. It is given up with the guest, or when that has had all of
    /// its processor time, which [`Self::out_of_time`] says.
    pub(super) async fn work_in_parts<T: Send + 'static>(
        &mut self,
        need: Need,
        work: impl FnOnce(&YieldPoint) -> T + Send + 'static,
    ) -> T {
        let cpu_max = Duration::from_millis(self.limits.cpu_ms);
        self.beside.run_in_parts(&self.owner, &self.cpu, cpu_max, need, work).await
    }

    /// How the guest ends for which work was given up.
    pub(super) fn out_of_time(&self) -> HostError {
        HostError::Fault(GuestFault::Cpu { used_ms: whole_ms(self.cpu.used()) }.into())
    }

    /// Checks that a text is JSON, and gives it back with what is wrong with it.
    ///
    /// # Errors
    /// The guest has had its processor time.
    pub(super) async fn check_json(
        &mut self,
        json: String,
    ) -> Result<(String, Result<(), serde_json::Error>), HostError> {
        if json.len() <= SHORT_JSON_BYTES {
            let checked = serde_json::from_str::<IgnoredAny>(&json).map(drop);
            return Ok((json, checked));
        }
        let check = move |yields: &YieldPoint| (check_in_parts(&json, yields), json);
        let (checked, json) = self.work_in_parts(Need::NOTHING, check).await;
        Ok((json, checked.map_err(|GivenUp| self.out_of_time())?))
    }
}

fn check_in_parts(json: &str, yields: &YieldPoint) -> Result<Result<(), serde_json::Error>, GivenUp> {
    let parts = BufReader::with_capacity(PART_BYTES, Parts { rest: json.as_bytes(), yields });
    match serde_json::from_reader::<_, IgnoredAny>(parts) {
        Err(error) if error.is_io() => Err(GivenUp),
        checked => Ok(checked.map(drop)),
    }
}

/// A text that is read in parts, with a yield point before each.
struct Parts<'a> {
    rest: &'a [u8],
    yields: &'a YieldPoint,
}

impl Read for Parts<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.yields.reach().map_err(std::io::Error::other)?;
        self.rest.read(into)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn json_in_parts_is_what_it_is_at_once_until_it_is_given_up() {
        let long = format!("[{}0]", "{\"a\": \"\u{e4}\\u00e4\"}, ".repeat(10_000));
        for json in [
            long.clone(),
            format!("{long},"),
            long[1..].to_owned(),
            format!("{long}\n"),
            long.replace(':', ""),
        ] {
            let at_once = serde_json::from_str::<IgnoredAny>(&json);
            let in_parts = check_in_parts(&json, &YieldPoint::NONE).expect("nobody gives it up");
            assert_eq!(in_parts.is_ok(), at_once.is_ok());
        }
        let n_reached = Arc::new(AtomicUsize::new(0));
        let counted = n_reached.clone();
        let yields = YieldPoint::new(move || match counted.fetch_add(1, Ordering::Relaxed) {
            0..4 => Ok(()),
            _ => Err(GivenUp),
        });
        assert_eq!(check_in_parts(&long, &yields).map(drop), Err(GivenUp));
        assert_eq!(n_reached.load(Ordering::Relaxed), 5, "it ends where it is given up");
    }
}
