//! Answers a question line by line as a Monte Carlo tree search: a search that comes back to where the model was less sure, as
//! long as that promises something (S. Hao and others, "Reasoning with Language Model is Planning with World Model", 2023).
//! How probable the average token of a line is says how much the line is tried (the prior of PUCT) and what it is worth.
//!
//! Of the paper this is the plan of the search: each round chooses lines from the question down to an end, and credits what it
//! finds to all lines on the way. There lines are chosen by UCT, and a line is credited with the largest mean of the rewards after
//! it; here they are chosen by PUCT (D. Silver and others, "Mastering the game of Go without human knowledge", 2017), a line is
//! credited with the mean reward of each whole path through it, and the answer is the end with the best mean. The model's
//! probability is the one of the paper's rewards that needs no prompt; it also asks the model whether a line is useful. Lines
//! are drawn anew where a search comes by more often (progressive widening: A. Couëtoux and others, "Continuous Upper Confidence
//! Trees", 2011).
//!
//! ```text
//! trellis run mcts "Think step by step: what is 468 + 275?"
//! trellis run mcts --rounds 8 --width 4 --temperature 2.5 --json "Add 468 and 275. Show your steps."
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Completion, Context, Model, Random, Result, Sampler, Token, emit, emit_json, generate_all,
    seed,
};

trellis_guest::main!(run);

const USAGE: &str = "mcts [--rounds N] [--width N] [--temperature T] [--max-tokens N] [--json] QUESTION";

/// The most tokens of a line.
const N_LINE_TOKENS: u32 = 32;

/// Draws lines that may come next: each with the context that ends with it, and none after an end.
type Draw<'a> = dyn FnMut(&Context) -> Result<Vec<(Context, Completion)>> + 'a;

struct Node {
    /// The question and all lines up to this one.
    context: Context,
    children: Vec<Self>,
    /// The probability of the average token of its line.
    reward: f64,
    n_visits: u32,
    /// The mean over the paths through it; at first its reward.
    value: f64,
}

#[derive(Serialize)]
struct Report {
    text: String,
    /// The mean over its lines: of each the probability of the average token; 0 where there was room for none.
    reward: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_rounds: u32 = args.option("--rounds")?.unwrap_or(4).max(1);
    let width = args.option("--width")?.unwrap_or(3).max(1);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(160).max(1);
    let question = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(&question))?;
    let n_before = context.length();
    let max_tokens = max_tokens.min(context.capacity() - n_before);
    let sampler = Sampler::seeded(0).temperature(temperature).build()?;
    let mut random = Random::new(seed());
    let mut draw = |context: &Context| {
        let tokens = context.tokens_from(n_before);
        let is_whole = tokens.last().is_some_and(|&token| model.is_stop(token));
        let n_left = if is_whole { 0 } else { max_tokens - tokens.len() as u32 };
        let forks = (0..width.min(n_left)).map(|_| context.fork()).collect::<Result<Vec<_>>>()?;
        let lines = generate_all(forks.iter().map(|fork| {
            fork.generate(&sampler).seed(random.bits()).stop_at("\n").max_tokens(n_left.min(N_LINE_TOKENS))
        }))?;
        Ok(forks.into_iter().zip(lines).collect())
    };
    let mut root = Node { context, children: Vec::new(), reward: 0.0, n_visits: 0, value: 0.0 };
    let ends = (0..n_rounds).map(|_| root.follow(&mut draw, &[])).collect::<Result<Vec<_>>>()?;
    let (reward, tokens) = ends.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there was a round");
    let text = model.decode(&tokens[n_before as usize..])?;
    if json { emit_json(&Report { text, reward }) } else { emit!("{text}\n") }
}

impl Node {
    /// Goes on from here to an end, after lines of these rewards; the mean reward of all, and the tokens.
    fn follow(&mut self, draw: &mut Draw, rewards: &[f64]) -> Result<(f64, Vec<Token>)> {
        let root_of_visits = f64::from(self.n_visits).sqrt();
        // With the first visit, the second, the fifth, and so on. What is there already is not added again.
        let drawn = if root_of_visits.fract() == 0.0 { draw(&self.context)? } else { Vec::new() };
        for (context, line) in drawn {
            let is_new = self.children.iter().all(|child| child.context.tokens() != context.tokens());
            if is_new && !line.tokens.is_empty() {
                let reward = f64::from(line.mean_logprob()).exp();
                let children = Vec::new();
                self.children.push(Self { context, children, reward, n_visits: 0, value: reward });
            }
        }
        let of_all: f64 = self.children.iter().map(|child| child.reward).sum();
        let worth = |child: &Self| {
            child.value + child.reward / of_all * root_of_visits / f64::from(1 + child.n_visits)
        };
        let end = match self.children.iter_mut().max_by(|a, b| worth(a).total_cmp(&worth(b))) {
            Some(next) => next.follow(draw, &[rewards, &[next.reward]].concat())?,
            None => (rewards.iter().sum::<f64>() / rewards.len().max(1) as f64, self.context.tokens()),
        };
        self.n_visits += 1;
        self.value += (end.0 - self.value) / f64::from(self.n_visits);
        Ok(end)
    }
}
