//! eˣ and ln x, bit for bit the same on every device: one sequence of fused multiply-adds, which `program.cuh` of the CUDA
//! backend writes in the same words. Polynomials are minimax fits over the reduced range; eˣ is exact to 1 ulp where the
//! result is a normal number, ln x to 2 ulp.

use rten_simd::ops::{BitOps, IntOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp, SimdUnaryOp};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
const LN_2: f32 = std::f32::consts::LN_2;
/// ln 2 in two parts, the first with zeros enough that its product with a whole number up to 2⁸ is exact.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;
/// Added to a small number it rounds it to a whole one, which the last bits of the sum then hold.
const ROUNDS: f32 = 12_582_912.0; // 1.5 · 2²³
const ROUNDS_BITS: i32 = ROUNDS.to_bits() as i32;

/// (eʳ − 1 − r) / r² for |r| ≤ ln 2 / 2, the highest power first.
const EXP: [f32; 5] = [
    f32::from_bits(0x3ab5_121a),
    f32::from_bits(0x3c09_1cf1),
    f32::from_bits(0x3d2a_ac79),
    f32::from_bits(0x3e2a_aa49),
    f32::from_bits(0x3eff_fffe),
];

/// (ln(1 + f) − f) / f² for |f| ≤ 1/3, the highest power first.
const LOG: [f32; 9] = [
    -0.129_496_38,
    0.140_054_24,
    -0.121_670_11,
    0.140_010_36,
    -0.166_823_15,
    0.200_107_54,
    -0.249_997_17,
    0.333_332_1,
    -0.5,
];

/// Below it eˣ is 0, above it more than the largest number.
const EXP_RANGE: [f32; 2] = [-105.0, 89.0];

/// Bits of 2/3: a number is cut into m · 2ᵉ with m in [2/3, 4/3).
const TWO_THIRDS: i32 = 0x3f2a_aaab;

/// eˣ; the largest number where it is above that. `x` is not NaN.
pub(super) fn exp(x: f32) -> f32 {
    let x = x.clamp(EXP_RANGE[0], EXP_RANGE[1]);
    let shifted = x.mul_add(LOG2_E, ROUNDS);
    let n = shifted - ROUNDS;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let q = EXP.iter().fold(0.0, |q: f32, &c| q.mul_add(r, c));
    let y = q.mul_add(r * r, r) + 1.0;
    // 2ⁿ may not be a number by itself; its halves are.
    let n = shifted.to_bits() as i32 - ROUNDS_BITS;
    let half = n >> 1;
    (y * power_of_two(half) * power_of_two(n - half)).min(f32::MAX)
}

/// ln x; −∞ at 0 and NaN below. `x` is finite or −∞.
pub(super) fn log(x: f32) -> f32 {
    if x <= 0.0 {
        return if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    }
    let is_small = x < f32::MIN_POSITIVE;
    let (x, e0) = if is_small { (x * 8_388_608.0, -23.0) } else { (x, 0.0) };
    let bits = x.to_bits() as i32;
    let e = (bits - TWO_THIRDS) >> 23;
    let f = f32::from_bits((bits - (e << 23)) as u32) - 1.0;
    let q = LOG.iter().fold(0.0, |q: f32, &c| q.mul_add(f, c));
    let y = q.mul_add(f * f, f);
    (e as f32 + e0).mul_add(LN_2, y)
}

fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) << 23) as u32)
}

/// Parts of 1 in sums of exponentials, whose order then does not matter: 2¹⁸ weights of at most 1 stay below 2⁶³.
const PARTS: f32 = 35_184_372_088_832.0; // 2⁴⁵

/// A weight of at most 1 as a whole number of parts.
pub(super) fn parts(weight: f32) -> u64 {
    // Through a signed number, for which processors have an instruction.
    (weight * PARTS) as i64 as u64
}

/// A sum of parts as a number.
pub(super) fn of_parts(sum: u64) -> f32 {
    sum as f32 * (1.0 / PARTS)
}

/// The parts that make up a share of a sum: at least one, at most all. `sum` is not 0.
pub(super) fn share_of(share: f32, sum: u64) -> u64 {
    ((f64::from(share) * sum as f64).ceil() as u64).clamp(1, sum)
}

/// [`exp`] of each value.
pub(super) fn exp_all(values: &mut [f32]) {
    match IsFused.dispatch() {
        true => FusedExp.map_mut(values),
        false => values.iter_mut().for_each(|x| *x = exp(*x)),
    }
}

/// Whether the vector unit multiplies and adds in one rounding.
struct IsFused;

