//! Continues a text by contrastive decoding: of the tokens that an expert finds plausible it takes the one that the expert
//! prefers most over an amateur. What both would say, such as the same again, comes off (X. L. Li and others, "Contrastive Decoding:
//! Open-ended Text Generation as Optimization", 2023). As in the paper the amateur may be a smaller model, sees the last
//! tokens of the text alone, and has a temperature; where no model is named it is the same one. The paper takes the difference
//! of both log-probabilities and searches with beams; here what is taken off is weighed, `(1 + beta) · expert − beta · amateur`,
//! and the best token is taken or one drawn.
//!
//! ```text
//! trellis run contrastive "Once upon a time"
//! trellis run --model tiny --model draft contrastive --amateur draft "Once upon a time"
//! trellis run contrastive --beta 0 --json "Once upon a time"     # the expert alone
//! ```

use serde::Serialize;
use trellis_guest::programs::{Definition, Source, library};
use trellis_guest::{Args, Mixture, Model, Result, Sampler, Token, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "contrastive [--amateur MODEL] [--sees N] [--alpha A] [--beta B] [--amateur-temperature T] \
                     [--temperature T] [--max-tokens N] [--json] TEXT";

#[derive(Serialize)]
struct Report {
    text: String,
    tokens: Vec<Token>,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let amateur: Option<String> = args.option("--amateur")?;
    let n_seen = args.option("--sees")?.unwrap_or(1);
    let alpha: f32 = args.option("--alpha")?.unwrap_or(0.1);
    let beta: f32 = args.option("--beta")?.unwrap_or(0.5);
    let amateur_temperature: f32 = args.option("--amateur-temperature")?.unwrap_or(1.0);
    let temperature: f32 = args.option("--temperature")?.unwrap_or(0.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(100);
    if !(alpha > 0.0 && alpha <= 1.0) {
        return Err(args.mistake(format!("--alpha is {alpha}, and has to be above 0 and at most 1")));
    }
    let is_good = |x: f32| x.is_finite() && x >= 0.0;
    if !(is_good(beta) && is_good(temperature) && is_good(amateur_temperature) && amateur_temperature > 0.0) {
        let problem = "--beta and temperatures are finite and at least 0, the amateur's above 0";
        return Err(args.mistake(problem.to_owned()));
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let expert = model.context()?;
    expert.append(model.info().bos_token.as_slice())?;
    expert.append_text(&text)?;
    let amateur = match amateur {
        Some(name) => Model::open(&name)?.context()?,
        None => model.context()?,
    };
    amateur.append(amateur.model().info().bos_token.as_slice())?;
    // The first token of the expert's is the one that begins a text.
    amateur.append(&expert.tokens_from(expert.length().saturating_sub(n_seen).max(1)))?;

    let definition = Definition::build(|b| {
        let x = library::contrastive(b.logits(), b.member(0) / amateur_temperature, alpha, beta);
        if temperature == 0.0 {
            library::greedy(x)
        } else {
            library::temperature(x, temperature).draw(Source::SEED)
        }
    });
    let sampler = Sampler::by_program(&model.program(&definition)?, seed())?;
    let written = Mixture::of(&expert, [&amateur]).generate(&sampler).max_tokens(max_tokens).run()?;
    if json {
        return emit_json(&Report { text: written.text, tokens: written.tokens });
    }
    emit!("{text}{}\n", written.text)
}
