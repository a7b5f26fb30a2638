//! What a guest does, drawn from a seed, together with what it is to send: worked out with the naive model alone, while the
//! script is drawn.

use std::time::Duration;

use super::draws::Draws;
use super::naive::{self, state_after};
use super::scene::{N_POSITIONS, salt};

type Tokens = Vec<u32>;

/// One deed. Contexts are named by the order in which they were made.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Create {
        tokens: Tokens,
    },
    Append {
        at: usize,
        tokens: Tokens,
    },
    Fork {
        at: usize,
    },
    Truncate {
        at: usize,
        n_kept: usize,
    },
    Close {
        at: usize,
    },
    Prefill {
        at: usize,
    },
    /// Draws a token for each, together.
    Sample {
        ats: Vec<usize>,
        seed: u64,
    },
    /// Draws tokens ahead, and takes so many.
    Pull {
        at: usize,
        seed: u64,
        n: usize,
        is_bounded: bool,
        ahead_of_all: bool,
    },
    Scores {
        at: usize,
        tokens: Tokens,
    },
    Continuation {
        at: usize,
        tokens: Tokens,
    },
    Top {
        at: usize,
        n: usize,
    },
    Verify {
        at: usize,
        seed: u64,
        guess: Tokens,
    },
    /// A context of the tokens that belong to this name is saved under it.
    Save {
        name: usize,
    },
    /// Such a context is opened, or made where none is saved.
    Open {
        name: usize,
    },
    /// Asks, and drops the question after this time.
    Forsake {
        at: usize,
        after: Duration,
    },
    Pause {
        time: Duration,
    },
    /// Waits for a message and sends it back.
    Receive,
    Text {
        n_bytes: usize,
    },
}

/// What a guest does and sends.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) ops: Vec<Op>,
    /// What each op sends.
    pub(super) outputs: Vec<Vec<Tokens>>,
    /// The tokens of all contexts after each op.
    pub(super) lengths: Vec<Vec<Option<Tokens>>>,
    pub(super) n_messages: usize,
    /// After how many polls it is dropped where it waits.
    pub(super) killed_after: Option<usize>,
}

/// Bytes of a long text, at least.
const LONG_TEXT_BYTES: usize = 6_000;

/// Names under which contexts are saved.
pub(super) const N_NAMES: usize = 3;

/// The name.
pub(super) fn saved_name(name: usize) -> String {
    format!("saved {name}")
}

/// The tokens of the context of this name.
pub(super) fn saved_tokens(name: usize) -> Tokens {
    Draws::of(name as u64, 77).tokens(9 + 14 * name)
}

/// What a guest tells of floats.
pub(super) fn bits(values: impl IntoIterator<Item = f32>) -> Tokens {
    values.into_iter().map(f32::to_bits).collect()
}

/// The text that a client sends.
pub(super) fn message(n: usize) -> String {
    format!("message {n}")
}

struct Drafting<'a> {
    draws: &'a mut Draws,
    salt: u64,
    contexts: Vec<Option<Tokens>>,
    n_messages: usize,
    hears: bool,
}

impl Script {
    /// The script that a guest is told to follow, on this model: by a seed, and if it is to go on alone by how many long texts it
    /// sends at last.
    pub(super) fn told(arguments: &[String], model: usize) -> Option<Self> {
        let mut numbers = arguments.iter().map(|argument| argument.parse::<u64>().ok());
        let seed = numbers.next()??;
        match numbers.next() {
            None => Some(Self::of(seed, model, true)),
            Some(n_texts) => Some(Self::alone(seed, model, usize::try_from(n_texts?).ok()?)),
        }
    }

