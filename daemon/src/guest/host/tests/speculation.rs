//! Streams and generations that guess.

use trellis_engine::account::HostCharge;

use super::*;
use crate::guest::bindings::trellis::host::constraints::{Beginning, Grammar, HostConstraint};
use crate::guest::bindings::trellis::host::decoding::{Guess, SpeculateTreeRequest};
use crate::guest::bindings::trellis::host::streams::{GuessSource, Speculation};

fn lookup(texts: Vec<Vec<u32>>) -> Option<Speculation> {
    Some(Speculation { source: GuessSource::Lookup(texts), max_guess: None })
}

fn draft(guest: &mut Guest, n_max: u32) -> Option<Speculation> {
    Some(Speculation { source: GuessSource::Draft(guest.model("draft")), max_guess: Some(n_max) })
}

fn options(speculation: Option<Speculation>) -> StreamOptions {
    StreamOptions { speculation, ..plain() }
}

fn usage(guest: &mut Guest) -> [u64; 2] {
    let usage = guest.state.get_usage().expect("usage");
    [usage.tokens_guessed, usage.tokens_accepted]
}

#[tokio::test]
async fn guesses_change_nothing_whatever_happens_meanwhile() {
    let mut guest = guest();
    follow_steps(&mut guest, 24, |guest, context, sampler| {
        let options = options(draft(guest, 6));
        HostStream::open(&mut guest.state, again(context), again(sampler), options).expect("a stream")
    })
    .await;
    assert!(usage(&mut guest)[0] > 0, "something was guessed");
    follow_steps(&mut guest, 12, |guest, context, sampler| {
        let options = options(lookup(vec![(0..100).collect()]));
        HostStream::open(&mut guest.state, again(context), again(sampler), options).expect("a stream")
    })
    .await;
}

#[tokio::test]
async fn what_repeats_is_guessed_and_generations_stay_the_same() {
    let mut guest = guest();
    let sampler = guest.sampler(0, 0.0);
    let text = "one two three four five six seven eight nine ten. ".repeat(3);
    let generate = |guest: &Guest, context: &Resource<GuestContext>, speculation| GenerateRequest {
        max_tokens: Some(120),
        speculation,
        ..guest.request(context, &sampler)
    };
    let plain = guest.context(&text).await;
    let request = generate(&guest, &plain, None);
    let expected = guest.text(request).await;
    // What repeats in the context is the model's affair; the text that it is to draw is found in any case.
    let mut sources = vec![(lookup(Vec::new()), false), (lookup(vec![expected.tokens.clone()]), true)];
    sources.push((draft(&mut guest, 15), true));
    for (speculation, guesses) in sources {
        let before = usage(&mut guest);
        let context = guest.context(&text).await;
        let request = generate(&guest, &context, speculation);
        let found = guest.text(request).await;
        assert_eq!((found.tokens, found.finish), (expected.tokens.clone(), expected.finish));
        assert_eq!(guest.tokens(&context), guest.tokens(&plain));
        assert!(!guesses || usage(&mut guest)[0] > before[0], "something was guessed");
    }
    assert!(usage(&mut guest)[1] > 0, "something was right");
}

/// What steps take is no matter of a guest's that only names a source.
#[tokio::test]
async fn a_draft_guesses_no_more_than_steps_take() {
    let small = EngineSettings { n_step_tokens: 4, ..EngineSettings::default() };
    let mut guest = guest_of(GuestLimits::default(), small);
    let sampler = guest.sampler(0, 0.0);
    let text = "one two three four one two three four one two three";
    let mut texts = Vec::new();
    for speculation in [None, draft(&mut guest, 15)] {
        let context = guest.context(text).await;
        let request =
            GenerateRequest { max_tokens: Some(60), speculation, ..guest.request(&context, &sampler) };
        let found = guest.text(request).await;
        texts.push(found.tokens);
    }
    assert_eq!(texts[0], texts[1]);
    assert!(usage(&mut guest)[0] > 0, "something was guessed");
}

