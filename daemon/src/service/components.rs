//! Components that clients have uploaded, until they are compiled.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use trellis_wire::{ComponentHash, ErrorBody};

/// The most recently uploaded components. Once one has been compiled, its code is what is kept; who asks for one
/// that is gone is told to upload it again.
pub(super) struct Components {
    n_bytes_max: usize,
    kept: Mutex<VecDeque<(ComponentHash, Bytes)>>,
}

impl Components {
    pub(super) fn new(n_bytes_max: usize) -> Self {
        Self { n_bytes_max, kept: Mutex::default() }
    }

    pub(super) fn get(&self, hash: &ComponentHash) -> Option<Bytes> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(other, _)| other == hash).map(|(_, bytes)| bytes.clone())
    }

    pub(super) fn keep(&self, hash: ComponentHash, bytes: Bytes) -> Result<(), ErrorBody> {
        if bytes.len() > self.n_bytes_max {
            return Err(ErrorBody::over_limit(
                "component_bytes",
                bytes.len() as u64,
                self.n_bytes_max as u64,
            ));
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(other, _)| *other != hash);
        kept.push_back((hash, bytes));
        while kept.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > self.n_bytes_max {
            kept.pop_front();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_make_room() {
        let components = Components::new(10);
        let hash = |n| ComponentHash([n; 32]);
        for n in 1..=3 {
            components.keep(hash(n), Bytes::from(vec![n; 4])).expect("small enough");
        }
        assert!(components.get(&hash(1)).is_none());
        assert_eq!(components.get(&hash(3)).as_deref(), Some(&[3; 4][..]));
        let refused = components.keep(hash(4), Bytes::from(vec![0; 11])).expect_err("larger than all room");
        assert_eq!(refused.limit, Some(10));
        assert!(components.get(&hash(2)).is_some(), "what is refused displaces nothing");
    }
}
