//! What work costs, in nanoseconds of the device, learnt from how long steps took.
//!
//! A step is taken to last as long as its decode rows alone would, and longer by every token of a prompt. Both are
//! running means of what was seen, so that they follow the device, the model, and how long contexts are.

mod decode;

pub(super) use self::decode::{DecodeTimes, Grain, Look};

/// The share of a new measurement in a running mean.
const WEIGHT: f64 = 0.125;

/// Before anything was measured, a step with decode rows takes one part in so many of a full step's prompt tokens.
const SHARE_UNMEASURED: usize = 8;

/// A step has room for this share of a full step's prompt tokens at least.
const SHARE_LEAST: usize = 64;

/// What is besides decode rows and prompts is taken to be at most this share of a step: its cost is a rule of thumb.
const SHARE_BESIDE_MOST: f64 = 0.5;

/// Steps with prompts in a row before one is left without.
const N_STEPS_MIXED: usize = 64;

/// A page of tokens that is brought for a draw: the host puts them into what a step brings.
const HISTORY_PAGE_NS: u64 = 40;

/// A page that is looked up in the prefix cache: its tokens are hashed.
const FOUND_BLOCK_NS: u64 = 400;

/// What a step computed, as far as its length depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepWork {
    /// Rows of one token; one for each token of a verification.
    pub(super) n_decode_rows: usize,
    /// Tokens of longer rows, and rows of logits beyond one for each row, in tokens.
    pub(super) n_prompt_tokens: usize,
    /// What rows without tokens ask of the head, in tokens.
    pub(super) n_head_tokens: usize,
    /// What programs read to draw, what decode rows ask beside their draws, and what is added to steered tokens, in thousandths
    /// of a token.
    pub(super) n_thousandths_beside: u64,
    /// Pages that are read beside the attention of rows, over all layers.
    pub(super) n_pages_beside: u64,
    /// Rows with steered tokens.
    pub(super) n_steered_rows: usize,
    /// What those take beside the additions, in nanoseconds.
    pub(super) steering_ns: u64,
}

impl StepWork {
    /// What it has besides decode rows and prompts, in tokens.
    fn n_tokens_beside(&self) -> f64 {
        self.n_head_tokens as f64 + self.n_thousandths_beside as f64 / 1000.0
    }
}

/// How long steps take.
#[derive(Debug)]
pub(super) struct Costs {
    decode: DecodeTimes,
    decode_fine: DecodeTimes,
    /// Tokens of prompts lately, and what they added to their steps. Long chunks weigh more than short ones.
    n_tokens: f64,
    added_ns: f64,
    /// Decode rows of the last step that had any.
    n_decode_rows: usize,
    /// Rows with steered tokens of the last step that had any.
    n_steered_rows: usize,
    /// The weights, in pages: every step reads them once. 0 where that is not known.
    weight_pages: f64,
    /// Pages that a decode row reads, lately.
    row_pages: f64,
    /// Steps with decode rows since one was without prompts.
    n_steps_mixed: usize,
}

impl Default for Costs {
    fn default() -> Self {
        Self::new(0.0)
    }
}

impl Costs {
    /// Of a model whose weights are as many bytes as so many pages; 0 if that is not known.
    pub(super) fn new(weight_pages: f64) -> Self {
        Self {
            decode: DecodeTimes::new(Grain::Coarse),
            decode_fine: DecodeTimes::new(Grain::Fine),
            n_tokens: 0.0,
            added_ns: 0.0,
            n_decode_rows: 1,
            n_steered_rows: 1,
            weight_pages,
            row_pages: 0.0,
            n_steps_mixed: N_STEPS_MIXED,
        }
    }

    /// Learns from a step that took so long.
    pub(super) fn learn(&mut self, work: StepWork, elapsed_ns: u64) {
        // Neither decoding nor prompts are to blame for it.
        let (elapsed, beside_ns) = (elapsed_ns as f64, self.beside_ns(work));
        let elapsed = elapsed - beside_ns.min(elapsed * SHARE_BESIDE_MOST);
        if work.n_decode_rows > 0 {
            self.n_decode_rows = work.n_decode_rows;
        }
        if work.n_steered_rows > 0 {
            self.n_steered_rows = work.n_steered_rows;
        }
        if work.n_prompt_tokens == 0 {
            if work.n_decode_rows > 0 {
                self.decode.learn(work.n_decode_rows, elapsed);
                self.decode_fine.learn(work.n_decode_rows, elapsed);
                self.n_steps_mixed = 0;
            }
            return;
        }
        self.n_steps_mixed += usize::from(work.n_decode_rows > 0);
        // Without it a short chunk would be blamed for what every step takes.
        let Some(alone) = self.decode.ns(work.n_decode_rows) else { return };
        self.n_tokens += WEIGHT * (work.n_prompt_tokens as f64 - self.n_tokens);
        self.added_ns += WEIGHT * (elapsed - alone - self.added_ns);
    }

