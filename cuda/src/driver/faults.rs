//! Lets calls of the driver fail, for tests: those that this thread makes from now on, and no other's.

use std::cell::RefCell;

use cudarc::driver::sys::CUresult;

/// What the calls of a thread have been told.
#[derive(Default)]
struct Faults {
    /// Calls that go through before one fails.
    n_left: Option<usize>,
    code: Option<CUresult>,
    lasts: Option<Lasts>,
    calls: Vec<&'static str>,
}

/// Whether the calls after the one that failed work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lasts {
    /// They do.
    Once,
    /// They fail as well, as those on a lost device do.
    ForEver,
}

thread_local! {
    static FAULTS: RefCell<Faults> = RefCell::default();
}

/// Lets the call after so many others fail with this code, without being made.
pub(crate) fn inject(n_before: usize, code: CUresult, lasts: Lasts) {
    FAULTS.set(Faults { n_left: Some(n_before), code: Some(code), lasts: Some(lasts), calls: Vec::new() });
}

/// Lets all calls be made again. Returns the names of the calls since this or [`inject`] was called.
pub(crate) fn clear() -> Vec<&'static str> {
    FAULTS.take().calls
}

/// The code with which this call fails, if it does.
pub(super) fn next(call: &'static str) -> Option<CUresult> {
    FAULTS.with_borrow_mut(|faults| {
        faults.calls.push(call);
        match faults.n_left {
            None => None,
            Some(0) => {
                if faults.lasts == Some(Lasts::Once) {
                    faults.n_left = None;
                }
                faults.code
            }
            Some(n) => {
                faults.n_left = Some(n - 1);
                None
            }
        }
    })
}
