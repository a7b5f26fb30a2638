//! Every function of the host API, and what its answers have to do with those of others.

use std::time::Duration;

use trellis_guest::programs::{BiasId, Definition, MaskId, Source, TokenBias, library};
use trellis_guest::{
    Beginning, Candidate, Chat, ChatEnd, Constraint, Context, Error, Event, FinishReason, GuessTree, Inbox,
    LogLevel, Mixture, Model, Positions, Sampler, Steering, Token, TokenMask, call_bytes, embedding_all,
    emit, emit_json, emit_tokens, forget, fork_seed, full_all, generate_all, leaving, limits, log,
    logprobs_all, next_event, receive, receive_json, receive_json_until_leaving, receive_within, score_all,
    seed, speculate_all, speculate_tree_all, step_all, time_left, top_all, tops_all, try_receive, usage,
};

use crate::{Outcome, beams, generations, looks};

/// The greatest difference of two log-probabilities that are one.
const TOLERANCE: f32 = 1e-4;

pub(crate) fn call_everything() -> Outcome {
    let model = Model::open_default()?;
    let vocabulary = models(&model)?;
    let prompt = contexts(&model)?;
    evicted(&prompt)?;
    steered(&model, &prompt)?;
    raw(&prompt)?;
    drawn(&prompt)?;
    masked(&model, &prompt, &vocabulary)?;
    programmed(&model, &prompt)?;
    mixed(&model, &prompt)?;
    constrained(&model, &prompt)?;
    generated(&model, &prompt)?;
    generations::handed_over(&model, &prompt)?;
    looks::looked_at(&model, &prompt)?;
    beams::searched(&model, &prompt)?;
    session()
}

/// Tokens go from the middle, for all that comes after, and come back with what was before the hole.
fn evicted(prompt: &Context) -> Outcome {
    let whole = prompt.fork()?;
    whole
        .append(&prompt.model().encode("one two three four five six seven eight nine ten eleven twelve")?)?;
    let (tokens, length) = (whole.tokens(), whole.length());
    let expected = [&tokens[..2], &tokens[5..]].concat();
    let mut drawn = Vec::new();
    for (positions, is_computed) in [
        (Positions::Keep, true),
        (Positions::Keep, false),
        (Positions::CloseUp, true),
        (Positions::CloseUp, false),
    ] {
        let context = whole.fork()?;
        if is_computed {
            context.prefill()?;
        }
        context.evict(2, 5, positions)?;
        assert_eq!(context.tokens(), expected);
        let logprob = context.step(&Sampler::greedy())?.logprob;
        let fork = context.fork()?;
        fork.truncate(2)?;
        fork.append(&tokens[2..])?;
        assert!(is_near(fork.top(1)?.candidates[0].logprob, whole.fork()?.top(1)?.candidates[0].logprob));
        drawn.push(logprob);
    }
    let is_same = is_near(drawn[0], drawn[1]) && is_near(drawn[2], drawn[3]);
    assert!(is_same && !is_near(drawn[0], drawn[2]), "{drawn:?}");
    let context = whole.fork()?;
    context.evict(length - 3, length, Positions::Keep)?;
    assert_eq!(context.length(), length - 3, "to the end that is a truncation");
    for (start, end) in [(3, 2), (0, length)] {
        let refused = context.evict(start, end, Positions::Keep);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{start}..{end}: {refused:?}");
    }
    let mut n_holes = 0;
    let refused = loop {
        match whole.evict(n_holes + 1, n_holes + 2, Positions::CloseUp) {
            Ok(()) => n_holes += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::InvalidArgument { .. }) && n_holes == 7, "{n_holes} holes: {refused:?}");
    Ok(())
}