    /// The script of a seed, on this model.
    pub(super) fn of(seed: u64, model: usize, hears: bool) -> Self {
        let draws = &mut Draws::of(seed, 1);
        let killed_after = draws.happens(60).then(|| draws.between(1, 40));
        let n_ops = draws.between(2, 14);
        let mut drafting = Drafting { draws, salt: salt(model), contexts: Vec::new(), n_messages: 0, hears };
        let (mut ops, mut outputs, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..n_ops {
            let (op, sent) = drafting.draft();
            ops.push(op);
            outputs.push(sent);
            lengths.push(drafting.contexts.clone());
        }
        Self { ops, outputs, lengths, n_messages: drafting.n_messages, killed_after }
    }

    /// As [`Self::of`], of a guest that nobody sends messages, with so many long texts at the end.
    pub(super) fn alone(seed: u64, model: usize, n_texts: usize) -> Self {
        let mut script = Self::of(seed, model, false);
        let lengths = script.lengths.last().cloned().unwrap_or_default();
        for n in 0..n_texts {
            let n_bytes = LONG_TEXT_BYTES + n;
            script.ops.push(Op::Text { n_bytes });
            script.outputs.push(vec![vec![u32::from(b'x'); n_bytes]]);
            script.lengths.push(lengths.clone());
        }
        script
    }

    /// All that is sent, in order.
    pub(super) fn sent(&self) -> impl Iterator<Item = &Tokens> {
        self.outputs.iter().flatten()
    }
}

impl Drafting<'_> {
    fn draft(&mut self) -> (Op, Vec<Tokens>) {
        let open: Vec<usize> = (0..self.contexts.len()).filter(|&at| self.contexts[at].is_some()).collect();
        if open.is_empty() || self.draws.happens(80) {
            return (self.create(), Vec::new());
        }
        let at = self.draws.pick(&open);
        let tokens = self.contexts[at].clone().expect("it is open");
        let n_free = N_POSITIONS - tokens.len();
        let is_empty = tokens.is_empty();
        match self.draws.below(20) {
            0 => {
                let tokens = self.some_tokens(n_free);
                self.context(at).extend_from_slice(&tokens);
                (Op::Append { at, tokens }, Vec::new())
            }
            1 | 2 => {
                self.contexts.push(Some(tokens));
                (Op::Fork { at }, Vec::new())
            }
            3 => {
                let n_kept = self.draws.between(0, tokens.len());
                self.context(at).truncate(n_kept);
                (Op::Truncate { at, n_kept }, Vec::new())
            }
            4 if open.len() > 1 => {
                self.contexts[at] = None;
                (Op::Close { at }, Vec::new())
            }
            5 => (Op::Prefill { at }, Vec::new()),
            6..=8 if !is_empty && n_free > 0 => self.sample(&open),
            9..=11 if !is_empty && n_free > 0 => self.pull(at, n_free),
            12 if !is_empty => {
                let asked = self.draws.tokens(3);
                let state = state_after(self.salt, &tokens);
                let sent = bits(asked.iter().map(|&token| naive::score(state, token)));
                (Op::Scores { at, tokens: asked }, vec![sent])
            }
            13 if !is_empty && n_free > 0 => {
                let asked = self.some_tokens(n_free.min(20));
                let mut all = tokens;
                let mut scores = Vec::new();
                for &token in &asked {
                    scores.push(naive::score(state_after(self.salt, &all), token));
                    all.push(token);
                }
                (Op::Continuation { at, tokens: asked }, vec![bits(scores)])
            }
            14 if !is_empty => {
                let n = self.draws.between(1, 5);
                let top = naive::top(state_after(self.salt, &tokens), n);
                (Op::Top { at, n }, vec![top.iter().map(|candidate| candidate.token).collect()])
            }
            15 if !is_empty && n_free > 4 => {
                let seed = self.draws.number() % 5;
                // Right for as long as the dice say.
                let mut guess = naive::verified(self.salt, &tokens, &[], seed);
                let more = self.draws.tokens(2);
                guess.extend_from_slice(&more);
                if self.draws.happens(300) {
                    guess[0] = (guess[0] + 1) % naive::VOCAB as u32;
                }
                let drawn = naive::verified(self.salt, &tokens, &guess, seed);
                self.context(at).extend_from_slice(&drawn);
                (Op::Verify { at, seed, guess }, vec![drawn])
            }
            16 => {
                let name = self.draws.below(N_NAMES);
                if self.draws.happens(500) {
                    (Op::Save { name }, Vec::new())
                } else {
                    self.contexts.push(Some(saved_tokens(name)));
                    (Op::Open { name }, Vec::new())
                }
            }
            17 if !is_empty => {
                let after = Duration::from_millis(self.draws.below(12) as u64);
                (Op::Forsake { at, after }, Vec::new())
            }
            18 if self.hears => {
                self.n_messages += 1;
                let text = message(self.n_messages - 1);
                (Op::Receive, vec![text.bytes().map(u32::from).collect()])
            }
            19 if self.draws.happens(100) => {
                let n_bytes = self.draws.between(1, 6_000);
                (Op::Text { n_bytes }, vec![vec![u32::from(b'x'); n_bytes]])
            }
            _ => (Op::Pause { time: Duration::from_millis(self.draws.below(20) as u64) }, Vec::new()),
        }
    }

    fn context(&mut self, at: usize) -> &mut Tokens {
        self.contexts[at].as_mut().expect("it is open")
    }

    fn some_tokens(&mut self, n_free: usize) -> Tokens {
        let n = self.draws.between(0, n_free.min(40));
        self.draws.tokens(n)
    }

    fn create(&mut self) -> Op {
        // Some begin alike, so that the prefix cache has something to do.
        let tokens = match self.draws.happens(400) {
            true => {
                let mut tokens = saved_tokens(2);
                tokens.truncate(self.draws.between(1, 37));
                tokens
            }
            false => self.some_tokens(40),
        };
        self.contexts.push(Some(tokens.clone()));
        Op::Create { tokens }
    }

    fn sample(&mut self, open: &[usize]) -> (Op, Vec<Tokens>) {
        let fits = |tokens: &Option<Tokens>| {
            tokens.as_ref().is_some_and(|tokens| !tokens.is_empty() && tokens.len() < N_POSITIONS)
        };
        let mut ats: Vec<usize> = open.iter().copied().filter(|&at| fits(&self.contexts[at])).collect();
        ats.truncate(self.draws.between(1, 4));
        let seed = self.draws.number() % 5;
        let mut sent = Vec::new();
        for &at in &ats {
            let salt = self.salt;
            let tokens = self.context(at);
            let token = naive::drawn(state_after(salt, tokens), seed).token;
            tokens.push(token);
            sent.push(vec![token]);
        }
        (Op::Sample { ats, seed }, sent)
    }

    fn pull(&mut self, at: usize, n_free: usize) -> (Op, Vec<Tokens>) {
        let n = self.draws.between(1, n_free.min(24));
        let (seed, salt) = (self.draws.number() % 5, self.salt);
        let mut sent = Vec::new();
        for _ in 0..n {
            let tokens = self.context(at);
            let token = naive::drawn(state_after(salt, tokens), seed).token;
            tokens.push(token);
            sent.push(vec![token]);
        }
        let (is_bounded, ahead_of_all) = (self.draws.happens(500), self.draws.happens(300));
        (Op::Pull { at, seed, n, is_bounded, ahead_of_all }, sent)
    }
}
