//! How GGUF files store elements, and how blocks of quantised ones become numbers again. Layouts and formulas:
//! `ggml-common.h` and `ggml-quants.c` of ggml-org/ggml; every operation is rounded to `f32`, as there.

use half::f16;

use super::super::checkpoint::Dtype;

/// Elements of the longest block.
pub(in super::super) const BLOCK_LEN_MAX: usize = 256;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Encoding {
    /// One by one.
    Plain(Dtype),
    /// 32 of 4 bits, with one scale.
    Q4_0,
    /// 32 of 8 bits, with one scale.
    Q8_0,
    /// 256 of 4 bits: eight scales and minima of 6 bits.
    Q4K,
    /// 256 of 6 bits: 16 scales of 8 bits.
    Q6K,
}

/// Names by the numbers of `ggml_type`, of those that there ever were.
const NAMES: [&str; 40] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "Q4_2",
    "Q4_3",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "BF16",
    "Q4_0_4_4",
    "Q4_0_4_8",
    "Q4_0_8_8",
    "TQ1_0",
    "TQ2_0",
    "IQ4_NL_4_4",
    "IQ4_NL_4_8",
    "IQ4_NL_8_8",
    "MXFP4",
];

/// The types that are read, for errors.
pub(super) const READ: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_K or Q6_K";

/// The name of a `ggml_type`.
pub(super) fn type_name(type_id: u32) -> String {
    NAMES.get(type_id as usize).map_or_else(|| format!("type {type_id}"), |name| (*name).to_owned())
}

impl Encoding {
    /// By the number of a `ggml_type`; `None` for those that are not read.
    pub(super) fn of(type_id: u32) -> Option<Self> {
        Some(match type_id {
            0 => Self::Plain(Dtype::F32),
            1 => Self::Plain(Dtype::F16),
            2 => Self::Q4_0,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            14 => Self::Q6K,
            30 => Self::Plain(Dtype::Bf16),
            _ => return None,
        })
    }

    /// The name for people.
    pub(in super::super) fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Q4_0 => "Q4_0",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// The type that its elements are read in, which holds each of them exactly.
    pub(in super::super) fn read_dtype(self) -> Dtype {
        match self {
            Self::Plain(dtype) => dtype,
            _ => Dtype::F32,
        }
    }

    /// The type that they are loaded in unless another one is asked for. What is quantised is farther from what was trained than
    /// its bf16 is from it, and the activations beside bf16 weights do not overflow.
    pub(in super::super) fn loaded_dtype(self) -> Dtype {
        match self {
            Self::Plain(dtype) => dtype,
            _ => Dtype::Bf16,
        }
    }

    /// Elements that are stored together.
    pub(in super::super) fn block_len(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Q4_0 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes that they take.
    pub(in super::super) fn block_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.n_bytes(),
            Self::Q4_0 => 2 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4K => 2 + 2 + 12 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// The elements of one block; `bytes` and `out` are as long as one. What is stored one by one is not quantised.
    pub(in super::super) fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::Plain(_) => unreachable!("it is read as it is stored"),
            Self::Q4_0 => q4_0(bytes, out),
            Self::Q8_0 => q8_0(bytes, out),
            Self::Q4K => q4_k(bytes, out),
            Self::Q6K => q6_k(bytes, out),
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn q4_0(bytes: &[u8], out: &mut [f32]) {
    let scale = half_at(bytes, 0);
    let (low, high) = out.split_at_mut(16);
    for ((byte, low), high) in bytes[2..].iter().zip(low).zip(high) {
        *low = (f32::from(byte & 15) - 8.0) * scale;
        *high = (f32::from(byte >> 4) - 8.0) * scale;
    }
}

fn q8_0(bytes: &[u8], out: &mut [f32]) {
    let scale = half_at(bytes, 0);
    for (byte, out) in bytes[2..].iter().zip(out) {
        *out = f32::from(*byte as i8) * scale;
    }
}

/// Scale, minimum and their factors: `d · scale · q − dmin · min`, for 32 elements each.
fn q4_k(bytes: &[u8], out: &mut [f32]) {
    let (d, d_min) = (half_at(bytes, 0), half_at(bytes, 2));
    let (packed, quants) = bytes[4..].split_at(12);
    // Six bits each: of the last four, the upper two are those of the first eight bytes.
    let scale_and_min = |idx: usize| match idx {
        0..4 => (packed[idx] & 63, packed[idx + 4] & 63),
        _ => (
            packed[idx + 4] & 15 | (packed[idx - 4] >> 6) << 4,
            packed[idx + 4] >> 4 | (packed[idx] >> 6) << 4,
        ),
    };
    for (pair_idx, (out, quants)) in out.chunks_exact_mut(64).zip(quants.chunks_exact(32)).enumerate() {
        let (low, high) = out.split_at_mut(32);
        for (half, (out, shift)) in [(low, 0), (high, 4)].into_iter().enumerate() {
            let (scale, min) = scale_and_min(2 * pair_idx + half);
            let (scale, min) = (d * f32::from(scale), d_min * f32::from(min));
            for (out, quant) in out.iter_mut().zip(quants) {
                *out = scale * f32::from(quant >> shift & 15) - min;
            }
        }
    }
}

/// `d · scale · (q − 32)`, for 16 elements each.
fn q6_k(bytes: &[u8], out: &mut [f32]) {
    let (low, rest) = bytes.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(16);
    let d = half_at(d, 0);
    for half in 0..2 {
        let (low, high) = (&low[64 * half..][..64], &high[32 * half..][..32]);
        for quarter in 0..4 {
            let out = &mut out[128 * half + 32 * quarter..][..32];
            // The first two quarters are lower halves of bytes, the others the upper ones.
            let (low, shift) = (&low[32 * (quarter % 2)..][..32], 4 * (quarter / 2));
            for (idx, out) in out.iter_mut().enumerate() {
                let quant = low[idx] >> shift & 15 | (high[idx] >> (2 * quarter) & 3) << 4;
                let scale = scales[8 * half + 2 * quarter + idx / 16] as i8;
                *out = d * f32::from(scale) * (f32::from(quant) - 32.0);
            }
        }
    }
}
