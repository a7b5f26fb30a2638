//! Beams.

use trellis_guest::{Context, Finished, Kept, Result};

// ANCHOR: whole
/// The three best continuations that a search with eight beams finds.
pub fn best(prompt: &Context) -> Result<Vec<Finished>> {
    prompt.beams(8).length_penalty(0.6).max_tokens(24).run(3)
}
// ANCHOR_END: whole

// ANCHOR: stepped
/// The same, where hypotheses are dropped that have fallen so many nats behind the best.
pub fn pruned(prompt: &Context, n_nats: f32) -> Result<Vec<Finished>> {
    let search = prompt.beams(8).length_penalty(0.6).max_tokens(24).open()?;
    loop {
        let live = search.step()?;
        let Some(best) = live.iter().map(|one| one.logprob).max_by(f32::total_cmp) else { break };
        let near = live.iter().enumerate().filter(|(_, one)| one.logprob > best - n_nats);
        search.keep(near.map(|(idx, one)| Kept::live(idx, one.logprob)))?;
    }
    Ok(search.best(3))
}
// ANCHOR_END: stepped

#[cfg(test)]
mod tests {
    use super::*;
    use crate::begun;
    use trellis_guest::usage;

    // ANCHOR: same
    #[test]
    fn pruning_saves_and_a_wide_margin_prunes_nothing() -> Result {
        let prompt = begun("Once upon a time")?;
        prompt.prefill()?;
        let computed = || usage().tokens.used;
        let before = computed();
        let whole = best(&prompt)?;
        let of_whole = computed() - before;
        assert_eq!(pruned(&prompt, 1e9)?, whole);
        let before = computed();
        pruned(&prompt, 2.0)?;
        assert!(computed() - before < of_whole);
        Ok(())
    }
    // ANCHOR_END: same

    #[test]
    fn the_best_comes_first() -> Result {
        let found = best(&begun("Once upon a time")?)?;
        assert_eq!(found.len(), 3);
        assert!(found.windows(2).all(|pair| pair[0].score >= pair[1].score));
        Ok(())
    }
}
