//! How long devices have computed, which only grows.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The most that was told of each device. What is read off may be less for a moment: a model that leaves, or an engine that does
/// not answer, takes its part with it.
#[derive(Debug, Default)]
pub(crate) struct BusySeen(Mutex<HashMap<String, u64>>);

impl BusySeen {
    /// What is told of a device of which this is read off.
    pub(crate) fn see(&self, device: &str, busy_ms: u64) -> u64 {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let most = seen.entry(device.to_owned()).or_default();
        *most = busy_ms.max(*most);
        *most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_goes_back() {
        let seen = BusySeen::default();
        let told = [5, 3, 8, 0].map(|busy_ms| seen.see("cuda:0", busy_ms));
        assert_eq!(told, [5, 5, 8, 8]);
        assert_eq!(seen.see("cuda:1", 1), 1);
    }
}
