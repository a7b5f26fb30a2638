//! Contexts that go on for ever.

use crate::{Context, Positions, Result};

/// The first tokens of a context and its last ones: all that is kept of it (G. Xiao and others, "Efficient Streaming Language
/// Models with Attention Sinks", ICLR 2024, arXiv 2309.17453). Heads give what attention they do not need to the first tokens,
/// so that a model goes on well without those in the middle, and badly without the first.
///
/// ```no_run
/// # use trellis_guest::{Context, Result, Sampler, SlidingWindow};
/// # fn f(context: &Context, sampler: &Sampler) -> Result<()> {
/// let window = SlidingWindow::new(4, 256);
/// loop {
///     window.make_room(context, 16)?;
///     if context.generate(sampler).max_tokens(16).emit().run()?.is_finished() {
///         break Ok(());
///     }
/// }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    n_sinks: u32,
    n_tokens: u32,
}

impl SlidingWindow {
    /// Of `n_tokens` tokens, the first `n_sinks` of the context among them: four are enough for most models.
    ///
    /// # Panics
    /// There are no more tokens than sinks.
    pub fn new(n_sinks: u32, n_tokens: u32) -> Self {
        assert!(n_sinks < n_tokens, "a window of {n_tokens} tokens, {n_sinks} of which are sinks");
        Self { n_sinks, n_tokens }
    }

    /// Evicts the oldest tokens that are no sinks until `n_more` fit into the window; returns how many those were. Positions
    /// close up. The last token stays in any case.
    ///
    /// # Errors
    /// As [`Context::evict`].
    pub fn make_room(&self, context: &Context, n_more: u32) -> Result<u32> {
        let n_over = self.n_over(context.length(), n_more);
        if n_over > 0 {
            context.evict(self.n_sinks, self.n_sinks + n_over, Positions::CloseUp)?;
        }
        Ok(n_over)
    }

    fn n_over(&self, length: u32, n_more: u32) -> u32 {
        let n_over = length.saturating_add(n_more).saturating_sub(self.n_tokens);
        n_over.min(length.saturating_sub(self.n_sinks + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_goes_but_for_sinks_and_the_last() {
        let window = SlidingWindow::new(4, 20);
        for (length, n_more, n_over) in
            [(0, 1, 0), (19, 1, 0), (20, 1, 1), (20, 16, 15), (20, 100, 15), (5, 100, 0), (300, 1, 281)]
        {
            assert_eq!(window.n_over(length, n_more), n_over, "{length} and {n_more} more");
        }
    }
}
