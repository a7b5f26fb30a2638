//! Decodes several tokens in a step without a draft model: lookahead decoding (Y. Fu and others, "Break the Sequential
//! Dependency of LLM Inference Using Lookahead Decoding", 2024). Beside the text a window of guesses at the tokens to come is
//! kept, each of which is replaced by what the model says after those before it (Jacobi iteration). Runs of tokens that arise
//! on the way are collected, and those that begin with the last token of the text are verified, in one call together with the
//! window. What is written is what the model writes greedily, token for token.
//!
//! In the paper a mask of its own lets one row of the model hold the window, its past and the runs; here each is a row of its own
//! over a fork, and the window sees the guesses of one iteration, not those of several. Sampling is left out.
//!
//! ```text
//! trellis run lookahead "Write the days of the week three times."
//! trellis run lookahead --window 8 --ngram 4 --runs 4 --json "Think step by step: what is 468 + 275?"
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Distribution, Error, LogLevel, Model, Random, Result, Token, emit, emit_json, log, tops_all,
};

trellis_guest::main!(run);

const USAGE: &str = "lookahead [--window N] [--ngram N] [--runs N] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Report {
    text: String,
    tokens: Vec<Token>,
    /// Steps of the model; without guesses it would be one for each token.
    n_steps: usize,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_window = args.option("--window")?.unwrap_or(10usize).max(1);
    let n_gram = args.option("--ngram")?.unwrap_or(4usize).max(2);
    let n_runs = args.option("--runs")?.unwrap_or(10);
    let max_tokens: usize = args.option("--max-tokens")?.unwrap_or(200);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let mut context = model.context()?;
    context.set_chat(&Chat::new().user(&prompt))?;
    let prompt = context.tokens();
    let mut last = *prompt.last().ok_or(Error::EmptyContext)?;
    let n_most = max_tokens.min(context.capacity() as usize - prompt.len());

    // Of each guess the guesses that led to it, itself the last. As in the paper the first are tokens of the prompt by chance.
    let mut random = Random::new(0);
    let mut any = || vec![prompt[(random.bits() % prompt.len() as u64) as usize]];
    let mut window: Vec<Vec<Token>> = (0..n_window).map(|_| any()).collect();
    // Runs that came up in the window, the latest last.
    let mut pool: Vec<Vec<Token>> = Vec::new();
    let (mut tokens, mut n_steps) = (Vec::new(), 0);
    while tokens.len() < n_most && !model.is_stop(last) {
        let runs = pool.iter().rev().filter(|run| run[0] == last).take(n_runs);
        let mut rows: Vec<_> = runs.map(|run| run[1..].to_vec()).collect();
        rows.push(window.iter().map(|run| run[run.len() - 1]).collect());
        for row in &mut rows {
            row.truncate(n_most - tokens.len() - 1);
            // Any token more: in its place is asked what comes after guesses that are all right.
            row.push(last);
        }
        let mut forks = rows.iter().map(|_| context.fork()).collect::<Result<Vec<_>>>()?;
        let places = tops_all(forks.iter().zip(rows.iter().map(Vec::as_slice)), 1)?;
        n_steps += 1;
        let token = |place: &Distribution| place.candidates[0].token;
        let said: Vec<Vec<Token>> = places.iter().map(|row| row.iter().map(token).collect()).collect();

        let n_right = |idx: &usize| rows[*idx].iter().zip(&said[*idx]).take_while(|(a, b)| a == b).count();
        let best = (0..rows.len()).max_by_key(n_right).expect("the window is one of them");
        let n_new = said[best].len().min(n_right(&best) + 1);
        let n_to_stop = said[best].iter().position(|&token| model.is_stop(token)).map(|idx| idx + 1);
        let new = &said[best][..n_to_stop.unwrap_or(n_new).min(n_new)];
        // What the best row has computed is not computed again.
        context = forks.swap_remove(best);
        context.append(new)?;
        tokens.extend_from_slice(new);

        let before = [vec![last]].into_iter().chain(window);
        let longer = before.zip(&said[rows.len() - 1]).map(|(run, &token)| {
            let longer = [&run[..], &[token]].concat();
            longer[longer.len().saturating_sub(n_gram)..].to_vec()
        });
        let longer: Vec<_> = longer.collect();
        for run in longer.iter().filter(|run| run.len() == n_gram) {
            pool.retain(|it| it != run);
            pool.push(run.clone());
        }
        window = longer.into_iter().skip(new.len()).collect();
        window.resize_with(n_window, &mut any);
        last = new[new.len() - 1];
    }

    let text = model.decode(&tokens)?;
    if json {
        return emit_json(&Report { text, tokens, n_steps });
    }
    log(LogLevel::Info, &format!("{} tokens in {n_steps} steps", tokens.len()));
    emit!("{text}\n")
}