/// A context with twenty tokens that were drawn one by one, and those.
async fn drawn_one_by_one(
    guest: &mut Guest,
    sampler: &Resource<GuestSampler>,
) -> (Resource<GuestContext>, Vec<u32>) {
    let context = guest.context("Once upon a time").await;
    let mut drawn = Vec::new();
    for _ in 0..20 {
        drawn.push(guest.step(&context, sampler).await);
    }
    (context, drawn)
}

#[tokio::test]
async fn a_guess_of_the_guest_counts_for_the_next_token_alone() {
    let mut guest = guest();
    let sampler = guest.sampler(5, 0.8);
    let (stepped, expected) = drawn_one_by_one(&mut guest, &sampler).await;
    let streamed = guest.context("Once upon a time").await;
    let stream = guest.stream(&streamed, &sampler, Some(20));
    guest.state.guess(again(&stream), expected[..6].to_vec()).expect("a guess");
    let mut drawn = Vec::new();
    while let Some(token) = guest.next(&stream).await {
        drawn.push(token);
        match drawn.len() {
            // Wrong at the second.
            9 => guest.state.guess(again(&stream), vec![expected[9], 0, 0]).expect("a guess"),
            // Never looked at: a later one takes its place.
            12 => guest.state.guess(again(&stream), vec![1, 2]).expect("a guess"),
            _ => {}
        }
        if drawn.len() == 12 {
            guest.state.guess(again(&stream), Vec::new()).expect("no guess");
        }
    }
    assert_eq!(drawn, expected);
    assert_eq!(usage(&mut guest), [6 + 3, 6 + 1]);
    assert_eq!(guest.tokens(&streamed), guest.tokens(&stepped));
}

#[tokio::test]
async fn a_tree_of_the_guest_changes_nothing_and_counts_for_the_next_token_alone() {
    let mut guest = guest();
    let sampler = guest.sampler(5, 0.8);
    let (stepped, expected) = drawn_one_by_one(&mut guest, &sampler).await;
    // What comes, each token behind one that does not come in its place.
    let tree = |comes: &[u32]| {
        let mut guesses: Vec<Guess> = Vec::new();
        let mut parent = None;
        for &token in comes {
            guesses.extend([Guess { token: token ^ 1, parent }, Guess { token, parent }]);
            parent = Some(guesses.len() as u32 - 1);
        }
        guesses
    };
    let streamed = guest.context("Once upon a time").await;
    let stream = guest.stream(&streamed, &sampler, Some(20));
    guest.state.guess_tree(again(&stream), tree(&expected[..6])).expect("a guess");
    let mut drawn = Vec::new();
    while let Some(token) = guest.next(&stream).await {
        drawn.push(token);
        match drawn.len() {
            // Past the end of the stream.
            18 => guest
                .state
                .guess_tree(again(&stream), tree(&[expected[18], expected[19], 7, 8]))
                .expect("a guess"),
            // In the place of a chain.
            9 => {
                guest.state.guess(again(&stream), vec![1, 2]).expect("a guess");
                guest.state.guess_tree(again(&stream), tree(&[expected[9], 3])).expect("a guess");
            }
            _ => {}
        }
    }
    assert_eq!(drawn, expected);
    // Twelve of which six were right, four of which one, and of the last those that the stream had room for.
    assert_eq!(usage(&mut guest), [12 + 4 + 2, 6 + 1 + 1]);
    assert_eq!(guest.tokens(&streamed), guest.tokens(&stepped));

    // In one call, beside a chain's context.
    let context = guest.context("Once upon a time").await;
    let request = SpeculateTreeRequest {
        context: again(&context),
        sampler: again(&sampler),
        guesses: tree(&expected[..10]),
    };
    let [found] = guest.state.speculate_tree(vec![request]).await.expect("tokens").try_into().expect("one");
    let found: Vec<u32> = found.into_iter().map(|drawn| drawn.token).collect();
    assert_eq!(found, expected[..11]);
    assert!(guest.tokens(&context).ends_with(&found));
    let error = refused(guest.state.guess_tree(again(&stream), vec![Guess { token: 1, parent: Some(0) }]));
    assert!(matches!(error, ApiError::InvalidArgument(_)), "{error:?}");
    let error =
        refused(guest.state.guess_tree(again(&stream), vec![Guess { token: u32::MAX, parent: None }]));
    assert!(matches!(error, ApiError::TokenOutOfRange(_)), "{error:?}");
}