/// What is added to tokens changes what comes after them, follows forks and saved copies, and goes as it came.
fn steered(model: &Model, prompt: &Context) -> Outcome {
    let (n_layers, hidden_size) = (model.info().n_layers, model.info().hidden_size as usize);
    let logprob = |context: &Context| Ok::<f32, Error>(context.logprobs(&[100])?[0]);
    let plain = logprob(&prompt.fork()?)?;
    let vector = |value: f32| (0..hidden_size).map(|i| value * (i % 5) as f32).collect::<Vec<f32>>();
    let added = Steering::none().and(1, vector(0.5)).and(n_layers, vector(-0.25));
    let context = prompt.fork()?;
    context.steer(&Steering::none().and(1, vector(0.0)), 0)?;
    assert!(is_near(logprob(&context)?, plain), "zeros change nothing");
    context.steer(&added, 1)?;
    let moved = logprob(&context)?;
    assert!(!is_near(moved, plain), "{moved}");
    context.save("steered")?;
    let opened = model.saved_context("steered")?;
    forget("steered")?;
    for copy in [context.fork()?, opened] {
        let last = copy.tokens().pop().expect("a token");
        copy.truncate(copy.length() - 1)?;
        copy.append(&[last])?;
        assert!(is_near(logprob(&copy)?, moved));
    }
    context.steer(&Steering::none(), 0)?;
    assert!(is_near(logprob(&context)?, plain), "it was taken off");

    let gone = prompt.fork()?;
    gone.evict(1, 2, Positions::Keep)?;
    let refused = [
        context.steer(&Steering::none().and(n_layers + 1, vector(1.0)), 0),
        context.steer(&Steering::none().and(0, vec![1.0]), 0),
        context.steer(&Steering::none().and(0, vector(f32::NAN)), 0),
        context.steer(&added, context.length() + 1),
        gone.steer(&added, 0),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    Ok(())
}

/// Programs draw what their formulas say, and what they keep follows forks and truncations.
fn programmed(model: &Model, prompt: &Context) -> Outcome {
    let counting = model.program(&Definition::build(|b| {
        let n = b.state(3.0);
        n.set(n.get() + b.parameter(0));
        b.report(n.get());
        let x = (b.logits() + b.bias(BiasId(0)) + b.bias(BiasId(1))).keep(b.mask(MaskId(0)));
        x.draw(Source::SEED)
    }))?;
    assert!(counting.cost() > 1.0 && counting.cost() < 16.0);
    let sampler = Sampler::by_program(&counting, 1)?;
    let vocab_size = model.info().vocab_size;
    sampler.set_parameters(&[2.0])?;
    sampler.set_program_masks(&[&TokenMask::allow(model, &[10, 11, 12])?])?;
    let mut dense = vec![0.0; vocab_size as usize];
    dense[10] = f32::NEG_INFINITY;
    let biases = [TokenBias::sparse(model, &[(11, -1e6)])?, TokenBias::dense(model, &dense)?];
    sampler.set_program_biases(&[&biases[0], &biases[1]])?;
    assert!(matches!(sampler.set_temperature(0.5), Err(Error::InvalidArgument { .. })));

    let context = prompt.fork()?;
    assert!(context.reports().is_empty());
    for expected in [3.0, 5.0] {
        assert_eq!(context.step(&sampler)?.token, 12);
        assert_eq!(context.reports(), [expected]);
    }
    let fork = context.fork()?;
    fork.truncate(fork.length() - 1)?;
    assert_eq!((fork.step(&sampler)?.token, fork.reports()), (12, vec![5.0]));

    let refused = model.program(&Definition::build(|b| b.member(9).argmax()));
    match refused {
        Err(Error::InvalidArgument { value, .. }) => {
            assert!(value.contains("operation 0, member"), "{value}")
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}

/// A mixture is the same step by step, streamed and to its end, and its others get what the first does.
fn mixed(model: &Model, prompt: &Context) -> Outcome {
    let guided = model.program(&Definition::build(|b| {
        let x = library::guidance(b.logits(), b.member(0), b.parameter(0));
        library::temperature(x, 0.7).draw(Source::SEED)
    }))?;
    let sampler = Sampler::by_program(&guided, 3)?;
    sampler.set_parameters(&[1.5])?;
    let bare = model.context()?;
    bare.append_text("Once")?;
    let pair = || Ok::<_, Error>([prompt.fork()?, bare.fork()?]);

    let [first, other] = pair()?;
    let whole = Mixture::of(&first, [&other]).generate(&sampler).max_tokens(12).run()?;
    assert_eq!(other.tokens_from(bare.length()), whole.tokens);
    let [first, other] = pair()?;
    let two = Mixture::of(&first, [&other]);
    let tokens: Vec<Token> =
        whole.tokens.iter().map(|_| two.step(&sampler).map(|drawn| drawn.token)).collect::<Result<_, _>>()?;
    assert_eq!(tokens, whole.tokens);
    assert_eq!(other.tokens_from(bare.length()), whole.tokens);
    let [first, other] = pair()?;
    let mut stream = Mixture::of(&first, [&other]).stream(&sampler).max_tokens(12).open()?;
    for &token in &whole.tokens {
        assert_eq!(stream.next().expect("a token")?.token, token);
    }
    assert!(matches!(stream.guess(&[20]), Err(Error::InvalidArgument { .. })));

    // Without weight the other changes nothing.
    sampler.set_parameters(&[1.0])?;
    let [first, other] = pair()?;
    let drawn = Mixture::of(&first, [&other]).step(&sampler)?;
    let plain = Sampler::by_program(
        &model.program(&Definition::build(|b| library::temperature(b.logits(), 0.7).draw(Source::SEED)))?,
        3,
    )?;
    assert_eq!(prompt.fork()?.step(&plain)?.token, drawn.token);

    let word = Constraint::choice(model, ["left", "right"])?;
    sampler.set_constraint(Some(&word), &Beginning::FirstDraw)?;
    let [first, other] = pair()?;
    let text = Mixture::of(&first, [&other]).generate(&sampler).run()?.text;
    assert!(["left", "right"].contains(&text.as_str()), "{text}");
    sampler.set_constraint(None, &Beginning::FirstDraw)?;

    let twice = Mixture::of(&first, [&other, &other]).step(&sampler);
    assert!(matches!(twice, Err(Error::InvalidArgument { .. })), "{twice:?}");
    let by_chain = Mixture::of(&first, [&other]).step(&Sampler::greedy());
    assert!(matches!(by_chain, Err(Error::InvalidArgument { .. })), "{by_chain:?}");
    // A model with the same tokenizer.
    let small = Model::open("draft")?.context()?;
    small.append_text("Once")?;
    let n_before = small.length();
    sampler.set_parameters(&[1.5])?;
    let whole = Mixture::of(&prompt.fork()?, [&small.fork()?]).generate(&sampler).max_tokens(6).run()?;
    let (first, other) = (prompt.fork()?, small.fork()?);
    let mut stream = Mixture::of(&first, [&other]).stream(&sampler).max_tokens(6).open()?;
    for &token in &whole.tokens {
        assert_eq!(stream.next().expect("a token")?.token, token);
    }
    assert!(stream.next().is_none());
    assert_eq!(other.tokens_from(n_before), whole.tokens);
    sampler.set_constraint(Some(&word), &Beginning::FirstDraw)?;
    let text = Mixture::of(&prompt.fork()?, [&small]).generate(&sampler).run()?.text;
    assert!(["left", "right"].contains(&text.as_str()), "{text}");
    Ok(())
}

/// What keeps to a grammar is the same however it is drawn, and ends by itself.
fn constrained(model: &Model, prompt: &Context) -> Outcome {
    let schema =
        r#"{"type":"array","items":{"type":"integer","minimum":0,"maximum":99},"minItems":2,"maxItems":4}"#;
    let list = Constraint::json_schema(model, schema)?;
    let sampler = Sampler::seeded(5).temperature(1.5).constraint(&list).build()?;
    let whole = prompt.fork()?.generate(&sampler).run()?;
    assert_eq!((whole.finish, whole.is_finished()), (FinishReason::GrammarComplete, true), "{}", whole.text);
    let items: Vec<&str> = whole.text.trim_matches(['[', ']']).split(',').collect();
    assert!((2..=4).contains(&items.len()), "{}", whole.text);
    assert!(items.iter().all(|item| item.parse::<u32>().is_ok_and(|item| item < 100)), "{}", whole.text);

    let stepped = prompt.fork()?;
    for &token in &whole.tokens {
        assert_eq!(stepped.step(&sampler)?.token, token);
    }
    let end = stepped.step(&sampler)?.token;
    assert!(model.info().stop_tokens.contains(&end), "all that is left is an end");
    let guessed = prompt.fork()?;
    let guess = [&whole.tokens[..2], &[end, end]].concat();
    let drawn = speculate_all([(&guessed, &sampler, guess.as_slice())])?.remove(0);
    assert!(drawn.len() == 3 && drawn.iter().zip(&whole.tokens).all(|(a, &b)| a.token == b), "{drawn:?}");
    let streamed = prompt.fork()?.stream(&sampler).open()?;
    let tokens: Vec<Token> =
        streamed.map(|drawn| drawn.map(|drawn| drawn.token)).collect::<Result<_, _>>()?;
    assert_eq!(tokens, whole.tokens);

    // What is appended counts; put on anew, it begins anew; taken off, all is free.
    stepped.truncate(stepped.length() - 2)?;
    stepped.append_text("!")?;
    let position = stepped.length() - 1;
    match stepped.step(&sampler) {
        Err(Error::GrammarLeft { position: at, .. }) => assert_eq!(at, position),
        other => panic!("{other:?}"),
    }
    sampler.set_constraint(Some(&list), &Beginning::At(stepped.length()))?;
    assert!(model.decode(&[stepped.step(&sampler)?.token])?.starts_with('['));
    sampler.set_constraint(None, &Beginning::FirstDraw)?;
    stepped.step(&sampler)?;

    let by_program = Sampler::by_program(&model.program(&Definition::build(|b| b.logits().argmax()))?, 1)?;
    let word = Constraint::choice(model, ["left", "right"])?;
    by_program.set_constraint(Some(&word), &Beginning::FirstDraw)?;
    let text = prompt.fork()?.generate(&by_program).run()?.text;
    assert!(["left", "right"].contains(&text.as_str()), "{text}");
    let code = Constraint::regex(model, "[A-F]{4}")?;
    let hot = Sampler::seeded(2).temperature(2.0).constraint(&code).build()?;
    assert_eq!(prompt.fork()?.generate(&hot).run()?.text.len(), 4);
    let sum = Constraint::lark(model, "start: N \"+\" N\nN: /[0-9]/")?;
    let hot = Sampler::seeded(2).temperature(2.0).constraint(&sum).build()?;
    assert_eq!(prompt.fork()?.generate(&hot).run()?.text.as_bytes()[1], b'+');

    match Constraint::json_schema(model, r#"{"not":{}}"#) {
        Err(Error::GrammarRefused { place, reason }) => {
            assert!(place == "/not" && reason.contains("\"not\""), "{place}: {reason}");
        }
        other => panic!("{other:?}"),
    }
    let long = Constraint::regex(model, &"a".repeat(400_000)).map(drop);
    assert!(matches!(long, Err(Error::InvalidArgument { .. })), "{long:?}");
    let nothing = hot.set_constraint(Some(&sum), &Beginning::AfterText(String::new()));
    assert!(matches!(nothing, Err(Error::InvalidArgument { .. })), "{nothing:?}");
    let beyond = hot.set_constraint(Some(&sum), &Beginning::AfterToken(u32::MAX));
    assert!(matches!(beyond, Err(Error::TokenOutOfRange { .. })), "{beyond:?}");
    let other = prompt.fork()?;
    let drafts = Constraint::choice(&Model::open("draft")?, ["x"])?;
    hot.set_constraint(Some(&drafts), &Beginning::FirstDraw)?;
    assert!(matches!(other.step(&hot), Err(Error::ModelMismatch { .. })));
    Ok(())
}

fn is_near(a: f32, b: f32) -> bool {
    (a - b).abs() <= TOLERANCE
}

fn models(model: &Model) -> Result<Vec<Vec<u8>>, Error> {
    let info = model.info();
    assert_eq!(Model::names(), ["tiny", "draft"]);
    assert_eq!(Model::open("draft")?.info().tokenizer, info.tokenizer, "they share it");
    let tokens = model.encode("Once upon <|end|>")?;
    assert_eq!(model.decode(&tokens)?, "Once upon <|end|>");
    let markup = model.encode_markup("Once upon <|end|>")?;
    assert!(info.special_tokens.contains(markup.last().expect("some")));
    assert!(info.special_tokens.is_sorted() && model.decode(&markup)? == "Once upon ");
    let chat = model.encode_chat(&Chat::new().user("Hi"), ChatEnd::Assistant)?;
    assert!(chat.iter().any(|token| info.special_tokens.contains(token)));

    let vocabulary = model.vocabulary()?.to_vec();
    assert_eq!(vocabulary.len(), info.vocab_size as usize);
    for token in (0..info.vocab_size).step_by(97).chain(info.special_tokens.iter().copied()) {
        let bytes = model.token_bytes(token)?;
        let expected = if info.special_tokens.contains(&token) { &[][..] } else { &bytes };
        assert_eq!(vocabulary[token as usize], expected, "{token}");
    }
    let mut decoder = model.text_decoder();
    let mut text = String::new();
    for token in model.encode("naïve é")? {
        text += &decoder.push(token)?;
    }
    assert_eq!(text + &decoder.finish(), "naïve é");
    Ok(vocabulary)
}

fn contexts(model: &Model) -> Result<Context, Error> {
    let context = model.context()?;
    context.append_markup("<|begin_of_text|>")?;
    let n = context.append_text("Once upon a time there was")?;
    assert_eq!(context.length(), n + 1);
    context.prefill()?;
    context.save("tour")?;
    let saved = model.saved_context("tour")?;
    forget("tour")?;
    assert!(matches!(model.saved_context("tour"), Err(Error::NotFound { .. })));
    assert_eq!(saved.tokens(), context.tokens());
    let fork = context.fork()?;
    fork.append(&[40, 41])?;
    assert_eq!(fork.tokens_from(n + 1), [40, 41]);
    fork.truncate(n + 1)?;
    assert_eq!(fork.tokens(), context.tokens());
    assert!(context.capacity() > n);
    Ok(context)
}

/// Looking without drawing.
fn raw(prompt: &Context) -> Outcome {
    let (one, two) = (prompt.fork()?, prompt.fork()?);
    two.append(&[100])?;
    let continuation: Vec<Token> = one.model().encode(" a little dog who")?;
    let contexts = [&one, &two];
    let both = || contexts.map(|context| (context, continuation.as_slice()));

    let tops = top_all(contexts, 5)?;
    let rows = full_all(contexts)?;
    let hidden = embedding_all(contexts)?;
    let scores = score_all(both())?;
    let places = tops_all(both(), 1024)?;
    let logprobs = logprobs_all([(&one, &continuation[..1]), (&two, &[])])?;
    assert!(logprobs[1].is_empty() && is_near(logprobs[0][0], scores[0][0]));
    for idx in 0..2 {
        assert_eq!(hidden[idx].len(), one.model().info().hidden_size as usize);
        for next in &tops[idx].candidates {
            assert!(is_near(next.logprob, rows[idx][next.token as usize]));
        }
        assert_eq!(places[idx].len(), continuation.len());
        assert_eq!(places[idx][0].candidates[..5].len(), tops[idx].candidates.len());
        for ((place, &token), &score) in places[idx].iter().zip(&continuation).zip(&scores[idx]) {
            let among = place.candidates.iter().find(|next| next.token == token);
            assert!(among.is_none_or(|next| is_near(next.logprob, score)), "{token}: {among:?}, {score}");
            assert!(place.candidates.is_sorted_by(|a, b| a.logprob >= b.logprob) && place.entropy >= 0.0);
        }
        // Each place is what a question there gets.
        let walker = contexts[idx].fork()?;
        for (place, &token) in places[idx].iter().zip(&continuation) {
            let top = walker.top(3)?;
            let tokens = |candidates: &[Candidate]| candidates.iter().map(|c| c.token).collect::<Vec<_>>();
            assert_eq!(tokens(&top.candidates), tokens(&place.candidates[..3]));
            assert!(is_near(top.entropy, place.entropy));
            walker.append(&[token])?;
        }
    }
    assert_ne!(rows[0], rows[1]);
    let many = one.tops(&[100; 65], 1024);
    assert!(matches!(many, Err(Error::InvalidArgument { .. })), "{many:?}");
    let forks = (0..17).map(|_| one.fork()).collect::<Result<Vec<_>, _>>()?;
    let many = full_all(&forks).map(|rows| rows.len());
    assert!(matches!(many, Err(Error::InvalidArgument { .. })), "{many:?}");
    Ok(())
}

fn drawn(prompt: &Context) -> Outcome {
    let sampler = Sampler::seeded(seed()).temperature(0.9).build()?;
    let (stepped, guessed, streamed) = (prompt.fork()?, prompt.fork()?, prompt.fork()?);
    let mut tokens = Vec::new();
    for _ in 0..4 {
        tokens.push(step_all([(&stepped, &sampler)])?[0].token);
    }
    let all = speculate_all([(&guessed, &sampler, &tokens[..3])])?.remove(0);
    assert_eq!(all.iter().map(|drawn| drawn.token).collect::<Vec<_>>(), tokens);

    // What is right stands behind what is not, and beside it.
    let mut tree = GuessTree::new();
    tree.add_chain(None, &[tokens[0] ^ 1, tokens[1]]);
    let first = tree.add(None, tokens[0]);
    tree.add_chain(Some(first), &[tokens[1] ^ 1, tokens[2]]);
    tree.add_chain(Some(first), &tokens[1..3]);
    assert_eq!((tree.len(), tree.add(None, tokens[0]), tree.is_empty()), (7, first, false));
    let forks = [prompt.fork()?, prompt.fork()?];
    let all = speculate_tree_all(forks.iter().map(|fork| (fork, &sampler, &tree)))?;
    for (fork, drawn) in forks.iter().zip(&all) {
        assert_eq!(drawn.iter().map(|drawn| drawn.token).collect::<Vec<_>>(), tokens);
        assert_eq!(tree.n_right(drawn), 3);
        assert_eq!(fork.tokens(), stepped.tokens());
        // The KV of the branch is in its place.
        let [found, expected] = [fork.top(1)?, stepped.top(1)?].map(|top| top.candidates[0].logprob);
        assert!((found - expected).abs() <= TOLERANCE, "{found} {expected}");
    }

    let stream = streamed.stream(&sampler).stop_tokens(&tokens[3..]).open()?;
    let pulled: Vec<Token> = stream.map(|drawn| drawn.map(|drawn| drawn.token)).collect::<Result<_, _>>()?;
    let n_stop = tokens.iter().position(|&token| token == tokens[3]).expect("it is there");
    assert_eq!(pulled, tokens[..=n_stop]);
    streamed.truncate(prompt.length())?;
    let mut stream = streamed.stream(&sampler).stop_tokens(&tokens[3..]).max_tokens(40).open()?;
    assert_eq!(stream.finish(), None);
    stream.by_ref().try_for_each(|drawn| drawn.map(drop))?;
    assert_eq!(stream.finish(), Some(FinishReason::StopToken(tokens[3])));
    // Another sampler holds from the next token on.
    streamed.truncate(prompt.length())?;
    let mut stream = streamed.stream(&sampler).stop_tokens(&[]).max_tokens(2).open()?;
    stream.next().transpose()?;
    let greedy = Sampler::greedy();
    stream.set_sampler(&greedy)?;
    stream.guess(&[tokens[0]])?;
    stream.guess_tree(&tree)?;
    let best = streamed.top(1)?.candidates[0].token;
    assert_eq!(stream.next().transpose()?.map(|drawn| drawn.token), Some(best));
    assert_eq!((stream.next().is_none(), stream.finish()), (true, Some(FinishReason::MaxTokens)));

    // Each setting by itself: what would be drawn differently is of no matter here.
    let all = Sampler::seeded(1).build()?;
    all.set_temperature(0.7)?;
    all.set_top_k(Some(50))?;
    all.set_top_p(Some(0.9))?;
    all.set_min_p(Some(0.01))?;
    all.set_repetition_penalty(1.1)?;
    all.set_frequency_penalty(0.1)?;
    all.set_presence_penalty(0.1)?;
    all.set_penalty_last_n(Some(8))?;
    all.set_bias(&[(best, 0.5)])?;
    prompt.fork()?.step(&all)?;
    Ok(())
}

fn masked(model: &Model, prompt: &Context, vocabulary: &[Vec<u8>]) -> Outcome {
    let is_digit = |bytes: &[u8]| bytes.iter().all(u8::is_ascii_digit);
    let digits: Vec<Token> = (0..vocabulary.len() as Token)
        .filter(|&token| !vocabulary[token as usize].is_empty() && is_digit(&vocabulary[token as usize]))
        .collect();
    let others: Vec<Token> = (0..vocabulary.len() as Token).filter(|token| !digits.contains(token)).collect();
    // No token without text passes, though every one of them would pass the test.
    let masks = [
        TokenMask::allow(model, &digits)?,
        TokenMask::forbid(model, &others)?,
        TokenMask::allow_where(model, is_digit)?,
    ];
    let draw = |mask: &TokenMask| {
        let sampler = Sampler::seeded(5).temperature(3.0).build()?;
        sampler.set_mask(Some(mask))?;
        let tokens = prompt.fork()?.generate(&sampler).stop_tokens(&[]).max_tokens(12).run()?.tokens;
        assert!(tokens.iter().all(|token| digits.contains(token)), "{tokens:?}");
        Ok::<_, Error>(tokens)
    };
    let texts = [draw(&masks[0])?, draw(&masks[1])?, draw(&masks[2])?];
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let short = TokenMask::from_bits(model, &[1]).map(drop);
    assert!(matches!(short, Err(Error::InvalidArgument { .. })), "{short:?}");
    // Bits past the vocabulary are none.
    TokenMask::from_bits(model, &vec![u64::MAX; vocabulary.len().div_ceil(64)])?;
    Ok(())
}

fn generated(model: &Model, prompt: &Context) -> Outcome {
    let sampler = Sampler::seeded(seed()).build()?;
    let free = prompt.fork()?.generate(&sampler).stop_tokens(&[]).max_tokens(40).run()?;
    assert_eq!((free.finish, free.is_finished()), (FinishReason::MaxTokens, false));
    assert_eq!((free.tokens.len(), free.logprobs.len()), (40, 40));
    assert!(free.logprobs.iter().zip(&prompt.score(&free.tokens)?).all(|(a, b)| is_near(*a, *b)));

    // A seed of its own is as good as a sampler of its own, and forks have one each.
    let forks = prompt.forks(3, &sampler)?;
    let texts = generate_all(forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(8)))?;
    let again = (0..3).map(|_| prompt.fork()).collect::<Result<Vec<_>, _>>()?;
    let seeds = again
        .iter()
        .enumerate()
        .map(|(i, fork)| fork.generate(&sampler).seed(fork_seed(seed(), i as u64)).max_tokens(8));
    let same = generate_all(seeds)?;
    assert!(texts.iter().zip(&same).all(|(a, b)| a.tokens == b.tokens));
    assert!(texts.windows(2).any(|pair| pair[0].tokens != pair[1].tokens));

    // Stop texts that begin within a token, and at the beginning of one.
    let stop_token = free.tokens[7];
    for start in 4..16 {
        let stop: String = free.text.chars().skip(start).take(3).collect();
        let before = &free.text[..free.text.find(&stop).expect("taken from it")];
        for keeps_text in [false, true] {
            let context = prompt.fork()?;
            let mut request =
                context.generate(&sampler).stop_tokens(&[]).max_tokens(40).stop_at("\u{7}").stop_at(&stop);
            if keeps_text {
                request = request.keep_text_only();
            }
            let stopped = request.run()?;
            assert_eq!(
                (stopped.finish, stopped.is_finished()),
                (FinishReason::StopText(1), true),
                "{stop:?}"
            );
            assert_eq!(stopped.text, before, "{stop:?}");
            assert_eq!(stopped.tokens, free.tokens[..stopped.tokens.len()]);
            let kept = context.tokens_from(prompt.length());
            assert!(stopped.tokens.starts_with(&kept));
            if keeps_text {
                // As many whole tokens as the text has, and no more.
                assert!(before.starts_with(&model.decode(&kept)?), "{stop:?}");
                let longer = model.decode(&stopped.tokens[..kept.len() + 1])?;
                assert!(!before.starts_with(&longer), "{stop:?}: {longer:?} was cut off");
            } else {
                assert_eq!(kept, stopped.tokens);
            }
        }
    }
    let context = prompt.fork()?;
    let stopped = context.generate(&sampler).stop_tokens(&[stop_token]).keep_text_only().run()?;
    assert_eq!(stopped.finish, FinishReason::StopToken(stop_token));
    let n_kept = stopped.tokens.len() - 1;
    assert_eq!(context.tokens_from(prompt.length()), stopped.tokens[..n_kept]);
    assert_eq!(stopped.text, model.decode(&stopped.tokens[..n_kept])?);

    let nearly_full = model.context()?;
    nearly_full.append(&vec![100; nearly_full.capacity() as usize - 3])?;
    let full = nearly_full.generate(&sampler).stop_tokens(&[]).run()?;
    assert_eq!((full.finish, full.tokens.len()), (FinishReason::ContextFull, 3));
    Ok(())
}

/// The client sends nothing before it has had a text, then a message, a list of numbers, one more message, and its end.
fn session() -> Outcome {
    assert!(time_left() > Duration::ZERO && call_bytes() > 0);
    let tokens = usage().tokens;
    assert!(0 < tokens.used && tokens.used <= tokens.limit);
    let (in_vain, causes) = (usage().tokens_in_vain, usage().causes);
    assert_eq!(in_vain, causes.tokens_given_up + causes.tokens_guessed_wrong);
    let limits = limits();
    let limit = |name: &str| limits.iter().find(|limit| limit.name == name).expect("it is bounded");
    assert_eq!(limit("n_tokens").used, Some(usage().tokens.used));
    assert_eq!(limit("n_tokens").limit, tokens.limit);
    assert_eq!((limit("call_bytes").limit, limit("call_bytes").used), (call_bytes(), None));
    assert!(limit("memory_bytes").used.is_some_and(|used| 0 < used && used <= limit("memory_bytes").limit));
    log(LogLevel::Info, "all was called");
    assert!(matches!(try_receive()?, Inbox::NothingYet));
    assert!(matches!(receive_within(Duration::from_millis(20))?, Inbox::NothingYet));
    assert!(matches!(next_event(Some(Duration::from_millis(20)))?, Event::NothingYet));
    assert_eq!(leaving(), None, "the daemon goes on");
    emit("well\n")?;
    emit_tokens(&[1, 2, 3])?;
    assert_eq!(receive()?.as_deref(), Some("one"));
    assert_eq!(receive_json::<Vec<u32>>()?, Some(vec![1, 2]));
    let Inbox::Message(last) = receive_within(Duration::from_secs(60))? else {
        return Err("no message".into());
    };
    emit_json(&last)?;
    assert_eq!((receive()?, receive_json::<u32>()?), (None, None));
    assert!(matches!((try_receive()?, receive_within(Duration::MAX)?), (Inbox::Closed, Inbox::Closed)));
    assert!(matches!((next_event(None)?, receive_json_until_leaving::<u32>()?), (Event::Closed, None)));
    Ok(())
}
