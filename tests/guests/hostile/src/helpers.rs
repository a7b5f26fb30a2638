//! What the SDK does for guests beside the host's own functions.

use serde::Serialize;
use trellis_guest::{
    Chat, Context, Error, Limit, Model, Random, Result, Sampler, Thinking, ThoughtEnd, Token, TokenMask,
    emit_json, limits as limits_now, log_softmax, receive,
};

use crate::Outcome;

/// Tokens that a prompt and what follows it are compared over.
const N_TOKENS: u32 = 12;

fn prompt(model: &Model, text: &str) -> Result<Context> {
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(text)?;
    Ok(context)
}

/// Holds a context and a mask, sends its limits with what it uses of them, and waits to be let go.
pub(crate) fn limits() -> Outcome {
    let model = Model::open_default()?;
    let context = prompt(&model, "Once upon a time")?;
    context.prefill()?;
    let _mask = TokenMask::forbid(&model, &[1])?;
    let limits = limits_now().into_iter().map(|Limit { name, limit, used }| (name, limit, used));
    emit_json(&limits.collect::<Vec<_>>())?;
    receive()?;
    Ok(())
}

/// A place within what the model writes.
#[derive(Serialize)]
struct Cut {
    /// The prompt.
    text: String,
    /// What healing adds to it.
    more: String,
    /// Whether the tokens that it keeps are those that the model wrote.
    is_whole: bool,
    /// The text of as many tokens after those, and their log-probability: healed, and not.
    with: (String, f32),
    without: (String, f32),
}

/// Cuts what the model writes within its words, and goes on with healing and without, at this temperature: of each cut how the
/// text begins, the tokens that a prompt has in common with the uncut text, and both ways to go on with their log-probabilities.
pub(crate) fn heal(arguments: &[String]) -> Outcome {
    let temperature: f32 = arguments.first().ok_or("the temperature is needed")?.parse()?;
    let model = Model::open_default()?;
    let whole = prompt(&model, "Once upon a time")?;
    let n_start = model.decode(&whole.tokens())?.len();
    whole.generate(&Sampler::greedy()).max_tokens(16).run()?;
    let text = model.decode(&whole.tokens())?;
    let greedy = whole.tokens();
    let mut cuts = Vec::new();
    for (seed, (at, _)) in text.char_indices().skip_while(|(at, _)| *at <= n_start).enumerate() {
        let sampler = Sampler::seeded(seed as u64).temperature(temperature).build()?;
        let cut = prompt(&model, &text[..at])?;
        let told = cut.tokens();
        let plain = cut.fork()?;
        let more = cut.heal(&sampler)?;
        let healed = cut.tokens();
        let n_kept = told.iter().zip(&healed).take_while(|(a, b)| a == b).count();
        if n_kept == told.len() && more.is_empty() {
            continue;
        }
        let go_on = |context: &Context| -> Result<(String, f32)> {
            let n_left = (n_kept as u32 + N_TOKENS).saturating_sub(context.length());
            context.generate(&sampler).max_tokens(n_left).stop_tokens(&[]).run()?;
            let end = context.length().min(n_kept as u32 + N_TOKENS);
            let tokens = &context.tokens()[..end as usize];
            let logprobs = context.prompt_logprobs(n_kept as u32)?;
            Ok((model.decode(tokens)?, logprobs.iter().sum()))
        };
        let is_whole = greedy.starts_with(&told[..n_kept]);
        let (with, without) = (go_on(&cut)?, go_on(&plain)?);
        cuts.push(Cut { text: text[..at].to_owned(), more, is_whole, with, without });
    }
    emit_json(&(&text, cuts))?;
    // Nothing goes on from a whole word before a special token, nor from a prompt that is one token.
    let chat = model.context()?;
    chat.set_chat(&Chat::new().user("Hello"))?;
    chat.append_markup("<|end|>")?;
    let n_before = chat.length();
    assert_eq!((chat.heal(&Sampler::greedy())?.as_str(), chat.length()), ("", n_before));
    // Each mark with which a longer token begins may stand at the end.
    for c in '!'..='~' {
        let is_mark = c.is_ascii_punctuation();
        if is_mark && model.vocabulary()?.iter().any(|token| token.len() > 1 && token[0] == c as u8) {
            let cut = prompt(&model, &format!("a {c}"))?;
            let more = cut.heal(&Sampler::greedy())?;
            assert_eq!(model.decode(&cut.tokens())?, format!("a {c}{more}"));
        }
    }
    Ok(())
}

