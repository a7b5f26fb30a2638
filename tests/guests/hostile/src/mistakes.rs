//! Every mistake that the host API has an error for. After each the guest shows that nothing has changed.

use serde::Serialize;
use trellis_guest::bindings::trellis::host::session;
use trellis_guest::programs::{Definition, Source};
use trellis_guest::{
    Chat, ChatEnd, Context, Error, GuessTree, Model, Result, Sampler, TokenMask, emit_json, forget,
    generate_all, score_all, speculate_all, step_all, top_all,
};

use crate::Outcome;

#[derive(Serialize)]
struct Report {
    mistake: &'static str,
    /// The error's text; none when the host let the mistake pass.
    error: Option<String>,
    length: u32,
    next: u32,
}

/// Asks for everything wrong, one after the other, and emits what came of each.
pub(crate) fn make_all() -> Outcome {
    let model = Model::open_default()?;
    let context = model.context()?;
    context.append_markup("<|begin_of_text|>Once upon a time")?;
    let empty = model.context()?;
    for (mistake, make) in MISTAKES {
        let result = make(&model, &context, &empty);
        let error = result.err().map(|error| error.to_string());
        let next = context.top(1)?.candidates[0].token;
        emit_json(&Report { mistake, error, length: context.length() + empty.length(), next })?;
    }
    Ok(())
}

type Mistake = fn(&Model, &Context, &Context) -> Result;

const MISTAKES: [(&str, Mistake); 45] = [
    ("unknown model", |_, _, _| Model::open("gpt-17").map(drop)),
    ("token out of range", |model, context, _| context.append(&[5, model.info().vocab_size])),
    ("too long", |_, context, _| context.append(&vec![5; context.capacity() as usize])),
    ("text too long", |_, context, _| context.append_text(&"word ".repeat(3000)).map(drop)),
    ("NaN temperature", |_, _, _| Sampler::seeded(1).temperature(f32::NAN).build().map(drop)),
    ("negative temperature", |_, _, _| Sampler::seeded(1).temperature(-1.0).build().map(drop)),
    ("infinite temperature", |_, _, _| Sampler::seeded(1).temperature(f32::INFINITY).build().map(drop)),
    ("top-p 0", |_, _, _| Sampler::seeded(1).top_p(0.0).build().map(drop)),
    ("top-p above 1", |_, _, _| Sampler::seeded(1).top_p(1.5).build().map(drop)),
    ("min-p NaN", |_, _, _| Sampler::seeded(1).min_p(f32::NAN).build().map(drop)),
    ("top-k 0", |_, _, _| Sampler::seeded(1).top_k(0).build().map(drop)),
    ("repetition penalty 0", |_, _, _| Sampler::seeded(1).repetition_penalty(0.0).build().map(drop)),
    ("NaN frequency penalty", |_, _, _| Sampler::seeded(1).frequency_penalty(f32::NAN).build().map(drop)),
    ("NaN bias", |_, _, _| Sampler::greedy().set_bias(&[(5, f32::NAN)])),
    ("bias out of range", |model, context, _| {
        let sampler = Sampler::seeded(1).bias([(model.info().vocab_size + 7, 1.0)]).build()?;
        context.step(&sampler).map(drop)
    }),
    ("infinite parameter", |model, _, _| {
        let program = model.program(&Definition::build(|b| b.logits().draw(Source::SEED)))?;
        Sampler::by_program(&program, 1)?.set_parameters(&[1.0, f32::INFINITY])
    }),
    ("groups of beams that do not come out even", |_, context, _| {
        context.beams(4).groups(3, 0.5).max_tokens(2).run(1).map(drop)
    }),
    ("mask out of range", |model, _, _| TokenMask::allow(model, &[model.info().vocab_size]).map(drop)),
    ("mask of nothing", |model, context, _| {
        let sampler = Sampler::greedy();
        sampler.set_mask(Some(&TokenMask::allow(model, &[])?))?;
        context.step(&sampler).map(drop)
    }),
    ("mask of another model", |_, context, _| {
        let sampler = Sampler::greedy();
        sampler.set_mask(Some(&TokenMask::allow(&Model::open("draft")?, &[5])?))?;
        context.step(&sampler).map(drop)
    }),
    ("truncate past the end", |_, context, _| context.truncate(context.length() + 1)),
    ("top of an empty context", |_, _, empty| empty.top(1).map(drop)),
    ("step of an empty context", |_, _, empty| empty.step(&Sampler::greedy()).map(drop)),
    ("score after an empty context", |_, _, empty| score_all([(empty, &[5][..])]).map(drop)),
    ("log-probabilities of an empty prompt", |_, _, empty| empty.prompt_logprobs(0).map(drop)),
    ("log-probabilities of a prompt from its first token on", |_, context, _| {
        context.prompt_logprobs(0).map(drop)
    }),
    ("one empty context of two", |_, context, empty| {
        let sampler = Sampler::greedy();
        step_all([(context, &sampler), (empty, &sampler)]).map(drop)
    }),
    ("the same context twice", |_, context, _| top_all([context, context], 1).map(drop)),
    ("generate twice on one context", |_, context, _| {
        let sampler = Sampler::greedy();
        generate_all([context.generate(&sampler), context.generate(&sampler)]).map(drop)
    }),
    ("too many candidates", |_, context, _| context.top(1_000_000).map(drop)),
    ("empty continuation", |_, context, _| score_all([(context, &[][..])]).map(drop)),
    ("guess too long", |_, context, _| context.speculate(&Sampler::greedy(), &[5; 16]).map(drop)),
    ("guess out of range", |model, context, _| {
        context.speculate(&Sampler::greedy(), &[5, model.info().vocab_size]).map(drop)
    }),
    ("tree of too many guesses", |_, context, _| {
        let mut tree = GuessTree::new();
        for token in 0..65 {
            tree.add(None, token);
        }
        context.speculate_tree(&Sampler::greedy(), &tree).map(drop)
    }),
    ("tree too deep", |_, context, _| {
        let mut tree = GuessTree::new();
        tree.add_chain(None, &[5; 16]);
        context.speculate_tree(&Sampler::greedy(), &tree).map(drop)
    }),
    ("tree of a token that there is not", |model, context, _| {
        let mut tree = GuessTree::new();
        tree.add_chain(None, &[5, model.info().vocab_size]);
        context.speculate_tree(&Sampler::greedy(), &tree).map(drop)
    }),
    ("guess after an empty context", |_, _, empty| empty.speculate(&Sampler::greedy(), &[]).map(drop)),
    ("guess twice after one context", |_, context, _| {
        let sampler = Sampler::greedy();
        speculate_all([(context, &sampler, &[5][..]), (context, &sampler, &[])]).map(drop)
    }),
    ("guess after a full context", |_, context, _| {
        let full = context.fork()?;
        full.append(&vec![5; (full.capacity() - full.length()) as usize])?;
        full.speculate(&Sampler::greedy(), &[5, 6]).map(drop)
    }),
    ("unknown saved name", |model, _, _| model.saved_context("nobody").map(drop)),
    ("forget an unknown name", |_, _, _| forget("nobody")),
    ("empty name", |_, context, _| context.save("")),
    ("unknown role", |model, _, _| {
        model.encode_chat(&Chat::new().with("wizard", "abracadabra"), ChatEnd::Assistant).map(drop)
    }),
    ("decode out of range", |model, _, _| model.decode(&[1, u32::MAX]).map(drop)),
    ("broken JSON", |_, _, _| session::emit_json("{\"a\":").map_err(Error::from)),
];
