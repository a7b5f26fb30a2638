//! Lists that forks share until one of them changes.

use std::ops::Deref;
use std::sync::Arc;

/// Entries up to which a fork copies: below, the copy costs less than what sharing costs both sides later.
#[cfg(not(test))]
const N_COPIED_MAX: usize = 1024;
/// Few, so that lists are shared in the short contexts of random worlds too.
#[cfg(test)]
const N_COPIED_MAX: usize = 2;

/// Entries that a list has room for at first, or beyond those that it is copied from: so that what is decoded seldom asks
/// for memory.
const N_MORE: usize = 256;

/// A list of which a long fork is a count. Whichever side changes first takes a copy, unless the other has gone by then.
#[derive(Debug)]
pub(super) struct Shared<T>(Storage<T>);

#[derive(Debug)]
enum Storage<T> {
    Own(Vec<T>),
    /// The first so many entries of a list.
    Beginning(Arc<Vec<T>>, usize),
}

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(Storage::Own(Vec::new()))
    }
}

impl<T> Deref for Shared<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Storage::Own(list) => list,
            Storage::Beginning(list, len) => &list[..*len],
        }
    }
}

impl<T: Copy> Shared<T> {
    /// The first `n` entries, for another holder.
    pub(super) fn fork(&mut self, n: usize) -> Self {
        if n <= N_COPIED_MAX {
            return Self(Storage::Own(copy(&self[..n])));
        }
        if let Storage::Own(own) = &mut self.0 {
            let len = own.len();
            self.0 = Storage::Beginning(Arc::new(std::mem::take(own)), len);
        }
        match &self.0 {
            Storage::Beginning(list, _) => Self(Storage::Beginning(list.clone(), n)),
            Storage::Own(_) => unreachable!("it is shared by now"),
        }
    }

    /// The list, to be changed.
    pub(super) fn own(&mut self) -> &mut Vec<T> {
        if let Storage::Beginning(list, len) = &mut self.0 {
            let own = match Arc::get_mut(list) {
                Some(list) => {
                    list.truncate(*len);
                    std::mem::take(list)
                }
                None => copy(&list[..*len]),
            };
            self.0 = Storage::Own(own);
        }
        match &mut self.0 {
            Storage::Own(list) => list,
            Storage::Beginning(..) => unreachable!("it is the holder's own by now"),
        }
    }

    /// Appends an entry.
    pub(super) fn push(&mut self, entry: T) {
        push_with_room(self.own(), entry, N_MORE);
    }

    /// Keeps the first `n` entries, if there are more.
    pub(super) fn truncate(&mut self, n: usize) {
        match &mut self.0 {
            Storage::Own(list) => list.truncate(n),
            Storage::Beginning(..) if n == 0 => *self = Self::default(),
            Storage::Beginning(_, len) => *len = n.min(*len),
        }
    }
}

/// A copy that has room for the few more that mostly follow.
fn copy<T: Copy>(list: &[T]) -> Vec<T> {
    let mut copy = Vec::with_capacity(list.len() + N_MORE);
    copy.extend_from_slice(list);
    copy
}

/// Appends to a list that has room for a few items from the first on, and for as many again when it grows.
pub(super) fn push_with_room<T>(list: &mut Vec<T>, item: T, n_min: usize) {
    if list.len() == list.capacity() {
        list.reserve_exact(n_min.max(list.len()));
    }
    list.push(item);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_fork_has_its_own_entries(acts in prop::collection::vec((0..4usize, 0..5u32, 0..3000usize), 0..60)) {
            let mut all = vec![(Shared::<u32>::default(), Vec::<u32>::new())];
            for (idx, act, n) in acts {
                let at = idx % all.len();
                let (list, expected) = &mut all[at];
                match act {
                    0 => (0..n as u32).for_each(|entry| {
                        list.push(entry);
                        expected.push(entry);
                    }),
                    1 => {
                        list.truncate(n);
                        expected.truncate(n);
                    }
                    2 if !expected.is_empty() => {
                        let place = n % expected.len();
                        list.own()[place] = 7;
                        expected[place] = 7;
                    }
                    3 => {
                        let n = n.min(expected.len());
                        let fork = (list.fork(n), expected[..n].to_vec());
                        all.push(fork);
                    }
                    _ if all.len() > 1 => {
                        all.swap_remove(at);
                    }
                    _ => {}
                }
                for (list, expected) in &all {
                    prop_assert_eq!(&**list, &**expected);
                }
            }
        }
    }

    #[test]
    fn a_long_fork_that_goes_unchanged_copies_nothing() {
        let mut list = Shared::default();
        (0..5000).for_each(|entry| list.push(entry));
        let memory = list.as_ptr();
        let fork = list.fork(4000);
        assert_eq!((fork.as_ptr(), fork.len()), (memory, 4000));
        drop(fork);
        list.push(1);
        assert_eq!(list.len(), 5001);
        let mut fork = list.fork(4000);
        fork.push(2);
        assert_ne!(fork.as_ptr(), list.as_ptr(), "the side that changes takes a copy");
        assert_eq!((fork[3999], fork[4000], list[4000]), (3999, 2, 4000));
    }
}