/// The same set of tokens made less likely in two ways, and forbidden in two.
pub(crate) fn bias() -> Outcome {
    let model = Model::open_default()?;
    let has = |letter: u8| move |text: &[u8]| text.contains(&letter);
    let tokens_with = |letter: u8| -> Result<Vec<(Token, f32)>> {
        let all = model.vocabulary()?.iter().enumerate().filter(|(_, text)| text.contains(&letter));
        Ok(all.map(|(token, _)| (token as Token, -2.5)).collect())
    };
    let draw = |sampler: &Sampler| -> Result<Vec<Token>> {
        Ok(prompt(&model, "Once upon a time")?.generate(sampler).max_tokens(60).run()?.tokens)
    };
    let settings = || {
        let chain = Sampler::seeded(11).temperature(0.9).top_k(200).top_p(0.97).min_p(0.001);
        chain.repetition_penalty(1.1).frequency_penalty(0.1).presence_penalty(0.05).penalty_last_n(40)
    };
    let few = tokens_with(b'd')?;
    assert!(few.len() <= 1024, "{}", few.len());
    let set = TokenMask::allow_where(&model, has(b'd'))?;
    let by_list = draw(&settings().bias(few.clone()).build()?)?;
    let by_set = draw(&settings().bias_where(&set, -2.5).build()?)?;
    let other = [(by_list[0], -1.0), (by_list[1], -1.5)];
    let plain = || Sampler::seeded(11).temperature(0.9).top_p(0.97);
    let both_listed = draw(&plain().bias(few.iter().copied().chain(other)).build()?)?;
    let both = draw(&plain().bias(other).bias_where(&set, -2.5).build()?)?;
    emit_json(&[by_list, by_set, both_listed, both, draw(&settings().build()?)?])?;

    let many = tokens_with(b'e')?;
    assert!(many.len() > 1024, "{}", many.len());
    let refused = Sampler::seeded(1).bias(many.iter().copied()).build();
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    for bias in [f32::NAN, f32::INFINITY] {
        let listed = Sampler::seeded(1).bias([(few[0].0, bias)]).build().err();
        assert!(matches!(listed, Some(Error::InvalidArgument { .. })), "{listed:?}");
        assert_eq!(Sampler::seeded(1).bias_where(&set, bias).build().err(), listed);
    }
    let without = TokenMask::allow_where(&model, |text| !text.contains(&b'e'))?;
    let mut masked = Vec::new();
    for temperature in [0.0, 0.8] {
        let sampler = Sampler::seeded(3).temperature(temperature).build()?;
        sampler.set_mask(Some(&without))?;
        let set = TokenMask::allow_where(&model, has(b'e'))?;
        let settings = Sampler::seeded(3).temperature(temperature);
        // A mask also leaves out what has no text; so does this run of tokens, which ends with none of it.
        let by_set = draw(&settings.bias_where(&set, f32::NEG_INFINITY).build()?)?;
        masked.push((draw(&sampler)?, model.decode(&by_set)?, by_set));
    }
    emit_json(&masked)?;
    Ok(())
}

/// Says a text token by token, and half a character.
pub(crate) fn say(arguments: &[String]) -> Outcome {
    let text = arguments.join(" ");
    let model = Model::open_default()?;
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    let mut emitter = context.emitter();
    for token in model.encode(&text)? {
        emitter.append(&[token])?;
    }
    emitter.append(&model.info().stop_tokens[..1])?;
    emitter.finish()?;
    assert_eq!(model.decode(&context.tokens())?, text);
    let half = model.vocabulary()?.iter().position(|text| text == &"é".as_bytes()[..1]);
    let mut emitter = context.emitter();
    emitter.append(&[half.ok_or("every byte has a token")? as Token])?;
    emitter.finish()?;
    Ok(())
}

/// Log-probabilities of the model are those of its softmax, and draws among them as likely as they say.
pub(crate) fn draw() -> Outcome {
    let context = prompt(&Model::open_default()?, "Once upon a time there was a")?;
    let full = context.full()?;
    let shifted: Vec<f32> = full.iter().map(|logprob| logprob + 3.0).collect();
    let apart = log_softmax(&shifted).iter().zip(&full).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart < 1e-4, "{apart}");
    let top = context.top(8)?.candidates;
    let (n, mut random) = (20_000, Random::of_session());
    let mut counts = vec![0.0; top.len()];
    for _ in 0..n {
        let drawn = random.draw(&top).ok_or("there is probability")?;
        counts[top.iter().position(|it| *it == drawn).ok_or("it is one of them")?] += 1.0 / f64::from(n);
    }
    let sum: f64 = top.iter().map(|it| f64::from(it.logprob).exp()).sum();
    let shares: Vec<f64> = top.iter().map(|it| f64::from(it.logprob).exp() / sum).collect();
    emit_json(&(counts, shares))?;
    Ok(())
}

/// Thoughts that a special token closes, that are not begun, and that cannot be.
pub(crate) fn think() -> Outcome {
    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user("What is 37 + 48?"))?;
    let (prompt, greedy) = (context.tokens(), Sampler::greedy());
    let mut thoughts = Vec::new();
    let closed = Thinking::between("", "<|end|>");
    for thinking in [closed.clone(), closed.clone().hard_budget(1), closed.hard_budget(0).message("85")] {
        let thought = thinking.run(&context, &greedy)?;
        thoughts.push((thought.text, thought.n_tokens, context.tokens_from(prompt.len() as u32)));
        context.set_tokens(&prompt)?;
    }
    emit_json(&(thoughts, model.encode_markup("85<|end|>")?, model.encode_markup("<|end|>")?))?;
    // A special token that ends no turn closes a thought with a line's end behind it, within a generation and within a stream.
    let (mark, close) = (model.encode_markup("<|user|>")?[0], "<|user|>\n");
    assert!(!model.is_stop(mark));
    let closes = Sampler::seeded(1).temperature(0.0).bias([(mark, 1e4)]).build()?;
    for soft_budget in [4, 0] {
        let thinking = Thinking::between("", close).soft_budget(soft_budget).hard_budget(4);
        let thought = thinking.run(&context, &closes)?;
        assert_eq!((thought.text.as_str(), thought.n_tokens, thought.end), ("", 0, ThoughtEnd::Closed));
        assert_eq!(context.tokens_from(prompt.len() as u32), model.encode_markup(close)?);
        context.set_tokens(&prompt)?;
    }
    let refused = Thinking::between("<|user|>", "").run(&context, &greedy);
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    assert_eq!(context.tokens(), prompt);
    Ok(())
}

/// Sends its arguments in every form, then fails with the last one.
pub(crate) fn argue(arguments: &[String]) -> Outcome {
    let last = arguments.last().cloned().unwrap_or_default();
    for text in arguments {
        trellis_guest::emit(text)?;
        trellis_guest::log(trellis_guest::LogLevel::Info, text);
        emit_json(&[text])?;
        trellis_guest::emit_tokens(&Model::open_default()?.encode(text)?)?;
    }
    Err(last.into())
}
