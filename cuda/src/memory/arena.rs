//! One piece of memory for all that a step needs, laid out once from when each tensor is in use.

/// Tensors start at multiples of this: a line of the L2 twice over, and more than any kernel asks for.
const ALIGNMENT: usize = 256;

/// A tensor of a step. Uses are numbered in the order in which a step runs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// What it is, for messages.
    pub(crate) name: &'static str,
    /// Its length.
    pub(crate) n_bytes: usize,
    /// The use that writes it first.
    pub(crate) first_use: usize,
    /// The use that reads it last; from the next one on, other tensors may lie where it was.
    pub(crate) last_use: usize,
}

/// Where tensors lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorLayout {
    /// Start of each tensor, in the order in which they were given.
    pub(crate) offsets: Vec<usize>,
    /// Length of the whole.
    pub(crate) n_bytes: usize,
}

impl TensorLayout {
    /// Lays out tensors so that those in use at the same time do not overlap.
    ///
    /// Greedy by size: the longest first, each into the smallest gap that holds it between those already laid that
    /// live at the same time, or behind them (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
    /// Inference", 2020, arXiv 2001.03288, algorithm 3; TFLite's `greedy_by_size_assignment.cc`).
    ///
    /// # Panics
    /// A tensor's last use is before its first.
    pub(crate) fn of(tensors: &[Tensor]) -> Self {
        for tensor in tensors {
            let Tensor { name, first_use, last_use, .. } = tensor;
            assert!(first_use <= last_use, "{name} is used from {first_use} to {last_use}");
        }
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&idx| (std::cmp::Reverse(tensors[idx].n_bytes), tensors[idx].first_use, idx));
        let mut offsets = vec![0; tensors.len()];
        let mut laid: Vec<usize> = Vec::new(); // ordered by offset
        let mut n_bytes = 0;
        for idx in order {
            let tensor = &tensors[idx];
            let neighbours = laid.iter().filter(|&&other| is_alive_with(tensor, &tensors[other]));
            let ends = neighbours.map(|&other| (offsets[other], offsets[other] + padded(&tensors[other])));
            let offset = place(padded(tensor), ends);
            offsets[idx] = offset;
            n_bytes = n_bytes.max(offset + padded(tensor));
            let position = laid.partition_point(|&other| offsets[other] <= offset);
            laid.insert(position, idx);
        }
        Self { offsets, n_bytes }
    }
}

/// The start of the smallest gap between ranges (start, end), ordered by start, that holds `n_bytes`.
fn place(n_bytes: usize, ranges: impl Iterator<Item = (usize, usize)>) -> usize {
    let mut best: Option<(usize, usize)> = None; // gap, offset
    let mut end = 0;
    for (start, next_end) in ranges {
        // Ranges of tensors that are never in use together may overlap one another.
        let gap = start.saturating_sub(end);
        if gap >= n_bytes && best.is_none_or(|(best_gap, _)| gap < best_gap) {
            best = Some((gap, end));
        }
        end = end.max(next_end);
    }
    best.map_or(end, |(_, offset)| offset)
}

fn padded(tensor: &Tensor) -> usize {
    tensor.n_bytes.next_multiple_of(ALIGNMENT)
}

fn is_alive_with(a: &Tensor, b: &Tensor) -> bool {
    a.first_use <= b.last_use && b.first_use <= a.last_use
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    fn tensor(n_bytes: usize, first_use: usize, last_use: usize) -> Tensor {
        Tensor { name: "a test", n_bytes, first_use, last_use }
    }

    /// The most bytes in use at a time, below which no layout can be.
    fn peak(tensors: &[Tensor]) -> usize {
        let end = tensors.iter().map(|tensor| tensor.last_use + 1).max().unwrap_or(0);
        let at = |time| tensors.iter().filter(move |t| (t.first_use..=t.last_use).contains(&time));
        (0..end).map(|time| at(time).map(padded).sum()).max().unwrap_or(0)
    }

    fn check(tensors: &[Tensor]) -> TensorLayout {
        let layout = TensorLayout::of(tensors);
        assert_eq!(layout.offsets.len(), tensors.len());
        for (idx, a) in tensors.iter().enumerate() {
            let start = layout.offsets[idx];
            assert!(start.is_multiple_of(ALIGNMENT), "{a:?} at {start}");
            assert!(start + a.n_bytes <= layout.n_bytes, "{a:?} at {start} of {}", layout.n_bytes);
            for (other, b) in tensors.iter().enumerate().skip(idx + 1) {
                let other_start = layout.offsets[other];
                let is_apart = start + a.n_bytes <= other_start || other_start + b.n_bytes <= start;
                assert!(is_apart || !is_alive_with(a, b), "{a:?} at {start}, {b:?} at {other_start}");
            }
        }
        assert!(layout.n_bytes <= tensors.iter().map(padded).sum());
        assert!(layout.n_bytes >= peak(tensors));
        layout
    }

    #[test]
    fn a_chain_takes_two_places() {
        let chain: Vec<Tensor> = (0..10).map(|idx| tensor(1000, idx, idx + 1)).collect();
        assert_eq!(check(&chain).n_bytes, 2048);
    }

    #[test]
    fn tensors_in_use_together_lie_apart() {
        let layout = check(&[tensor(100, 0, 3), tensor(300, 1, 2), tensor(200, 3, 3)]);
        assert_eq!(layout, TensorLayout { offsets: vec![512, 0, 0], n_bytes: 768 });
    }

    #[test]
    fn the_smallest_gap_is_taken() {
        // At time 5, gaps of 2048 and 1024 bytes are where others were before.
        let tensors = [
            tensor(4096, 0, 9), // at 0
            tensor(2048, 0, 3),
            tensor(1536, 0, 9),
            tensor(1024, 0, 3),
            tensor(768, 0, 9),
            tensor(512, 5, 9),
        ];
        let layout = check(&tensors);
        assert_eq!(layout.offsets, [0, 4096, 6144, 7680, 8704, 7680]);
        assert_eq!(layout.n_bytes, peak(&tensors));
    }

    #[test]
    fn nothing_and_empty_tensors_take_nothing() {
        assert_eq!(check(&[]).n_bytes, 0);
        assert_eq!(check(&[tensor(0, 0, 0), tensor(0, 0, 1)]).n_bytes, 0);
    }

    #[test]
    fn random_tensors_never_overlap() {
        let mut random = Random(21);
        let (mut laid, mut least) = (0, 0);
        for _ in 0..500 {
            let n = 1 + random.below(60);
            let tensors: Vec<Tensor> = (0..n)
                .map(|_| {
                    let first_use = random.below(30);
                    let (size, life) = (1 + random.below(20), 1 + random.below(4));
                    tensor(random.below(1 << size), first_use, first_use + random.below(1 << life))
                })
                .collect();
            laid += check(&tensors).n_bytes;
            least += peak(&tensors);
        }
        // On average the greedy order comes close to what no order can beat.
        assert!(10 * laid <= 11 * least, "{laid} bytes, {least} at least");
    }
}
