//! What models need of a device, whether they fit it together, and what they begin with. How much of the KV memory each has
//! later follows what guests ask: that is the engine's.

/// What a model needs of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Weights, and memory for steps.
    pub(crate) fixed_bytes: u64,
    /// Of that the weights.
    pub(crate) weight_bytes: u64,
    /// One KV page.
    pub(crate) page_bytes: u64,
    /// Pages that get their memory together.
    pub(crate) n_granule_pages: usize,
    /// Pages of the longest context, the least that it works with.
    pub(crate) n_pages_min: usize,
    /// KV memory beyond which it has no use for more, in bytes.
    pub(crate) kv_bytes_most: u64,
}

impl Needs {
    /// The least KV memory, in whole granules.
    pub(crate) fn kv_bytes_min(&self) -> u64 {
        self.n_pages_least() as u64 * self.page_bytes
    }

    /// Pages of the least KV memory.
    pub(crate) fn n_pages_least(&self) -> usize {
        self.n_pages_min.next_multiple_of(self.n_granule_pages)
    }

    /// As these, with so many pages and neither more nor less. They are whole granules.
    pub(crate) fn with_just(self, n_pages: usize) -> Self {
        Self { n_pages_min: n_pages, kv_bytes_most: n_pages as u64 * self.page_bytes, ..self }
    }

    /// Pages in so many bytes, in whole granules.
    fn n_pages(&self, kv_bytes: u64) -> usize {
        let n_pages = usize::try_from(kv_bytes / self.page_bytes).unwrap_or(usize::MAX);
        n_pages / self.n_granule_pages * self.n_granule_pages
    }
}

/// Pages for each of these models to begin with, out of so many bytes of KV memory: even shares in bytes, but for each no
/// less than it needs and no more than it has use for. `None` if what they need does not fit.
pub(crate) fn divide(kv_bytes: u64, models: &[Needs]) -> Option<Vec<usize>> {
    let least: u64 = models.iter().map(Needs::kv_bytes_min).sum();
    let mut rest = kv_bytes.checked_sub(least)?;
    let mut shares: Vec<u64> = models.iter().map(Needs::kv_bytes_min).collect();
    // The smallest shares are filled up to the next one, as water fills a vessel, until all is given out.
    while rest > 0 {
        let is_open = |idx: &usize| shares[*idx] < models[*idx].kv_bytes_most;
        let open: Vec<usize> = (0..models.len()).filter(is_open).collect();
        let Some(lowest) = open.iter().map(|&idx| shares[idx]).min() else { break };
        let at_lowest: Vec<usize> = open.iter().copied().filter(|&idx| shares[idx] == lowest).collect();
        let above = open.iter().map(|&idx| shares[idx]).filter(|&share| share > lowest).min();
        let most = at_lowest.iter().map(|&idx| models[idx].kv_bytes_most).min().expect("one is the lowest");
        let level = above.unwrap_or(u64::MAX).min(most);
        let each = (level - lowest).min(rest / at_lowest.len() as u64);
        if each == 0 {
            break;
        }
        at_lowest.iter().for_each(|&idx| shares[idx] += each);
        rest -= each * at_lowest.len() as u64;
    }
    Some(models.iter().zip(shares).map(|(needs, share)| needs.n_pages(share)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(page_bytes: u64, n_pages_min: usize, kv_bytes_most: u64) -> Needs {
        Needs { fixed_bytes: 0, weight_bytes: 0, page_bytes, n_granule_pages: 4, n_pages_min, kv_bytes_most }
    }

    #[test]
    fn shares_are_even_within_what_each_needs_and_can_use() {
        let any = u64::MAX;
        type Case = (u64, Vec<Needs>, Option<Vec<usize>>);
        let cases: Vec<Case> = vec![
            (1000, vec![needs(10, 1, any)], Some(vec![100])),
            (1000, vec![needs(10, 1, any), needs(5, 1, any)], Some(vec![48, 100])),
            // One needs more than an even share.
            (1000, vec![needs(10, 80, any), needs(10, 1, any)], Some(vec![80, 20])),
            // One has use for less.
            (1000, vec![needs(10, 4, 200), needs(10, 1, any)], Some(vec![20, 80])),
            (1000, vec![needs(10, 4, 200), needs(10, 1, 300)], Some(vec![20, 28])),
            (1000, vec![needs(10, 60, any), needs(10, 40, any)], Some(vec![60, 40])),
            (1000, vec![needs(10, 60, any), needs(10, 41, any)], None),
            (1000, vec![], Some(vec![])),
        ];
        for (kv_bytes, models, shares) in cases {
            assert_eq!(divide(kv_bytes, &models), shares, "{kv_bytes} {models:?}");
        }
    }

    #[test]
    fn no_more_is_given_out_than_there_is() {
        for total in 0..400 {
            let models = [needs(7, 3, u64::MAX), needs(3, 5, 100), needs(1, 0, 50)];
            let Some(shares) = divide(total, &models) else { continue };
            let given: u64 = shares.iter().zip(&models).map(|(&n, needs)| n as u64 * needs.page_bytes).sum();
            assert!(given <= total, "{given} of {total}");
            assert!(shares.iter().zip(&models).all(|(&n, needs)| n >= needs.n_pages_min));
        }
    }
}
