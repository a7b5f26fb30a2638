//! Rotary position embedding: angle of pair `i` at position `p` is `p * inverse_frequencies[i]`.

use std::f32::consts::TAU;

use super::config::{RopeConfig, RopeScaling};

/// The angle by which each pair of a head turns from one position to the next: `[head_dim / 2]`, in radians.
///
/// Pairs are `(i, i + head_dim / 2)`, as transformers stores the weights. Every step is rounded to `f32`
/// where `modeling_rope_utils.py` of transformers computes in `f32`. The factor on the attention scores is 1
/// for all forms.
pub fn inverse_frequencies(rope: &RopeConfig, head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|pair_idx| {
            let exponent = (2 * pair_idx) as f32 / head_dim as f32;
            // In f64 and then rounded, so that no platform's powf shows.
            let wavelength = (rope.theta as f32 as f64).powf(exponent as f64) as f32; // over 2 pi
            scale(1.0 / wavelength, pair_idx, &rope.scaling)
        })
        .collect()
}

fn scale(frequency: f32, pair_idx: usize, scaling: &RopeScaling) -> f32 {
    match *scaling {
        // The base of the dynamic form is the unscaled one up to `max_position_embeddings`.
        RopeScaling::Default | RopeScaling::Dynamic { .. } => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Divided { ref divisors } => frequency / divisors[pair_idx],
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_n_positions } => {
            let n_positions = original_n_positions as f64;
            let wavelength = frequency.recip() * TAU; // a quotient of scalar and tensor in torch
            if wavelength > (n_positions / low_freq_factor) as f32 {
                frequency / factor as f32
            } else if wavelength < (n_positions / high_freq_factor) as f32 {
                frequency
            } else {
                let smooth = (wavelength.recip() * n_positions as f32 - low_freq_factor as f32)
                    / (high_freq_factor - low_freq_factor) as f32;
                (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values come from a transcription of transformers' formulas into Python that rounds to binary32
    /// after each operation; one unit in the last place is left for the order of the roundings.
    fn assert_frequencies(rope: RopeConfig, head_dim: usize, expected: &[(usize, f32)]) {
        let frequencies = inverse_frequencies(&rope, head_dim);
        assert_eq!(frequencies.len(), head_dim / 2);
        for &(pair_idx, expected) in expected {
            let found = frequencies[pair_idx];
            let diff = (found - expected).abs();
            assert!(diff <= expected * f32::EPSILON, "pair {pair_idx}: {found} instead of {expected}");
        }
    }

    const DEFAULT_64: [(usize, f32); 6] = [
        (0, 1.0),
        (1, 0.749_894_2),
        (2, 0.562_341_33),
        (15, 0.013_335_215),
        (16, 0.01),
        (31, 0.000_133_352_15),
    ];

    #[test]
    fn default_form() {
        let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default };
        assert_frequencies(rope, 64, &DEFAULT_64);
    }

    #[test]
    fn dynamic_form_is_unscaled_up_to_the_trained_length() {
        let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Dynamic { factor: 4.0 } };
        assert_frequencies(rope, 64, &DEFAULT_64);
    }

    #[test]
    fn linear_form() {
        let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Linear { factor: 4.0 } };
        let expected = [(0, 0.25), (1, 0.187_473_55), (2, 0.140_585_33), (31, 3.333_803_8e-5)];
        assert_frequencies(rope, 64, &expected);
    }

    #[test]
    fn divided_form() {
        let divisors = (0..32).map(|pair_idx| if pair_idx < 16 { 1.0 } else { 4.0 }).collect();
        let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Divided { divisors } };
        assert_frequencies(rope, 64, &[(0, 1.0), (15, 0.013_335_215), (16, 0.0025), (31, 3.333_803_8e-5)]);
    }

    #[test]
    fn llama3_form_of_llama_3_1_8b() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_n_positions: 8192,
        };
        let expected = [
            (0, 1.0),
            (1, 0.814_617_2),
            (20, 0.016_560_44),
            (28, 0.003_211_446),
            (29, 0.002_166_570_6),
            (31, 0.000_856_751_46),
            (34, 0.000_178_507_79),
            (35, 9.556_212e-5),
            (36, 7.784_655_5e-5),
            (63, 3.068_926e-7),
        ];
        assert_frequencies(RopeConfig { theta: 500_000.0, scaling }, 128, &expected);
    }

    #[test]
    fn llama3_form_of_llama_3_2_1b() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_n_positions: 8192,
        };
        let expected = [
            (1, 0.663_601_3),
            (14, 0.003_211_446),
            (15, 0.001_290_548),
            (16, 0.000_429_556_7),
            (17, 9.708_286e-5),
            (18, 1.946_163_9e-5),
            (31, 9.418_306_5e-8),
        ];
        assert_frequencies(RopeConfig { theta: 500_000.0, scaling }, 64, &expected);
    }
}
