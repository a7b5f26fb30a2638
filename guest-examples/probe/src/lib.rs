//! The guest of `trellis bench`: does one thing often, so that the client can measure what it costs.
//!
//! ```text
//! trellis run probe first                  one call to the host, then the end
//! trellis run probe idle 100000            so many calls that ask the host for next to nothing
//! trellis run probe asks 1000              so many that an engine answers without a step, and as many of the others
//! trellis run probe steps 100              so many steps of a token each
//! trellis run probe slow 60                a stream of so many tokens, after each of which it thinks longer than a small
//!                                          model takes for the next
//! trellis run probe stream 256 "A text"    a greedy stream, piece by piece, then its tokens
//! trellis run probe tokens 256 64          the same, after so many tokens that the seed makes up: sends a text once they
//!                                          are computed, waits for a message, then sends each token as it comes
//! trellis run probe tokens 256 64 program  the same by a program of 12 operations; `few`: any of eight tokens; `guessed`:
//!                                          such with guesses, which mostly are wrong
//! trellis run probe search 256 64 4        a beam search in the place of the stream, stepped and pruned: sends the best
//!                                          hypothesis' last token after each step
//! ```
//!
//! A guest has no precise clock, on purpose: it could time its neighbours. A client that wants to know how long
//! something takes measures outside, and subtracts a run that does less of it.

use std::hint::black_box;

use trellis_guest::programs::{Definition, Source};
use trellis_guest::{
    Args, Context, Guesses, Kept, Model, Result, Sampler, Token, TokenMask, emit, emit_tokens, receive, seed,
};

trellis_guest::main!(run);

const USAGE: &str = "probe first | probe idle N | probe asks N | probe steps N | probe slow N | probe stream N TEXT | probe tokens N N_PROMPT [program|few|guessed] | probe search N N_PROMPT N_BEAMS";

/// Turns of a loop, each some nanoseconds: several milliseconds.
const THOUGHT: u32 = 3_000_000;

/// Tokens of a context that is asked about.
const N_ASKED_ABOUT: u64 = 16;

/// More than hypotheses differ by: a search is pruned, and keeps all.
const PRUNED_NATS: f32 = 1000.0;

fn run() -> Result {
    let args = Args::of_session(USAGE);
    let text = args.text()?;
    let mut words = text.splitn(3, ' ');
    let mode = words.next().unwrap_or_default();
    let n = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    match (mode, n) {
        ("first", _) => emit("."),
        ("idle", n) => idle(n),
        ("asks", n) => asks(n),
        ("steps", n) => steps(n),
        ("slow", n) if n > 0 => slow(n),
        ("stream", n) if n > 0 => stream(n, words.next().unwrap_or_default()),
        ("tokens", n) if n > 0 => match words.next().map(|rest| rest.split_once(' ').unwrap_or((rest, ""))) {
            Some((n_prompt, draws)) if n_prompt.parse().is_ok_and(|n: u64| n > 0) => {
                tokens(n, n_prompt.parse().unwrap_or(1), draws)
            }
            _ => Err(Args::new(USAGE, Vec::new()).mistake("tokens needs the length of a prompt".to_owned())),
        },
        ("search", n) if n > 0 => {
            let numbers: Option<Vec<u32>> =
                words.next().map(|rest| rest.split(' ').flat_map(str::parse).collect());
            match numbers.as_deref() {
                Some(&[n_prompt, n_beams]) if n_prompt > 0 => search(n, n_prompt.into(), n_beams),
                _ => Err(Args::new(USAGE, Vec::new())
                    .mistake("search needs the length of a prompt and a number of beams".to_owned())),
            }
        }
        _ => Err(Args::new(USAGE, Vec::new()).mistake(format!("there is no {text:?}"))),
    }
}

/// Makes `n` calls that do no work in the host.
fn idle(n: u32) -> Result {
    let context = Model::open_default()?.context()?;
    for _ in 0..n {
        black_box(context.length());
    }
    emit(".")
}

/// Asks `n` times for what is known of a context already, and for its length in between.
fn asks(n: u32) -> Result {
    let context = of_prompt(&Model::open_default()?, N_ASKED_ABOUT)?;
    for _ in 0..n {
        black_box(context.top(1)?);
        black_box(context.length());
    }
    emit(".")
}

