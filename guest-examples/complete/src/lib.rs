//! Continues a text. Shows the declarative speed: one call decodes everything and streams it to the client.
//!
//! ```text
//! trellis run complete "Once upon a time"
//! trellis run complete --temperature 0.8 --top-p 0.95 --stop "." "Ownership is"
//! ```

use trellis_guest::{Args, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

const USAGE: &str = "complete [--temperature T] [--top-p P] [--max-tokens N] [--stop TEXT] TEXT";

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let top_p = args.option("--top-p")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(64);
    let stop: Option<String> = args.option("--stop")?;
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
    generation.run()?;
    emit("\n")
}
