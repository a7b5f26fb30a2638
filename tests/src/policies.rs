//! What policies get out of a model, and for how many tokens: sums that it works out step by step, drawn so hot that one answer
//! is wrong more often than right.

use std::time::Instant;

use futures_util::{StreamExt, stream};
use serde::Serialize;
use serde_json::Value;
use trellis::daemon::Daemon;
use trellis_client::StartOptions;

use crate::daemons;
use crate::engines::Random;
use crate::guests;

/// The temperature of all draws, but for the policy that draws none.
pub const TEMPERATURE: &str = "2.5";

/// How many questions are asked at the same time.
const N_AT_ONCE: usize = 4;

/// An example with arguments.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// What it is called in tables.
    pub name: &'static str,
    example: &'static str,
    arguments: &'static [&'static str],
}

const fn policy(name: &'static str, example: &'static str, arguments: &'static [&'static str]) -> Policy {
    Policy { name, example, arguments }
}

/// One answer, as it is drawn.
pub const ONE_SAMPLE: Policy = policy("one sample", "best-of-n", &["--n", "1", "--max-tokens", "160"]);
/// The majority over 8 of them.
pub const SELF_CONSISTENCY: Policy = policy("self-consistency, 8", "self-consistency", &["--samples", "8"]);
/// Breadth first over lines.
pub const TREE_OF_THOUGHT: Policy = policy("tree-of-thought", "tree-of-thought", &[]);
/// Particles that are weighed towards the model's distribution.
pub const SMC: Policy = policy("smc, 8", "smc", &["--particles", "8"]);
/// Monte Carlo tree search over lines.
pub const MCTS: Policy = policy("mcts", "mcts", &[]);
/// The surest of 8 answers.
pub const BEST_OF_N: Policy = policy("best-of-n, 8", "best-of-n", &["--n", "8", "--max-tokens", "160"]);
/// The same, where those that fall behind are given up.
pub const REJECTION: Policy =
    policy("best-of-n, 8, --reject", "best-of-n", &["--n", "8", "--reject", "--max-tokens", "160"]);
/// The most probable token each time: the only one that draws nothing.
pub const GREEDY: Policy =
    policy("greedy", "best-of-n", &["--n", "1", "--temperature", "0", "--max-tokens", "160"]);

/// All of them.
pub const POLICIES: [Policy; 8] =
    [ONE_SAMPLE, SELF_CONSISTENCY, TREE_OF_THOUGHT, SMC, MCTS, BEST_OF_N, REJECTION, GREEDY];

/// How a policy did.
#[derive(Clone, Debug, Serialize)]
pub struct Score {
    /// Its name.
    pub policy: &'static str,
    /// Right answers.
    pub n_right: usize,
    /// Questions.
    pub n_questions: usize,
    /// Tokens computed for all questions, by the daemon's count; the questions' own are among them.
    pub n_tokens: u64,
    /// How long all questions took.
    pub seconds: f64,
}

impl Score {
    /// Right answers, of 1.
    #[must_use]
    pub fn accuracy(&self) -> f64 {
        self.n_right as f64 / self.n_questions.max(1) as f64
    }

    /// Tokens for each question.
    #[must_use]
    pub fn tokens_each(&self) -> f64 {
        self.n_tokens as f64 / self.n_questions.max(1) as f64
    }
}

/// So many sums of two numbers of three digits, the same each time.
#[must_use]
pub fn sums(n: usize) -> Vec<[usize; 2]> {
    let mut random = Random(2023);
    (0..n).map(|_| [(); 2].map(|()| 100 + random.below(900))).collect()
}

/// Asks a policy for these sums, several at a time.
///
/// # Panics
/// A guest does not end well.
pub async fn measure(daemon: &Daemon, policy: Policy, sums: &[[usize; 2]]) -> Score {
    let begun = Instant::now();
    let asked =
        stream::iter(sums.iter().copied().enumerate()).map(|(idx, sum)| ask(daemon, policy, idx, sum));
    let asked = asked.buffer_unordered(N_AT_ONCE);
    let asked: Vec<(bool, u64)> = asked.collect().await;
    Score {
        policy: policy.name,
        n_right: asked.iter().filter(|(is_right, _)| *is_right).count(),
        n_questions: asked.len(),
        n_tokens: asked.iter().map(|(_, n_tokens)| n_tokens).sum(),
        seconds: begun.elapsed().as_secs_f64(),
    }
}

/// Whether the answer is right, and the tokens that it took.
async fn ask(daemon: &Daemon, policy: Policy, idx: usize, [a, b]: [usize; 2]) -> (bool, u64) {
    let question = format!("Think step by step: what is {a} + {b}?");
    let mut arguments: Vec<&str> = policy.arguments.to_vec();
    if !arguments.contains(&"--temperature") {
        arguments.extend(["--temperature", TEMPERATURE]);
    }
    arguments.extend(["--json", &question]);
    let options = StartOptions { seed: Some(idx as u64 * 1024), ..daemons::with(&arguments) };
    let client = daemon.connect().await.expect("connected");
    let ended = daemons::run(&client, &guests::example(policy.example), options).await.well();
    let is_right = answer(&ended.json[0]) == Some((a + b).to_string());
    (is_right, ended.usage.expect("the daemon tells").n_tokens)
}

/// What an example reports as the answer, or what follows the last "Answer:" of the text that it puts first.
fn answer(report: &Value) -> Option<String> {
    let first = report.get(0).unwrap_or(report);
    if let Some(answer) = first.get("answer") {
        return answer.as_str().map(str::to_owned);
    }
    let (_, after) = first["text"].as_str()?.rsplit_once("Answer:")?;
    Some(after.lines().next()?.trim().to_owned())
}
