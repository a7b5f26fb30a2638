//! Writes the points of an answer first, a few words each, and then goes on from all of them at once (X. Ning and others,
//! "Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation", 2023). Points do not wait for one another: the
//! answer takes as many steps of the model as its longest point, and not as all of them together.
//!
//! As in the paper each expansion begins with its point, after the question. The paper's prompts ask for a list of points of 3
//! to 5 words; here a regular expression holds them to a form, which a model that follows no such prompts needs as well: as it
//! stands, that of the first sentences of stories. What the paper tells an expansion of the other points is left out.
//!
//! ```text
//! trellis run skeleton-of-thought "Tell me a short story."
//! trellis run skeleton-of-thought --point "[A-Z][a-z]+( [a-z]+){2,4}" --points 6 --json "How do I get to sleep?"
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Beginning, Chat, Constraint, Error, Model, Result, Sampler, emit, emit_json, generate_all, seed,
    usage,
};

trellis_guest::main!(run);

const USAGE: &str =
    "skeleton-of-thought [--points N] [--point REGEX] [--temperature T] [--max-tokens N] [--json] QUESTION";

/// A first sentence.
const POINT: &str =
    "Once upon a time there was an? [a-z]+ [a-z]+ named [A-Z][a-z]{2,7} who lived [a-z ]{5,40}\\.";

#[derive(Serialize)]
struct Report {
    points: Vec<String>,
    /// Each point with what it became.
    texts: Vec<String>,
    /// Tokens drawn, of the skeleton and of all expansions.
    n_skeleton: usize,
    n_expansions: usize,
    /// Steps of the model for all that: of the skeleton, less what its form forced and saved, and of the longest expansion.
    n_steps: usize,
    /// What was computed in all, the question and the points that were read again included.
    n_computed: u64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_points: u64 = args.option("--points")?.unwrap_or(4);
    let form = args.option::<String>("--point")?.unwrap_or_else(|| POINT.to_owned());
    let temperature = args.option("--temperature")?.unwrap_or(0.7);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(200);
    if n_points == 0 {
        return Err(args.mistake("--points is at least 1".to_owned()));
    }
    let question = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    prompt.prefill()?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;

    let list = Constraint::regex(&model, &format!("(({form})\n){{{n_points}}}"))?;
    let listed = sampler.with_seed(seed());
    listed.set_constraint(Some(&list), &Beginning::FirstDraw)?;
    // A point may be as long as what it becomes; one of any length would fill the context.
    let n_most = max_tokens.saturating_mul(u32::try_from(n_points).unwrap_or(u32::MAX));
    let skeleton = prompt.fork()?.generate(&listed).max_tokens(n_most).run()?;
    if !skeleton.is_finished() {
        let expected = format!("a form that ends {n_points} times in {n_most} tokens");
        return Err(Error::InvalidArgument { name: "--point".to_owned(), value: form, expected });
    }
    let points: Vec<String> = skeleton.text.lines().map(str::to_owned).collect();

    let forks = prompt.forks(points.len() as u64, &sampler)?;
    for ((fork, _), point) in forks.iter().zip(&points) {
        fork.append_text(point)?;
    }
    let expansions =
        generate_all(forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(max_tokens)))?;

    let text = |(point, expansion): (&String, &str)| format!("{point}{expansion}");
    let texts: Vec<String> =
        points.iter().zip(expansions.iter().map(|it| it.text.as_str())).map(text).collect();
    if !json {
        return emit!("{}\n", texts.join("\n\n"));
    }
    let lengths = expansions.iter().map(|expansion| expansion.tokens.len());
    let (n_skeleton, n_expansions) = (skeleton.tokens.len(), lengths.clone().sum());
    let n_steps = n_skeleton - usage().tokens_forced as usize + lengths.max().unwrap_or(0);
    let n_computed = usage().tokens.used;
    emit_json(&Report { points, texts, n_skeleton, n_expansions, n_steps, n_computed })
}
