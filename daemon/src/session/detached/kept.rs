//! The events of a detached guest, from the oldest that a client may still ask for.

use std::collections::VecDeque;

use trellis_wire::Event;

/// Numbered events. Those that were acknowledged stay while there is room for them.
#[derive(Debug)]
pub(super) struct Kept {
    events: VecDeque<Event>,
    /// The number of the event in front.
    first: u64,
    /// All before this were acknowledged.
    acknowledged: u64,
    /// Of the acknowledged ones that are here, as credit counts them.
    acknowledged_bytes: usize,
    acknowledged_bytes_max: usize,
    n_bytes: usize,
}

impl Kept {
    /// Nothing yet, with room for so many bytes that were acknowledged.
    pub(super) fn new(acknowledged_bytes_max: usize) -> Self {
        Self {
            events: VecDeque::new(),
            first: 0,
            acknowledged: 0,
            acknowledged_bytes: 0,
            acknowledged_bytes_max,
            n_bytes: 0,
        }
    }

    /// The number of the oldest event that is here, or that of the next one.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The number of the event that comes next.
    pub(super) fn next(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    /// Bytes of all that is here, as credit counts them.
    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Adds an event. What keeps it from growing without end is the guest's credit.
    pub(super) fn push(&mut self, event: Event) {
        self.n_bytes += event.credit_bytes();
        self.events.push_back(event);
    }

    /// The event of this number, if it is here.
    pub(super) fn get(&self, number: u64) -> Option<&Event> {
        self.events.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// All events before this number need not be kept any more. Returns how much of the guest's credit comes back with that.
    pub(super) fn acknowledge(&mut self, until: u64) -> usize {
        let until = until.min(self.next());
        let mut n_bytes = 0;
        while self.acknowledged < until {
            n_bytes += self.get(self.acknowledged).map_or(0, Event::credit_bytes);
            self.acknowledged += 1;
        }
        self.acknowledged_bytes += n_bytes;
        while self.acknowledged_bytes > self.acknowledged_bytes_max {
            let Some(event) = self.events.pop_front() else { break };
            self.first += 1;
            self.acknowledged_bytes -= event.credit_bytes();
            self.n_bytes -= event.credit_bytes();
        }
        n_bytes
    }
}

#[cfg(test)]
mod tests {
    use trellis_wire::OUTPUT_OVERHEAD_BYTES;

    use super::*;

    fn text(n_bytes: usize) -> Event {
        Event::Text { text: "x".repeat(n_bytes) }
    }

    #[test]
    fn what_was_not_acknowledged_stays_and_of_the_rest_the_newest() {
        let each = 10 + OUTPUT_OVERHEAD_BYTES;
        let mut kept = Kept::new(2 * each);
        for _ in 0..5 {
            kept.push(text(10));
        }
        assert_eq!((kept.first(), kept.next(), kept.n_bytes()), (0, 5, 5 * each));
        assert_eq!(kept.acknowledge(2), 2 * each);
        assert_eq!((kept.first(), kept.n_bytes()), (0, 5 * each), "there is room for those");
        assert_eq!(kept.acknowledge(4), 2 * each);
        assert_eq!((kept.first(), kept.n_bytes()), (2, 3 * each));
        assert_eq!(kept.acknowledge(4), 0, "once");
        assert_eq!(kept.acknowledge(1), 0, "and never back");
        assert_eq!(kept.acknowledge(u64::MAX), each, "no more than there is");
        kept.push(text(10));
        assert_eq!((kept.first(), kept.next()), (3, 6));
        assert!(
            kept.get(2).is_none() && kept.get(3).is_some() && kept.get(5).is_some() && kept.get(6).is_none()
        );
    }

    #[test]
    fn nothing_acknowledged_is_kept_without_room_for_it() {
        let mut kept = Kept::new(0);
        for _ in 0..3 {
            kept.push(text(100));
        }
        kept.acknowledge(3);
        assert_eq!((kept.first(), kept.next(), kept.n_bytes()), (3, 3, 0));
    }
}