    fn token_ns(&self) -> Option<f64> {
        (self.n_tokens > 0.0).then(|| (self.added_ns / self.n_tokens).max(0.0))
    }

    /// How long a step will take.
    pub(super) fn step_ns(&self, work: StepWork) -> Option<u64> {
        let decoding = match work.n_decode_rows {
            0 => 0.0,
            n_rows => self.decode.ns(n_rows)?,
        };
        let of_prompts = self.token_ns().unwrap_or(0.0) * work.n_prompt_tokens as f64;
        Some((decoding + of_prompts + self.beside_ns(work)) as u64)
    }

    /// What a step has besides decode rows and prompts.
    pub(super) fn beside_ns(&self, work: StepWork) -> f64 {
        let of_tokens = self.token_ns().unwrap_or(0.0) * work.n_tokens_beside();
        of_tokens + self.page_ns() * work.n_pages_beside as f64 + work.steering_ns as f64
    }

    /// How long a page takes to be read over all layers: a step of decode rows takes as long as what it reads. 0 where it is
    /// not known what the weights take of that.
    fn page_ns(&self) -> f64 {
        let n_pages = self.weight_pages + self.n_decode_rows as f64 * self.row_pages;
        let is_known = self.weight_pages > 0.0;
        self.decode.ns(self.n_decode_rows).filter(|_| is_known).map_or(0.0, |alone| alone / n_pages)
    }

    /// Pages that are read beside the attention of rows, over all layers.
    pub(super) fn pages_ns(&self, n_pages: u64) -> u64 {
        (self.page_ns() * n_pages as f64) as u64
    }

    /// Whether a step without prompts is due, to see how long those take by now.
    pub(super) fn is_decode_alone_due(&self) -> bool {
        self.n_steps_mixed >= N_STEPS_MIXED
    }

    /// How long steps of nothing but decode rows take.
    pub(super) fn decode(&mut self, grain: Grain) -> &mut DecodeTimes {
        match grain {
            Grain::Coarse => &mut self.decode,
            Grain::Fine => &mut self.decode_fine,
        }
    }

    /// Decode rows of the last step that had any.
    pub(super) fn n_decode_rows(&self) -> usize {
        self.n_decode_rows
    }

    /// The share of a row of what all steered rows of a step take together.
    pub(super) fn steered_row_ns(&self, step_ns: u64) -> u64 {
        step_ns / self.n_steered_rows as u64
    }

    /// The share of its step of a decode row that reads so many pages. A step takes as long as what it reads: the weights
    /// for all rows together, and the pages of each.
    pub(super) fn decode_row_ns(&mut self, n_pages: usize) -> u64 {
        let (alone, n_rows) = (self.decode.ns(self.n_decode_rows).unwrap_or(0.0), self.n_decode_rows as f64);
        self.row_pages += WEIGHT / n_rows * (n_pages as f64 - self.row_pages);
        let of_weights = self.weight_pages / n_rows;
        let part = match of_weights > 0.0 {
            true => (of_weights + n_pages as f64) / (of_weights + self.row_pages),
            false => 1.0,
        };
        (alone / n_rows * part) as u64 + 1
    }

    /// Tokens of prompts.
    pub(super) fn tokens_ns(&self, n_tokens: usize) -> u64 {
        (self.token_ns().unwrap_or(0.0) * n_tokens as f64) as u64 + n_tokens as u64
    }

    /// What programs read and what is asked beside draws, in thousandths of a token.
    pub(super) fn thousandths_ns(&self, n_thousandths: u64) -> u64 {
        (self.token_ns().unwrap_or(0.0) * n_thousandths as f64 / 1000.0) as u64
    }

    /// So many pages found in the prefix cache.
    pub(super) fn found_ns(n_blocks: usize) -> u64 {
        FOUND_BLOCK_NS * n_blocks as u64
    }

    /// So many pages of tokens brought for draws.
    pub(super) fn histories_ns(n_pages: usize) -> u64 {
        HISTORY_PAGE_NS * n_pages as u64
    }

    /// How long a step of so many decode rows may last, when it may last `multiple` times as long as without prompts.
    pub(super) fn target_ns(&self, n_decode_rows: usize, multiple: f64) -> Option<u64> {
        self.decode.ns(n_decode_rows).map(|alone| (alone * multiple) as u64)
    }

    /// Tokens of prompts that a step has room for that may last so long.
    pub(super) fn n_tokens_within(&self, ns: u64, n_step_tokens: usize) -> usize {
        let n_tokens = match self.token_ns() {
            Some(token) if token > 0.0 => (ns as f64 / token) as usize,
            Some(_) => n_step_tokens,
            None => n_step_tokens / SHARE_UNMEASURED,
        };
        n_tokens.clamp((n_step_tokens / SHARE_LEAST).max(1), n_step_tokens)
    }