#[tokio::test]
async fn what_cannot_be_guessed_by_is_refused_with_the_reason() {
    let mut guest = guest();
    let context = guest.context("Once").await;
    let sampler = guest.sampler(0, 0.0);
    let cases = [
        Speculation { source: GuessSource::Lookup(vec![vec![1; 70_000]]), max_guess: None },
        Speculation { source: GuessSource::Lookup(vec![vec![u32::MAX]]), max_guess: None },
        Speculation { source: GuessSource::Lookup(Vec::new()), max_guess: Some(0) },
        Speculation { source: GuessSource::Lookup(Vec::new()), max_guess: Some(16) },
    ];
    for (idx, speculation) in cases.into_iter().enumerate() {
        let options = options(Some(speculation));
        let error = refused(HostStream::open(&mut guest.state, again(&context), again(&sampler), options));
        match idx {
            1 => assert!(matches!(error, ApiError::TokenOutOfRange(_)), "{error:?}"),
            _ => assert!(matches!(error, ApiError::InvalidArgument(_)), "{error:?}"),
        }
    }
    let stream = guest.stream(&context, &sampler, None);
    let error = refused(guest.state.guess(again(&stream), vec![1; 16]));
    assert!(matches!(error, ApiError::InvalidArgument(_)), "{error:?}");
}

/// A sampler under a constraint that allows what neither model would write.
async fn unlikely(guest: &mut Guest) -> Resource<GuestSampler> {
    let model = guest.model("tiny");
    let grammar = Grammar::Regex("[qz]{80}".to_owned());
    let constraint = HostConstraint::compile(&mut guest.state, model, grammar).await.expect("a grammar");
    let sampler = guest.sampler(4, 1.0);
    guest.state.constrain(&sampler, Some(constraint), Beginning::FirstDraw).expect("put on");
    sampler
}

#[tokio::test]
async fn a_draft_guesses_under_the_constraint_of_what_it_guesses_for() {
    let mut guest = guest();
    let sampler = unlikely(&mut guest).await;
    let plain = guest.context("Once upon a time").await;
    let request = guest.request(&plain, &sampler);
    let expected = guest.text(request).await;
    let speculation = draft(&mut guest, 6);
    let context = guest.context("Once upon a time").await;
    let request = GenerateRequest { speculation, ..guest.request(&context, &sampler) };
    let found = guest.text(request).await;
    assert_eq!((found.tokens, found.finish), (expected.tokens, expected.finish));
    assert_eq!(found.logprobs, expected.logprobs);
    let [n_guessed, n_accepted] = usage(&mut guest);
    assert!(n_accepted > 0, "{n_accepted} of {n_guessed}: what a grammar refuses would never be right");
}

#[tokio::test]
async fn a_draft_without_memory_for_a_matcher_guesses_nothing() {
    let host_bytes = 4 << 20;
    let mut guest = guest_with(GuestLimits { host_bytes, ..GuestLimits::default() });
    let sampler = unlikely(&mut guest).await;
    let plain = guest.context("Once upon a time").await;
    let request = GenerateRequest { max_tokens: Some(20), ..guest.request(&plain, &sampler) };
    let expected = guest.text(request).await;
    let speculation = draft(&mut guest, 6);
    let context = guest.context("Once upon a time").await;
    let account = guest.state.owner.account.clone();
    // For the matcher of the context, and not for another one beside it.
    let rest = host_bytes - account.used(Metered::HostBytes) - (28 << 10);
    let _rest = HostCharge::new(&account, rest).expect("there is more");
    let request = GenerateRequest { max_tokens: Some(20), speculation, ..guest.request(&context, &sampler) };
    let found = guest.text(request).await;
    assert_eq!(found.tokens, expected.tokens);
    assert_eq!(usage(&mut guest)[0], 0);
}
