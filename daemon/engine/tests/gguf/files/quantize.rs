//! Numbers to blocks of each type. Simpler than llama.cpp's quantiser: scales are those of the largest value, not of the least error.

use half::{bf16, f16};

/// A type that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// 32 bits.
    F32,
    /// 16 bits.
    F16,
    /// 16 bits, with the range of f32.
    Bf16,
    /// Blocks of 32, of 8 bits.
    Q8_0,
    /// Blocks of 32, of 4 bits.
    Q4_0,
    /// Blocks of 256, of 4 bits.
    Q4K,
    /// Blocks of 256, of 6 bits.
    Q6K,
}

impl Type {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0, Self::Q4K, Self::Q6K];

    /// As the format names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// The number of its `ggml_type`.
    #[must_use]
    pub fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 30,
            Self::Q8_0 => 8,
            Self::Q4_0 => 2,
            Self::Q4K => 12,
            Self::Q6K => 14,
        }
    }

    /// The bytes of numbers, of which there are whole blocks.
    #[must_use]
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let blocks = |len: usize, encode: fn(&[f32]) -> Vec<u8>| -> Vec<u8> {
            assert!(values.len().is_multiple_of(len), "whole blocks");
            values.chunks_exact(len).flat_map(encode).collect()
        };
        match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
            Self::Q8_0 => blocks(32, q8_0),
            Self::Q4_0 => blocks(32, q4_0),
            Self::Q4K => blocks(256, q4_k),
            Self::Q6K => blocks(256, q6_k),
        }
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()))
}

/// Rounded, in `low..=high`; of nothing, nothing.
fn level(value: f32, scale: f32, low: f32, high: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { (value / scale).round().clamp(low, high) }
}

fn q8_0(values: &[f32]) -> Vec<u8> {
    let scale = f16::from_f32(largest(values) / 127.0);
    let levels = values.iter().map(|value| level(*value, scale.to_f32(), -127.0, 127.0) as i8 as u8);
    scale.to_le_bytes().into_iter().chain(levels).collect()
}

fn q4_0(values: &[f32]) -> Vec<u8> {
    // The largest one is the lowest level, which has no counterpart above zero.
    let extreme = values.iter().copied().fold(0.0, |a: f32, b| if b.abs() > a.abs() { b } else { a });
    let scale = f16::from_f32(extreme / -8.0);
    let levels: Vec<u8> =
        values.iter().map(|value| (level(*value, scale.to_f32(), -8.0, 7.0) + 8.0) as u8).collect();
    let (low, high) = levels.split_at(16);
    let pairs = low.iter().zip(high).map(|(low, high)| low | high << 4);
    scale.to_le_bytes().into_iter().chain(pairs).collect()
}

fn q4_k(values: &[f32]) -> Vec<u8> {
    let ranges: Vec<(f32, f32)> = values
        .chunks_exact(32)
        .map(|part| {
            let low = part.iter().copied().fold(0.0, f32::min);
            ((part.iter().copied().fold(low, f32::max) - low) / 15.0, -low)
        })
        .collect();
    let most = |of: fn(&(f32, f32)) -> f32| f16::from_f32(ranges.iter().map(of).fold(0.0, f32::max) / 63.0);
    let (d, d_min) = (most(|range| range.0), most(|range| range.1));
    let scales: Vec<u8> = ranges.iter().map(|range| level(range.0, d.to_f32(), 0.0, 63.0) as u8).collect();
    let mins: Vec<u8> = ranges.iter().map(|range| level(range.1, d_min.to_f32(), 0.0, 63.0) as u8).collect();
    let levels: Vec<u8> = values
        .iter()
        .enumerate()
        .map(|(idx, value)| {
            let (scale, min) =
                (d.to_f32() * f32::from(scales[idx / 32]), d_min.to_f32() * f32::from(mins[idx / 32]));
            level(value + min, scale, 0.0, 15.0) as u8
        })
        .collect();
    let mut packed = [0; 12];
    for idx in 0..4 {
        packed[idx] = scales[idx] | (scales[idx + 4] >> 4) << 6;
        packed[idx + 4] = mins[idx] | (mins[idx + 4] >> 4) << 6;
        packed[idx + 8] = scales[idx + 4] & 15 | (mins[idx + 4] & 15) << 4;
    }
    let mut bytes = [d.to_le_bytes(), d_min.to_le_bytes()].concat();
    bytes.extend(packed);
    for pair in levels.chunks_exact(64) {
        bytes.extend((0..32).map(|idx| pair[idx] | pair[idx + 32] << 4));
    }
    bytes
}

fn q6_k(values: &[f32]) -> Vec<u8> {
    let ranges: Vec<f32> = values.chunks_exact(16).map(|part| largest(part) / 31.0).collect();
    let d = f16::from_f32(largest(&ranges) / 127.0);
    let scales: Vec<u8> = ranges.iter().map(|range| level(*range, d.to_f32(), 0.0, 127.0) as u8).collect();
    let levels: Vec<u8> = values
        .iter()
        .enumerate()
        .map(|(idx, value)| {
            (level(*value, d.to_f32() * f32::from(scales[idx / 16]), -32.0, 31.0) + 32.0) as u8
        })
        .collect();
    let (mut low, mut high) = (Vec::new(), Vec::new());
    for half in levels.chunks_exact(128) {
        low.extend((0..64).map(|idx| half[idx] & 15 | (half[idx + 64] & 15) << 4));
        high.extend(
            (0..32)
                .map(|idx| (0..4).map(|quarter| half[idx + 32 * quarter] >> 4 << (2 * quarter)).sum::<u8>()),
        );
    }
    [low, high, scales, d.to_le_bytes().to_vec()].concat()
}
