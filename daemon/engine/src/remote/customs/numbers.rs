//! Which numbers of contexts a process has used.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::violation::Violation;

/// How far a number may lie above the lowest that was not used. Contexts are numbered one after the other, and posted as their
/// tasks come to it; of numbers that lie as close as that few fall into one place of a hash table.
const N_AHEAD_MAX: u64 = 1 << 16;

/// The numbers of one model's contexts, each of which is used once.
#[derive(Debug)]
pub(super) struct Numbers {
    range: Range<u64>,
    /// All below it were used.
    next: u64,
    /// Those above it that were.
    ahead: BTreeSet<u64>,
}

impl Numbers {
    pub(super) fn new(range: Range<u64>) -> Self {
        Self { next: range.start, range, ahead: BTreeSet::new() }
    }

    /// Checks that a number may be used now.
    pub(super) fn check(&self, number: u64) -> Result<(), Violation> {
        let refuse = |expected| Err(Violation::Number { number, expected });
        if !self.range.contains(&number) {
            return refuse("one of the process's own");
        }
        if self.is_used(number) {
            return refuse("one that was not used before");
        }
        if number - self.next >= N_AHEAD_MAX {
            return refuse("one close to those that were used");
        }
        Ok(())
    }

    fn is_used(&self, number: u64) -> bool {
        number < self.next || self.ahead.contains(&number)
    }

    /// A number is used, that may be.
    pub(super) fn take(&mut self, number: u64) {
        self.ahead.insert(number);
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_used_once_and_close_to_the_others() {
        let mut numbers = Numbers::new(100..1 << 20);
        for number in [100, 102, 101, 105] {
            numbers.check(number).expect("it is free");
            numbers.take(number);
            numbers.check(number).expect_err("it is used");
        }
        assert_eq!((numbers.next, numbers.ahead.len()), (103, 1));
        for number in [99, 0, 1 << 20, u64::MAX, 103 + N_AHEAD_MAX] {
            numbers.check(number).expect_err("it is out of reach");
        }
        numbers.check(102 + N_AHEAD_MAX).expect("it is just within reach");
    }
}