    /// Tokens of prompts that a step of so many decode rows has room for.
    pub(super) fn n_prompt_tokens(&self, n_decode_rows: usize, multiple: f64, n_step_tokens: usize) -> usize {
        let n_tokens = match (self.decode.ns(n_decode_rows), self.token_ns()) {
            (Some(alone), Some(token)) if token > 0.0 => (alone * (multiple - 1.0) / token) as usize,
            (Some(_), Some(_)) => n_step_tokens,
            _ => n_step_tokens / SHARE_UNMEASURED,
        };
        // A prompt gets on whatever was measured.
        n_tokens.clamp((n_step_tokens / SHARE_LEAST).max(1), n_step_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_get_what_the_target_leaves() {
        let mut costs = Costs::default();
        assert_eq!(costs.n_prompt_tokens(32, 1.6, 2048), 256, "nothing is known yet");
        // 6.4 ms for 32 rows, 25 µs for a token of a prompt.
        for _ in 0..50 {
            costs.learn(StepWork { n_decode_rows: 32, n_prompt_tokens: 0, ..StepWork::default() }, 6_400_000);
            costs.learn(
                StepWork { n_decode_rows: 32, n_prompt_tokens: 100, ..StepWork::default() },
                8_900_000,
            );
        }
        let n_tokens = costs.n_prompt_tokens(32, 1.6, 2048);
        assert!((150..=156).contains(&n_tokens), "{n_tokens}");
        assert_eq!(costs.n_prompt_tokens(32, 100.0, 2048), 2048);
        assert_eq!(costs.n_prompt_tokens(32, 1.0, 2048), 32);
        let row = costs.decode_row_ns(1);
        assert!((199_000..=201_000).contains(&row), "{row}");
        // Prompts become costlier, as they do with long contexts; half as many fit.
        for _ in 0..100 {
            costs.learn(
                StepWork { n_decode_rows: 32, n_prompt_tokens: 100, ..StepWork::default() },
                11_400_000,
            );
        }
        let n_tokens = costs.n_prompt_tokens(32, 1.6, 2048);
        assert!((74..=79).contains(&n_tokens), "{n_tokens}");
    }

    #[test]
    fn a_row_pays_for_the_pages_that_it_reads() {
        let mut costs = Costs::new(640.0);
        for _ in 0..50 {
            costs.learn(StepWork { n_decode_rows: 32, n_prompt_tokens: 0, ..StepWork::default() }, 6_400_000);
        }
        // 31 short contexts, and one that is as long as the weights and all of those together.
        let mut sums = [0, 0];
        for _ in 0..1000 {
            let long = costs.decode_row_ns(950);
            let short: u64 = (0..31).map(|_| costs.decode_row_ns(10)).sum();
            sums = [long, short];
        }
        let all = sums[0] + sums[1];
        assert!((5_800_000..7_000_000).contains(&all), "{sums:?}");
        assert!((0.48..0.54).contains(&(sums[0] as f64 / all as f64)), "{sums:?}");
    }

    #[test]
    fn rows_that_are_plain_do_not_pay_for_programs_beside_them() {
        let mut costs = Costs::default();
        let plain = StepWork { n_decode_rows: 32, ..StepWork::default() };
        let with_prompt = StepWork { n_prompt_tokens: 100, ..plain };
        // 10 µs for a token; programs that read as much as 200 of them.
        let with_programs = StepWork { n_thousandths_beside: 200_000, ..plain };
        costs.learn(plain, 4_000_000);
        (0..50).for_each(|_| costs.learn(with_prompt, 5_000_000));
        assert_eq!(costs.step_ns(with_programs), Some(6_000_000));
        (0..50).for_each(|_| costs.learn(with_programs, 6_000_000));
        let row = costs.decode_row_ns(1);
        assert!((124_000..=126_000).contains(&row), "{row}");
        assert_eq!(costs.thousandths_ns(200_000), 2_000_000);
    }

    #[test]
    fn a_step_that_took_no_longer_than_without_prompts_does_no_harm() {
        let mut costs = Costs::default();
        costs.learn(StepWork { n_decode_rows: 1, n_prompt_tokens: 0, ..StepWork::default() }, 1_000);
        costs.learn(StepWork { n_decode_rows: 1, n_prompt_tokens: 50, ..StepWork::default() }, 900);
        assert_eq!(costs.n_prompt_tokens(1, 1.5, 64), 64);
        assert_eq!(costs.tokens_ns(10), 10);
        // Where a step takes its time whatever is in it, short chunks do not look costly.
        for _ in 0..100 {
            costs.learn(StepWork { n_decode_rows: 0, n_prompt_tokens: 1, ..StepWork::default() }, 1_000);
        }
        assert_eq!(costs.n_prompt_tokens(1, 1.5, 64), 64);
    }
}
