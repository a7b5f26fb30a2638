//! Norms, rotations and activations of single rows.

use rten_simd::{SimdOp, SimdUnaryOp};
use rten_vecmath::{Silu, SumSquare};

/// `out = weight · x / sqrt(mean(x²) + eps)`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * scale);
    }
}

/// [`rms_norm`] in place.
pub(super) fn rms_norm_mut(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = rms_scale(x, eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = weight * (*x * scale);
    }
}

/// Not a number where the squares overflow: scaled by 0, such a row would look like one that says nothing about any token.
fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let squares = SumSquare::new(x).dispatch();
    if squares.is_finite() { 1.0 / (squares / x.len() as f32 + eps).sqrt() } else { f32::NAN }
}

/// `out = silu(gate) · up`.
pub(super) fn gated_silu(
    gate_up: &[f32], // [2, intermediate_size]
    out: &mut [f32], // [intermediate_size]
) {
    let (gate, up) = gate_up.split_at(out.len());
    out.copy_from_slice(gate);
    Silu {}.map_mut(out);
    for (out, up) in out.iter_mut().zip(up) {
        *out *= up;
    }
}

/// Turns the pairs `(i, i + head_dim / 2)` of one head, as transformers' `rotate_half`.
pub(super) fn rotate(
    head: &mut [f32],   // [head_dim]
    turns: &[[f32; 2]], // [head_dim / 2]: cosine and sine
) {
    let (low, high) = head.split_at_mut(turns.len());
    for ((low, high), [cos, sin]) in low.iter_mut().zip(high).zip(turns) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}
