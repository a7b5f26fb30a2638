//! The functions that every device shares, for a reading of the definition of programs that shares nothing else.

use super::maths;

/// eˣ; the largest number where it is above that. `x` is not NaN.
#[must_use]
pub fn exp(x: f32) -> f32 {
    maths::exp(x)
}

/// ln x; −∞ at 0 and NaN below. `x` is finite or −∞.
#[must_use]
pub fn log(x: f32) -> f32 {
    maths::log(x)
}
