//! Continues a text under three watermarks and without, side by side, and measures each text by the tests that find the marks; a
//! test asks for the tokens of the text and the key alone. `kgw`: the token before decides which tokens are green, and those
//! become more likely (J. Kirchenbauer and others, "A Watermark for Large Language Models", 2023). `unigram`: the same tokens are
//! green everywhere (X. Zhao and others, "Provable Robust Watermarking for AI-Generated Text", 2023). `gumbel`: the noise of the
//! draws comes from the key and the four tokens before (S. Aaronson, "My AI Safety Lecture", 2022; R. Kuditipudi and others,
//! "Robust Distortion-free Watermarks for Language Models", 2023), so that over all keys texts are as likely as without.
//!
//! Of the papers the marks and their z-tests are reproduced, not how they hold against paraphrasing, nor the alignment of
//! Kuditipudi's test. What could hardly be otherwise, such as a sum, cannot be marked.
//!
//! ```text
//! trellis run watermarks "Ownership is"
//! trellis run watermarks --detect "Ownership is ..."  the tests of a text from elsewhere
//! ```

use serde::Serialize;
use trellis_guest::programs::library::{self, KgwKey};
use trellis_guest::programs::{Definition, Source};
use trellis_guest::{Args, Model, Result, Sampler, Token, emit, emit_json, generate_all, seed};

trellis_guest::main!(run);

const USAGE: &str = "watermarks [--key N] [--gamma SHARE] [--delta D] [--temperature T] [--max-tokens N] \
                     [--json] [--detect] TEXT";

/// Tokens before a draw that decide its noise: where they repeat, so does what follows.
const N_GUMBEL: u8 = 4;

/// By how many standard deviations a text is above chance to the test of each mark; above 4 is no chance.
#[derive(Serialize)]
struct Scores {
    kgw: Option<f64>,
    unigram: Option<f64>,
    gumbel: Option<f64>,
}

#[derive(Serialize)]
struct Marked {
    mark: &'static str,
    tokens: Vec<Token>,
    text: String,
    z: Scores,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, detect) = (args.flag("--json"), args.flag("--detect"));
    let key: u64 = args.option("--key")?.unwrap_or(15_485_863);
    let gamma: f32 = args.option("--gamma")?.unwrap_or(0.5);
    let delta: f32 = args.option("--delta")?.unwrap_or(3.0);
    let temperature: f32 = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(200);
    if !(gamma > 0.0 && gamma < 1.0 && delta.is_finite() && temperature > 0.0 && temperature.is_finite()) {
        return Err(
            args.mistake("0 < gamma < 1, a finite delta and a temperature above 0 are needed".to_owned())
        );
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let green = KgwKey { key, n_tokens: 1 };
    let scores = |tokens: &[Token]| Scores {
        kgw: library::z_of_green(tokens, green, gamma.into()),
        unigram: library::z_of_green(tokens, KgwKey { n_tokens: 0, ..green }, gamma.into()),
        gumbel: library::z_of_gumbel(tokens, key, N_GUMBEL),
    };
    if detect {
        return emit_json(&scores(&model.encode(&text)?));
    }

    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text(&text)?;
    let mut tries = Vec::new();
    for mark in ["kgw", "unigram", "gumbel", "none"] {
        let definition = Definition::build(|b| {
            let x = library::temperature(b.logits(), temperature);
            match mark {
                "kgw" => library::kgw(x, green, gamma, delta).draw(Source::SEED),
                "unigram" => library::unigram(x, key, gamma, delta).draw(Source::SEED),
                "gumbel" => library::gumbel_watermark(x, key, N_GUMBEL),
                _ => x.draw(Source::SEED),
            }
        });
        let sampler = Sampler::by_program(&model.program(&definition)?, seed())?;
        tries.push((mark, prompt.fork()?, sampler));
    }
    let drawn = generate_all(tries.iter().map(|(_, fork, by)| fork.generate(by).max_tokens(max_tokens)))?;
    for ((mark, ..), drawn) in tries.iter().zip(drawn) {
        let (z, tokens, text) = (scores(&drawn.tokens), drawn.tokens, drawn.text);
        if json {
            emit_json(&Marked { mark, tokens, text, z })?;
        } else {
            let z = [z.kgw, z.unigram, z.gumbel].map(|z| z.map_or("-".to_owned(), |z| format!("{z:.1}")));
            emit!("{mark:>8} | z of kgw, unigram, gumbel: {} | {}\n", z.join(", "), text.replace('\n', " "))?;
        }
    }
    Ok(())
}
