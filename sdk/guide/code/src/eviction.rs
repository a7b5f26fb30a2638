//! Eviction and windows.

use trellis_guest::{Context, Positions, Result, Sampler, SlidingWindow};

// ANCHOR: window
/// Writes on in a window: the first four tokens stay, of the others the last ones.
pub fn endless(context: &Context, sampler: &Sampler, n_tokens: u32) -> Result<u32> {
    let window = SlidingWindow::new(4, 64);
    let mut n_written = 0;
    while n_written < n_tokens {
        window.make_room(context, 16)?;
        n_written += context.generate(sampler).stop_tokens(&[]).max_tokens(16).run()?.tokens.len() as u32;
    }
    Ok(n_written)
}
// ANCHOR_END: window

// ANCHOR: least
/// Takes out the token that the last one attends to least (TOVA: Oren and others, "Transformers are Multi-State RNNs", 2024).
pub fn evict_least(context: &Context) -> Result {
    let layers: Vec<u32> = (0..context.model().info().n_layers).collect();
    let attention = context.attention(&layers)?;
    // The last token stays in any case.
    let seen = &attention[..attention.len() - 1];
    let least = (0..seen.len()).min_by(|&a, &b| seen[a].total_cmp(&seen[b]));
    let Some(least) = least else { return Ok(()) };
    context.evict(least as u32, least as u32 + 1, Positions::Keep)
}
// ANCHOR_END: least

#[cfg(test)]
mod tests {
    use super::*;
    use crate::begun;
    use trellis_guest::usage;

    #[test]
    fn a_window_holds_what_it_may_and_computes_each_token_once() -> Result {
        let context = begun("Once upon a time")?;
        let n_prompt = u64::from(context.length());
        let n_written = endless(&context, &Sampler::seeded(7).build()?, 320)?;
        assert!(context.length() <= 64, "{}", context.length());
        // The last one that is left before a call is asked anew.
        assert!(usage().tokens.used <= n_prompt + u64::from(n_written) + 20, "{:?}", usage().tokens);
        Ok(())
    }

    #[test]
    fn one_token_goes() -> Result {
        let context = begun("Once upon a time there was a king")?;
        let before = context.tokens();
        evict_least(&context)?;
        let after = context.tokens();
        assert_eq!(after.len(), before.len() - 1);
        assert_eq!(after.last(), before.last());
        Ok(())
    }
}
