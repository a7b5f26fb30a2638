//! Whether guessing pays, and how far to guess: from how long tokens took with guesses and without.
//!
//! Tokens are drawn without guesses at first, then with some for a few rounds. The faster way goes on; guesses that lost
//! are tried again after a while, each time four times as long.

use std::time::Duration;

/// Tokens without guesses at the beginning, to see how long they take.
const N_PLAIN_FIRST: usize = 8;
/// Rounds with guesses in a trial, and those after which one ends in which nothing was right.
const N_TRIAL_ROUNDS: usize = 4;
const N_VAIN_ROUNDS: usize = 2;
/// Tokens of a guess in a trial.
const N_TRIAL_GUESS: usize = 4;
/// Tokens without guesses after a trial that lost, at first and at most.
const N_PLAIN_MIN: usize = 64;
const N_PLAIN_MAX: usize = 1 << 12;
/// Tokens with guesses after which some without are timed again: the load may have changed.
const N_GUESSED_MAX: usize = 1024;
/// What guesses have to save in a trial, and what they may cost later: times are not told apart more finely.
const TRIAL_SHARE: f64 = 0.95;
const KEEP_SHARE: f64 = 0.98;
/// The share of a new time in a running mean.
const WEIGHT: f64 = 0.125;

/// A running mean of nanoseconds or shares.
#[derive(Clone, Copy, Debug, Default)]
struct Mean(Option<f64>);

impl Mean {
    fn add(&mut self, value: f64, weight: f64) {
        self.0 = Some(self.0.map_or(value, |mean| mean + weight * (value - mean)));
    }
}

/// How a stream's tokens come.
#[derive(Debug)]
pub(super) struct Pace {
    state: State,
    /// Of a token without guesses, and with.
    plain: Mean,
    guessed: Mean,
    /// Of a guessed token, and of a verification.
    guess: Mean,
    verification: Mean,
    /// Guessed tokens that were right, of those that were looked at.
    right: Mean,
    /// Tokens without guesses after the next trial that loses.
    n_plain_next: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Plain { n_left: usize },
    Trial { n_rounds: usize, n_right: usize },
    Guessing { n_tokens: usize },
}

