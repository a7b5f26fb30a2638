//! Weights that are not trained but generated: any range of them can be had at once, and no file holds them.

use super::checkpoint::Dtype;

/// Bytes that are a pure function of their offset. Elements begin at multiples of their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generated {
    /// Independent values, symmetric around 0, with a standard deviation of 0.019.
    ///
    /// Sign, mantissa and lowest bit of the exponent are random, the rest of the exponent is not: magnitudes are
    /// uniform in 2^-7..2^-6 and in 2^-6..2^-5, and finite in every type at the cost of one mask.
    Random {
        /// Type of the elements.
        dtype: Dtype,
        /// Tells models of the same shape apart.
        seed: u64,
    },
    /// The number one, again and again.
    Ones {
        /// Type of the elements.
        dtype: Dtype,
    },
}

const WORD_BYTES: usize = 8;

impl Generated {
    /// Fills `out` with the bytes from `offset` on.
    pub(crate) fn fill(self, out: &mut [u8], offset: u64) {
        match self {
            Self::Random { dtype, seed } => {
                let (random_bits, fixed_bits) = match dtype {
                    Dtype::F32 => (0x80ff_ffff_80ff_ffff, 0x3c00_0000_3c00_0000),
                    Dtype::F16 => (0x87ff_87ff_87ff_87ff, 0x2000_2000_2000_2000),
                    Dtype::Bf16 => (0x80ff_80ff_80ff_80ff, 0x3c00_3c00_3c00_3c00),
                };
                let start = mix(seed);
                fill(out, offset, |idx| {
                    let state = start.wrapping_add(idx.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    mix(state) & random_bits | fixed_bits
                });
            }
            Self::Ones { dtype } => {
                let word = match dtype {
                    Dtype::F32 => 0x3f80_0000_3f80_0000,
                    Dtype::F16 => 0x3c00_3c00_3c00_3c00,
                    Dtype::Bf16 => 0x3f80_3f80_3f80_3f80,
                };
                fill(out, offset, |_| word);
            }
        }
    }
}

/// Fills `out` with little-endian words, of which the first may be cut at its beginning and the last at its end.
fn fill(out: &mut [u8], offset: u64, word: impl Fn(u64) -> u64) {
    let first_idx = offset / WORD_BYTES as u64;
    let n_skipped = (offset % WORD_BYTES as u64) as usize;
    let n_head = if n_skipped == 0 { 0 } else { out.len().min(WORD_BYTES - n_skipped) };
    let (head, rest) = out.split_at_mut(n_head);
    head.copy_from_slice(&word(first_idx).to_le_bytes()[n_skipped..n_skipped + n_head]);
    let (words, tail) = rest.as_chunks_mut::<WORD_BYTES>();
    let mut idx = first_idx + u64::from(n_skipped > 0);
    for bytes in words {
        *bytes = word(idx).to_le_bytes();
        idx += 1;
    }
    tail.copy_from_slice(&word(idx).to_le_bytes()[..tail.len()]);
}

/// The output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    #[test]
    fn any_cut_gives_the_same_bytes() {
        for dtype in DTYPES {
            for generated in [Generated::Random { dtype, seed: 3 }, Generated::Ones { dtype }] {
                let mut whole = [0; 80];
                generated.fill(&mut whole, 1 << 40);
                for start in 0..20 {
                    for len in 0..30 {
                        let mut part = [0; 30];
                        generated.fill(&mut part[..len], (1 << 40) + start as u64);
                        assert_eq!(part[..len], whole[start..start + len], "{generated:?} {start} {len}");
                    }
                }
            }
        }
    }

    #[test]
    fn seeds_give_unrelated_bytes() {
        let bytes = |seed| {
            let mut bytes = vec![0; 1 << 16];
            Generated::Random { dtype: Dtype::Bf16, seed }.fill(&mut bytes, 0);
            bytes
        };
        let (a, b) = (bytes(1), bytes(2));
        // Of 16 bits 9 are random.
        let n_equal = a.chunks(2).zip(b.chunks(2)).filter(|(a, b)| a == b).count();
        assert!(n_equal < 200, "{n_equal} of {} values are equal; 64 are to be expected", a.len() / 2);
        // No stream is another one further on.
        let starts: Vec<&[u8]> = a.chunks(8).collect();
        assert!(b.chunks(8).take(64).all(|word| starts.iter().filter(|start| **start == word).count() <= 1));
    }
}
