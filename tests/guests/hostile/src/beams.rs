//! Beam searches of the tour: what is found, and what the guest makes of hypotheses.

use trellis_guest::programs::Definition;
use trellis_guest::{
    Constraint, Context, EarlyStopping, Error, Finished, Kept, Model, Sampler, Token, score_all,
};

use crate::Outcome;

/// The greatest difference of two scores that are one.
const TOLERANCE: f32 = 1e-4;

pub(crate) fn searched(model: &Model, prompt: &Context) -> Outcome {
    let settings = || prompt.beams(4).max_tokens(12).early_stopping(EarlyStopping::Never);
    let native: Vec<Finished> = settings().run(4)?;
    assert!(native.is_sorted_by(|a, b| a.score >= b.score) && native.len() == 4);

    // Stepped, with all that lives kept, it finds the same; what was settled begins the best.
    let search = settings().open()?;
    let mut settled = Vec::new();
    loop {
        let live = search.step()?;
        assert_eq!(live, search.live());
        settled.push(search.settled());
        if live.is_empty() {
            break;
        }
        assert_eq!(search.tokens(0)?.last().copied(), live[0].token);
        search.keep(live.iter().enumerate().map(|(idx, one)| Kept::live(idx, one.logprob)))?;
    }
    assert_eq!(search.best(4), native);
    assert!(settled.iter().all(|settled| native[0].tokens.starts_with(settled)));
    assert!(matches!(search.tokens(0), Err(Error::InvalidArgument { .. })));

    // A score is what the model says of the text.
    for (idx, finished) in native.iter().enumerate() {
        let scores: f32 = score_all([(prompt, finished.tokens.as_slice())])?[0].iter().sum();
        let expected = scores / finished.tokens.len() as f32;
        assert!((finished.score - expected).abs() < TOLERANCE, "{finished:?} for {expected}");
        let context = search.take(idx as u32)?;
        let tokens: Vec<Token> = context.tokens().split_off(prompt.length() as usize);
        assert_eq!(tokens, finished.tokens);
    }
    assert!(matches!(search.take(4), Err(Error::InvalidArgument { .. })));

    // Groups differ where one would not; what is put in goes on.
    let diverse = prompt.beams(4).groups(4, 50.0).length_penalty(0.5).max_tokens(4).stop_tokens(&[]);
    let diverse = diverse.run(4)?;
    let mut first: Vec<Token> = diverse.iter().map(|finished| finished.tokens[0]).collect();
    first.sort_unstable();
    first.dedup();
    assert_eq!(first.len(), 4, "no two groups begin with one token: {diverse:?}");
    let forced = settings().open()?;
    forced.keep([Kept::prompt(-1.0).then(&[300, 301])])?;
    forced.run()?;
    assert!(forced.best(4).iter().all(|finished| finished.tokens.starts_with(&[300, 301])));

    // A sampler has its say, and a constraint the last word.
    let words = ["left", "right", "up", "down"];
    let sampler =
        Sampler::seeded(0).temperature(0.0).constraint(&Constraint::choice(model, words)?).build()?;
    let chosen = prompt.beams(4).by(&sampler).run(4)?;
    assert!(!chosen.is_empty(), "a word is found");
    for finished in chosen {
        let (_, before) = finished.tokens.split_last().expect("it has tokens");
        let text = model.decode(before)?;
        assert!(words.contains(&text.as_str()), "{text}");
    }
    let by_program = Sampler::by_program(&model.program(&Definition::build(|b| b.logits().argmax()))?, 1)?;
    assert!(matches!(prompt.beams(4).by(&by_program).open(), Err(Error::InvalidArgument { .. })));
    let hot = Sampler::seeded(1).temperature(0.5).build()?;
    assert!(matches!(prompt.beams(4).by(&hot).open(), Err(Error::InvalidArgument { .. })));

    let vocab_size = model.info().vocab_size;
    for refused in [
        prompt.beams(0).open(),
        prompt.beams(513).open(),
        prompt.beams(4).groups(3, 0.0).open(),
        prompt.beams(4).groups(2, f32::NAN).open(),
        prompt.beams(4).max_tokens(0).open(),
    ] {
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    let out_of_range = prompt.beams(4).stop_tokens(&[vocab_size]).open();
    assert!(matches!(out_of_range, Err(Error::TokenOutOfRange { .. })), "{out_of_range:?}");
    let too_long = prompt.beams(4).max_tokens(prompt.capacity()).open();
    assert!(matches!(too_long, Err(Error::ContextFull { .. })), "{too_long:?}");
    let search = prompt.beams(2).open()?;
    for refused in [Kept::live(2, 0.0), Kept::prompt(f32::INFINITY), Kept::prompt(0.0).then(&[1; 40])] {
        assert!(matches!(search.keep([refused]), Err(Error::InvalidArgument { .. })));
    }
    Ok(())
}