impl SimdOp for IsFused {
    type Output = bool;
    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> bool {
        let ops = isa.f32();
        let x = 1.0 + f32::EPSILON;
        let rest = ops.mul_add(ops.splat(x), ops.splat(x), ops.splat(-(x * x)));
        rest.to_array().into_iter().all(|rest| rest != 0.0)
    }
}

struct FusedExp;

impl SimdUnaryOp<f32> for FusedExp {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let (ops, ints) = (isa.f32(), isa.i32());
        let x = ops.clamp(x, ops.splat(EXP_RANGE[0]), ops.splat(EXP_RANGE[1]));
        let shifted = ops.mul_add(x, ops.splat(LOG2_E), ops.splat(ROUNDS));
        let n = ops.sub(shifted, ops.splat(ROUNDS));
        let r = ops.mul_add(n, ops.splat(-LN_2_HIGH), x);
        let r = ops.mul_add(n, ops.splat(-LN_2_LOW), r);
        let mut q = ops.splat(EXP[0]);
        q = ops.mul_add(q, r, ops.splat(EXP[1]));
        q = ops.mul_add(q, r, ops.splat(EXP[2]));
        q = ops.mul_add(q, r, ops.splat(EXP[3]));
        q = ops.mul_add(q, r, ops.splat(EXP[4]));
        let y = ops.add(ops.mul_add(q, ops.mul(r, r), r), ops.one());
        let n = ints.sub(shifted.reinterpret_cast::<I::I32>(), ints.splat(ROUNDS_BITS));
        // Without a shift that keeps the sign: an offset makes it a positive number first.
        let half = ints.sub(ints.shift_right::<1>(ints.add(n, ints.splat(1024))), ints.splat(512));
        let bias = ints.splat(127);
        let first = ints.shift_left::<23>(ints.add(half, bias));
        let second = ints.shift_left::<23>(ints.add(ints.sub(n, half), bias));
        let y = ops.mul(y, first.reinterpret_cast::<I::F32>());
        let y = ops.mul(y, second.reinterpret_cast::<I::F32>());
        ops.min(y, ops.splat(f32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in ulp of the exact value.
    fn ulps(value: f32, exact: f64) -> f64 {
        let near = exact as f32;
        let ulp = f64::from(near.abs().next_up()) - f64::from(near.abs());
        (f64::from(value) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_exact_to_an_ulp() {
        let mut worst = 0.0f64;
        let mut bits = 0u32;
        while let Some(next) = bits.checked_add(4099) {
            bits = next;
            let x = f32::from_bits(bits);
            if !x.is_finite() {
                continue;
            }
            let (y, exact) = (exp(x), f64::from(x).exp());
            if exact > f64::from(f32::MAX) {
                assert_eq!(y, f32::MAX, "exp({x})");
            } else if exact >= f64::from(f32::MIN_POSITIVE) {
                worst = worst.max(ulps(y, exact));
            } else {
                // Below the normal numbers another rounding may be added.
                assert!((f64::from(y) - exact).abs() <= 1.5 * 2f64.powi(-149), "exp({x}) = {y}");
            }
        }
        assert!(worst <= 1.0, "{worst} ulp");
        assert_eq!([exp(f32::NEG_INFINITY), exp(0.0), exp(f32::MAX)], [0.0, 1.0, f32::MAX]);
    }

    #[test]
    fn log_is_exact_to_two_ulps() {
        let mut worst = 0.0f64;
        for bits in (1..0x7f80_0000u32).step_by(2053) {
            let x = f32::from_bits(bits);
            worst = worst.max(ulps(log(x), f64::from(x).ln()));
        }
        for x in [1.0 - f32::EPSILON / 2.0, 1.0 + f32::EPSILON, 0.999, 1.001] {
            worst = worst.max(ulps(log(x), f64::from(x).ln()));
        }
        assert!(worst <= 2.0, "{worst} ulp");
        assert_eq!([log(0.0), log(1.0)], [f32::NEG_INFINITY, 0.0]);
        assert!(log(-1.0).is_nan() && log(f32::NEG_INFINITY).is_nan());
    }

    #[test]
    fn vectors_give_the_bits_of_single_numbers() {
        let mut values: Vec<f32> = (0..1 << 20).map(|i| f32::from_bits(i * 4093)).collect();
        values.retain(|x| !x.is_nan());
        let expected: Vec<u32> = values.iter().map(|&x| exp(x).to_bits()).collect();
        exp_all(&mut values);
        let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
        assert!(bits == expected);
    }
}
