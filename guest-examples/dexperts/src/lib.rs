//! Continues a text towards what an *expert* would write and away from what an *anti-expert* would: each token is drawn from
//! `base + alpha · (expert − anti-expert)`, within the nucleus of the base (A. Liu and others, "DExperts: Decoding-Time
//! Controlled Text Generation with Experts and Anti-Experts", 2021). In the paper the experts are models that were tuned on
//! texts with and without the attribute; here they are the same model under other prompts, so that nothing is trained.
//!
//! ```text
//! trellis run dexperts "Once upon a time"
//! trellis run dexperts --alpha 2 --expert "A story about the sea. " --anti "A story about a dog. " "Once upon a time"
//! trellis run dexperts --alpha 0 --json "Once upon a time"     # the base alone
//! ```

use serde::Serialize;
use trellis_guest::programs::{Definition, Source, library};
use trellis_guest::{Args, Context, Mixture, Model, Result, Sampler, Token, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "dexperts [--alpha A] [--expert TEXT] [--anti TEXT] [--top-p P] [--temperature T] \
                     [--max-tokens N] [--json] TEXT";

#[derive(Serialize)]
struct Report {
    text: String,
    tokens: Vec<Token>,
    /// Of the text, under each of the prompts, in nats.
    expert: f32,
    anti_expert: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let alpha: f32 = args.option("--alpha")?.unwrap_or(1.0);
    let expert = args.option("--expert")?.unwrap_or_else(|| "A happy story. ".to_owned());
    let anti = args.option("--anti")?.unwrap_or_else(|| "A sad story. ".to_owned());
    let top_p: f32 = args.option("--top-p")?.unwrap_or(0.9);
    let temperature: f32 = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(60);
    if !alpha.is_finite() {
        return Err(args.mistake(format!("--alpha is {alpha}, and has to be finite")));
    }
    for (name, value) in [("--top-p", top_p), ("--temperature", temperature)] {
        if !(value > 0.0 && value.is_finite()) {
            return Err(args.mistake(format!("{name} is {value}, and has to be finite and above 0")));
        }
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let base = context(&model, "", &text)?;
    let expert = context(&model, &expert, &text)?;
    let anti = context(&model, &anti, &text)?;
    let definition = Definition::build(|b| {
        let base = b.logits();
        let steered = library::experts(base, b.member(0), b.member(1), b.parameter(0));
        // As in the paper: the base says what may come at all, since the experts are sure of nothing else.
        let kept = steered.keep(base.nucleus(b.parameter(1)));
        library::temperature(kept, b.parameter(2)).draw(Source::SEED)
    });
    let sampler = Sampler::by_program(&model.program(&definition)?, seed())?;
    sampler.set_parameters(&[alpha, top_p, temperature])?;

    let before = [expert.fork()?, anti.fork()?];
    let mixture = Mixture::of(&base, [&expert, &anti]);
    let written = mixture.generate(&sampler).max_tokens(max_tokens).run()?;
    if !json {
        return emit!("{text}{}\n", written.text);
    }
    let tokens = written.tokens;
    let of = |context: &Context| -> Result<f32> {
        Ok(if tokens.is_empty() { 0.0 } else { context.score(&tokens)?.iter().sum() })
    };
    let (expert, anti_expert) = (of(&before[0])?, of(&before[1])?);
    emit_json(&Report { text: written.text, tokens, expert, anti_expert })
}

fn context(model: &Model, before: &str, text: &str) -> Result<Context> {
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(&format!("{before}{text}"))?;
    Ok(context)
}