/// A round with guesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// Tokens that were guessed, and those of them that were right.
    pub(super) n_guessed: usize,
    pub(super) n_right: usize,
    /// What guessing and verifying took.
    pub(super) guessing: Duration,
    pub(super) verifying: Duration,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            state: State::Plain { n_left: N_PLAIN_FIRST },
            plain: Mean::default(),
            guessed: Mean::default(),
            guess: Mean::default(),
            verification: Mean::default(),
            right: Mean::default(),
            n_plain_next: N_PLAIN_MIN,
        }
    }

    /// Whether to guess now, if there is something to guess.
    pub(super) fn guesses(&self) -> bool {
        !matches!(self.state, State::Plain { n_left } if n_left > 0)
    }

    /// How many tokens to guess, of a source that takes as long as it did.
    pub(super) fn depth(&self, n_max: usize) -> usize {
        let State::Guessing { .. } = self.state else { return n_max.min(N_TRIAL_GUESS) };
        let (Some(right), Some(guess), Some(verification)) =
            (self.right.0, self.guess.0, self.verification.0)
        else {
            return n_max.min(N_TRIAL_GUESS);
        };
        let rate = |n: usize| {
            let n_tokens: f64 = (0..=n as i32).map(|i| right.powi(i)).sum();
            n_tokens / (guess * n as f64 + verification)
        };
        (1..=n_max.max(1)).max_by(|&a, &b| rate(a).total_cmp(&rate(b))).unwrap_or(1)
    }

    /// A token came without guesses.
    pub(super) fn note_plain(&mut self, took: Duration) {
        self.plain.add(took.as_nanos() as f64, WEIGHT);
        if let State::Plain { n_left } = &mut self.state {
            *n_left = n_left.saturating_sub(1);
        }
    }

    /// A round with guesses came to its end.
    pub(super) fn note_round(&mut self, round: Round) {
        let Round { n_guessed, n_right, guessing, verifying } = round;
        let n_tokens = n_right + 1;
        let per_token = (guessing + verifying).as_nanos() as f64 / n_tokens as f64;
        // In a trial the mean of its rounds, later the latest.
        let weight = match self.state {
            State::Trial { n_rounds, .. } => 1.0 / (n_rounds + 1) as f64,
            _ => WEIGHT,
        };
        self.guessed.add(per_token, weight);
        self.verification.add(verifying.as_nanos() as f64, weight);
        if n_guessed > 0 {
            self.guess.add(guessing.as_nanos() as f64 / n_guessed as f64, weight);
            let n_looked_at = n_guessed.min(n_right + 1);
            self.right.add(n_right as f64 / n_looked_at as f64, weight);
        }
        let costs = |share: f64| match (self.guessed.0, self.plain.0) {
            (Some(guessed), Some(plain)) => guessed > share * plain,
            _ => false,
        };
        self.state = match self.state {
            State::Plain { .. } => self.after_trial_round(1, n_right, costs(TRIAL_SHARE)),
            State::Trial { n_rounds, n_right: n_before } => {
                self.after_trial_round(n_rounds + 1, n_before + n_right, costs(TRIAL_SHARE))
            }
            State::Guessing { .. } if costs(KEEP_SHARE) => self.lose(),
            State::Guessing { n_tokens: n_before } if n_before + n_tokens > N_GUESSED_MAX => {
                self.n_plain_next = N_PLAIN_MIN;
                self.plain = Mean::default();
                State::Plain { n_left: N_PLAIN_FIRST }
            }
            State::Guessing { n_tokens: n_before } => State::Guessing { n_tokens: n_before + n_tokens },
        };
    }

    fn after_trial_round(&mut self, n_rounds: usize, n_right: usize, costs: bool) -> State {
        let is_vain = n_rounds >= N_VAIN_ROUNDS && n_right == 0;
        match n_rounds >= N_TRIAL_ROUNDS {
            _ if is_vain => self.lose(),
            false => State::Trial { n_rounds, n_right },
            true if costs => self.lose(),
            true => State::Guessing { n_tokens: 0 },
        }
    }

    fn lose(&mut self) -> State {
        let n_left = self.n_plain_next;
        self.n_plain_next = (4 * n_left).min(N_PLAIN_MAX);
        (self.guessed, self.right) = (Mean::default(), Mean::default());
        State::Plain { n_left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    /// Draws so many tokens, where plain ones take `plain` µs, a verification `verification`, a guessed token `guess`, and
    /// each guess is right if `is_right` says so of its place. Returns what all took, and the rounds.
    fn draw(
        pace: &mut Pace,
        n_tokens: usize,
        [plain, verification, guess]: [u64; 3],
        is_right: impl Fn(usize) -> bool,
    ) -> (u64, usize) {
        let (mut n, mut us, mut n_rounds) = (0, 0, 0);
        while n < n_tokens {
            if !pace.guesses() {
                pace.note_plain(US(plain));
                (n, us) = (n + 1, us + plain);
                continue;
            }
            let n_guessed = pace.depth(15);
            let n_right = (0..n_guessed).take_while(|i| is_right(n + i)).count();
            let guessing = guess * n_guessed as u64;
            pace.note_round(Round {
                n_guessed,
                n_right,
                guessing: US(guessing),
                verifying: US(verification),
            });
            (n, us, n_rounds) = (n + n_right + 1, us + guessing + verification, n_rounds + 1);
        }
        (us, n_rounds)
    }

    #[test]
    fn guesses_that_are_wrong_cost_little() {
        let mut pace = Pace::new();
        let (us, n_rounds) = draw(&mut pace, 2000, [1000, 1300, 100], |_| false);
        assert!(us <= 2_000_000 * 102 / 100, "{us}");
        assert!((2..=10).contains(&n_rounds), "{n_rounds}");
    }

    #[test]
    fn guesses_that_are_right_save_what_they_can() {
        let mut pace = Pace::new();
        // Of an eighth of its target's cost.
        let (us, _) = draw(&mut pace, 2000, [1000, 1100, 125], |_| true);
        assert!(us <= 2_000_000 / 4, "{us}");
        // Now half of them are right: it goes on, less far ahead.
        let (us, _) = draw(&mut pace, 2000, [1000, 1100, 125], |place| place * 2_654_435_761 % 7 < 4);
        assert!(us <= 2_000_000 * 95 / 100, "{us}");
        assert!(pace.depth(15) <= 4, "{}", pace.depth(15));
        // They stop to be: it ends.
        let (us, _) = draw(&mut pace, 4000, [1000, 1100, 125], |_| false);
        assert!(us <= 4_000_000 * 102 / 100, "{us}");
    }

    #[test]
    fn whoever_never_waits_for_a_token_needs_no_guesses() {
        let mut pace = Pace::new();
        let (_, n_rounds) = draw(&mut pace, 1000, [1, 1100, 125], |_| true);
        assert!(n_rounds <= 12, "{n_rounds}");
    }
}
