//! Continues a text. Shows the declarative speed: one call decodes everything and streams it to the client.
//!
//! ```text
//! trellis run complete "Once upon a time"
//! trellis run complete --temperature 0.8 --top-p 0.95 --stop "." "Ownership is"
//! trellis run --model tiny --model draft complete --guess draft "Once upon a time"
//! ```
//!
//! With `--guess` the text comes sooner and stays the same: the named model, or `lookup` in the text itself, guesses what
//! comes, and the model verifies several tokens in a step. What that saved goes to the log.

use trellis_guest::{Args, Guesses, LogLevel, Model, Result, Sampler, emit, log, seed, usage};

trellis_guest::main!(run);

const USAGE: &str =
    "complete [--temperature T] [--top-p P] [--max-tokens N] [--stop TEXT] [--guess lookup|MODEL] TEXT";

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let top_p = args.option("--top-p")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(64);
    let stop: Option<String> = args.option("--stop")?;
    let guess: Option<String> = args.option("--guess")?;
    let text = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    // A model has learnt what texts begin with; without it the first words come out odd.
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(&text)?;

    let sampler = Sampler::seeded(seed()).temperature(temperature).top_p(top_p).build()?;
    let mut generation = context.generate(&sampler).max_tokens(max_tokens).emit();
    if let Some(stop) = &stop {
        generation = generation.stop_at(stop);
    }
    let draft = guess.as_deref().filter(|&name| name != "lookup").map(Model::open).transpose()?;
    if guess.is_some() {
        generation = generation.guess_by(draft.as_ref().map_or_else(Guesses::lookup, Guesses::draft));
    }
    let n_tokens = generation.run()?.tokens.len();
    if guess.is_some() {
        let (guessed, accepted) = (usage().tokens_guessed, usage().tokens_accepted);
        let cost =
            format!("{n_tokens} tokens; {accepted} of {guessed} guesses were right, each a step saved");
        log(LogLevel::Info, &cost);
    }
    emit("\n")
}
