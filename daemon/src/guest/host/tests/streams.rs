//! Streams and generations against steps.

use super::*;
use crate::guest::host::contexts::lock;

#[tokio::test]
async fn a_stream_counts_its_tokens_and_stays_ended() {
    let mut guest = guest();
    let context = guest.context("The answer is").await;
    let sampler = guest.sampler(3, 1.0);
    let stream = guest.stream(&context, &sampler, Some(5));
    let mut n_given = 0;
    while guest.next(&stream).await.is_some() {
        n_given += 1;
        guest.state.append(again(&context), vec![50]).await.expect("appended");
    }
    assert_eq!(n_given, 5, "appended tokens are not the stream's");
    assert!(guest.next(&stream).await.is_none());

    // A stop token is given and ends the stream, even if the guest goes on with the context.
    let stop = {
        let fork = guest.state.fork(again(&context)).await.expect("a fork");
        guest.step(&fork, &sampler).await;
        guest.step(&fork, &sampler).await
    };
    let options = StreamOptions { stop_tokens: vec![stop], ..plain() };
    let stream =
        HostStream::open(&mut guest.state, again(&context), again(&sampler), options).expect("a stream");
    let mut last = None;
    while let Some(token) = guest.next(&stream).await {
        last = Some(token);
    }
    assert_eq!(last, Some(stop));
    guest.state.append(again(&context), vec![50]).await.expect("appended");
    assert!(guest.next(&stream).await.is_none());
    assert_eq!(
        HostStream::finish(&mut guest.state, again(&stream)).expect("a stream"),
        Some(FinishReason::StopToken(stop))
    );

    // The stream alone keeps the context alive.
    let stream = guest.stream(&context, &sampler, None);
    HostContext::drop(&mut guest.state, context).expect("there");
    assert!(guest.next(&stream).await.is_some());
    assert_eq!(guest.state.owner.account.used(Metered::Contexts), 2, "the fork and the stream's");
}

#[tokio::test]
async fn generate_is_many_streams_at_once() {
    let mut guest = guest();
    let mut expected = Vec::new();
    let mut requests = Vec::new();
    let mut contexts = Vec::new();
    for seed in 0..3 {
        let alone = guest.context("Once upon a time").await;
        let sampler = guest.sampler(seed, 1.0);
        let mut tokens = Vec::new();
        for _ in 0..40 {
            tokens.push(guest.step(&alone, &sampler).await);
        }
        expected.push(tokens);
        let context = guest.context("Once upon a time").await;
        requests.push(guest.request(&context, &sampler));
        contexts.push(context);
    }
    let completions = guest.state.generate(requests).await.expect("three texts");
    for ((completion, expected), context) in completions.iter().zip(&expected).zip(&contexts) {
        assert_eq!(completion.tokens, *expected);
        assert_eq!(completion.finish, FinishReason::MaxTokens);
        assert_eq!(completion.logprobs.len(), 40);
        assert!(completion.logprobs.iter().all(|&logprob| logprob <= 0.0));
        assert!(guest.tokens(context).ends_with(expected));
        let model = guest.model("tiny");
        assert_eq!(completion.text, guest.state.decode(model, expected.clone()).await.expect("text"));
    }
}

#[tokio::test]
async fn a_stop_text_ends_the_text_before_it() {
    let mut guest = guest();
    let sampler = guest.sampler(0, 0.0);
    let free = guest.context("Once upon a time").await;
    let request = guest.request(&free, &sampler);
    let [all] = guest.state.generate(vec![request]).await.expect("a text").try_into().expect("one");
    let middle = all.text.char_indices().nth(all.text.chars().count() / 2).expect("some text").0;
    let end = all.text[middle..].char_indices().nth(3).expect("more text").0 + middle;
    let stop = all.text[middle..end].to_owned();
    let context = guest.context("Once upon a time").await;
    let n_before = guest.tokens(&context).len();
    let request = GenerateRequest {
        stop_texts: vec![stop.clone()],
        emit: Emit::Text,
        ..guest.request(&context, &sampler)
    };
    let [stopped] = guest.state.generate(vec![request]).await.expect("a text").try_into().expect("one");
    assert_eq!(stopped.finish, FinishReason::StopText(0));
    assert_eq!(stopped.text, all.text[..all.text.find(&stop).expect("taken from it")]);
    assert!(all.tokens.starts_with(&stopped.tokens) && stopped.tokens.len() < all.tokens.len());
    assert_eq!(guest.tokens(&context)[n_before..], stopped.tokens);
    let mut shown = String::new();
    while shown.len() < stopped.text.len() {
        let Some(GuestOutput::Text(piece)) = guest.client.recv().await else { panic!("text") };
        shown += &piece;
    }
    assert_eq!(shown, stopped.text);
    // Nothing that was decoded ahead is left in the context.
    let next = guest.step(&context, &sampler).await;
    assert_eq!(next, all.tokens[stopped.tokens.len()]);
}

#[tokio::test]
async fn a_failed_generation_leaves_every_context_as_it_was() {
    let mut guest = guest();
    let (good, bad) = (guest.context("Once").await, guest.context("upon").await);
    let sampler = guest.sampler(1, 1.0);
    let model = guest.model("tiny");
    let nothing = HostTokenMask::allow(&mut guest.state, model, Vec::new()).expect("a mask");
    let stuck = guest.sampler(1, 1.0);
    guest.state.set_mask(again(&stuck), Some(nothing)).expect("set");
    let before = [guest.tokens(&good), guest.tokens(&bad)];
    let requests = vec![guest.request(&good, &sampler), guest.request(&bad, &stuck)];
    let error = refused(guest.state.generate(requests).await);
    assert!(matches!(error, ApiError::NoToken(_)), "{error:?}");
    assert_eq!([guest.tokens(&good), guest.tokens(&bad)], before);
}

/// What has come for the stream and was not pulled, once it is so much.
async fn ahead(guest: &Guest, stream: &Resource<GuestStream>, n_tokens: usize) -> Vec<u32> {
    let stream = guest.state.table.get(stream).expect("there");
    loop {
        let ahead = lock(&stream.cell).ahead(stream.key);
        if ahead.len() >= n_tokens {
            return ahead;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn what_came_ahead_is_a_guess_under_changed_settings() {
    let mut guest = guest();
    let sampler = guest.sampler(3, 1.0);
    let context = guest.context("Once upon a time").await;
    let stream = guest.stream(&context, &sampler, None);
    let guesses = |guest: &mut Guest| {
        let usage = guest.state.get_usage().expect("usage");
        (usage.tokens_guessed, usage.tokens_accepted)
    };
    for _ in 0..4 {
        guest.next(&stream).await.expect("no end yet");
    }
    let ahead = ahead(&guest, &stream, 3).await;
    // Another sampler, which draws the same.
    let same = guest.sampler(3, 1.0);
    guest.state.set_sampler(again(&stream), again(&same)).expect("changed");
    for &token in &ahead {
        assert_eq!(guest.next(&stream).await, Some(token));
    }
    let n_ahead = ahead.len() as u64;
    assert_eq!(guesses(&mut guest), (n_ahead, n_ahead));
    // Of a change at each token nothing is guessed but the first time.
    for _ in 0..3 {
        guest.state.set_sampler(again(&stream), again(&same)).expect("changed");
        guest.next(&stream).await.expect("no end yet");
    }
    let (n_guessed, _) = guesses(&mut guest);
    for _ in 0..6 {
        guest.state.set_sampler(again(&stream), again(&same)).expect("changed");
        guest.next(&stream).await.expect("no end yet");
    }
    assert_eq!(guesses(&mut guest).0, n_guessed);
}