/// Draws `n` tokens, each in a step that is waited for.
fn steps(n: u32) -> Result {
    let context = of_prompt(&Model::open_default()?, N_ASKED_ABOUT)?;
    let sampler = Sampler::seeded(seed()).build()?;
    for _ in 0..n {
        black_box(context.step(&sampler)?);
    }
    emit(".")
}

/// Takes `n` tokens of a stream, and thinks after each.
fn slow(n: u32) -> Result {
    let context = of_prompt(&Model::open_default()?, N_ASKED_ABOUT)?;
    for drawn in context.stream(&Sampler::greedy()).stop_tokens(&[]).max_tokens(n).open()? {
        black_box(drawn?);
        (0..THOUGHT).for_each(|turn| {
            black_box(turn);
        });
    }
    emit(".")
}

/// A context of so many tokens that the seed makes up.
fn of_prompt(model: &Model, n_prompt: u64) -> Result<Context> {
    let context = model.context()?;
    context.append(&prompt(n_prompt, model.info().vocab_size))?;
    Ok(context)
}

/// Sends the text of `n` tokens as they come, then the tokens. Stop tokens are tokens like any other here.
fn stream(n: u32, text: &str) -> Result {
    let model = Model::open_default()?;
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(text)?;
    let n_prompt = context.length();
    for piece in context.stream(&Sampler::greedy()).stop_tokens(&[]).max_tokens(n).text()? {
        emit(&piece?)?;
    }
    emit_tokens(&context.tokens_from(n_prompt))
}

/// Sends each of `n` tokens by itself. No token stops the stream.
fn tokens(n: u32, n_prompt: u64, draws: &str) -> Result {
    let model = Model::open_default()?;
    let context = computed(n_prompt)?;
    let few = || -> Result<Sampler> {
        let mask = TokenMask::allow(&model, &prompt(8, model.info().vocab_size))?;
        // Next to nothing is left of what the model thinks.
        let sampler = Sampler::seeded(seed()).temperature(1e6).build()?;
        sampler.set_mask(Some(&mask))?;
        Ok(sampler)
    };
    let sampler = match draws {
        "" => Sampler::greedy(),
        "program" => Sampler::by_program(&model.program(&two_reductions())?, seed())?,
        "few" | "guessed" => few()?,
        other => return Err(Args::new(USAGE, Vec::new()).mistake(format!("nothing draws by {other:?}"))),
    };
    let stream = context.stream(&sampler).stop_tokens(&[]).max_tokens(n);
    let stream = if draws == "guessed" { stream.guess_by(Guesses::lookup()) } else { stream };
    for drawn in stream.open()? {
        emit_tokens(&[drawn?.token])?;
    }
    Ok(())
}

/// Draws what is at most four nats below the best, at a temperature: 12 operations with two reductions.
fn two_reductions() -> Definition {
    Definition::build(|b| {
        let x = b.logits() / 0.8;
        let bound = -(4.0 - x.max());
        x.keep(x.gt(bound)).draw(Source::SEED)
    })
}

/// Sends the last token of the best hypothesis after each of `n` steps.
fn search(n: u32, n_prompt: u64, n_beams: u32) -> Result {
    let context = computed(n_prompt)?;
    let search = context.beams(n_beams).stop_tokens(&[]).max_tokens(n).open()?;
    loop {
        let live = search.step()?;
        let Some(best) = live.iter().max_by(|a, b| a.logprob.total_cmp(&b.logprob)) else { break };
        emit_tokens(best.token.as_slice())?;
        let near = live.iter().enumerate().filter(|(_, one)| one.logprob >= best.logprob - PRUNED_NATS);
        search.keep(near.map(|(idx, one)| Kept::live(idx, one.logprob)))?;
    }
    // In the last step all have come to their end.
    let best = search.best(1);
    emit_tokens(best.first().and_then(|finished| finished.tokens.last()).map_or(&[], std::slice::from_ref))
}

/// A context of so many tokens, once they are computed and the client says so.
fn computed(n_prompt: u64) -> Result<Context> {
    let context = of_prompt(&Model::open_default()?, n_prompt)?;
    context.prefill()?;
    emit(".")?;
    receive()?;
    Ok(context)
}

/// Tokens without meaning; those of two seeds have no beginning in common.
fn prompt(n_tokens: u64, vocab_size: u32) -> Vec<Token> {
    let start = (seed() + 1).wrapping_mul(7919);
    let token = |i: u64| start.wrapping_add(i.wrapping_mul(104_729)) % u64::from(vocab_size);
    (0..n_tokens).map(|i| token(i) as Token).collect()
}
