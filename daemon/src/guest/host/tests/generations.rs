//! Generations that are handed over as they end, where the client is slow.

use trellis_engine::account::HostCharge;

use super::*;
use crate::guest::bindings::trellis::host::streams::HostGenerations;

#[tokio::test]
async fn what_is_given_up_while_its_text_waits_is_sent_whole_and_once() {
    let mut guest = guest_with(GuestLimits { output_bytes_in_flight: 600, ..GuestLimits::default() });
    let sampler = guest.sampler(5, 1.0);
    let alone = guest.context("Once upon a time").await;
    let request = guest.request(&alone, &sampler);
    let expected = guest.state.generate(vec![request]).await.expect("a text").remove(0);

    let slow = guest.context("Once upon a time").await;
    let slow = GenerateRequest { emit: Emit::Text, ..guest.request(&slow, &sampler) };
    // Those end soon, and each end gives up what the slow one waits for.
    let mut requests = vec![slow];
    for n_tokens in 1..12 {
        let quick = guest.context("Once upon a time").await;
        requests.push(GenerateRequest { max_tokens: Some(n_tokens), ..guest.request(&quick, &sampler) });
    }
    let all = HostGenerations::start(&mut guest.state, requests).await.expect("begun");
    let mut ended_first = Vec::new();
    for _ in 1..12 {
        let ended = HostGenerations::next(&mut guest.state, again(&all)).await.expect("no fault");
        ended_first.push(ended.expect("one ends").idx);
    }
    ended_first.sort_unstable();
    assert!(ended_first.iter().copied().eq(1..12), "{ended_first:?}");
    let mut text = String::new();
    let ended = {
        let last = HostGenerations::next(&mut guest.state, again(&all));
        let mut last = std::pin::pin!(last);
        loop {
            tokio::select! {
                ended = &mut last => break ended,
                output = guest.client.recv() => {
                    let output = output.expect("the guest is there");
                    guest.client.grant(output.credit_bytes());
                    if let GuestOutput::Text(piece) = output {
                        text += &piece;
                    }
                }
            }
        }
    };
    let ended = ended.expect("no fault").expect("the slow one");
    while let Some(GuestOutput::Text(piece)) = guest.client.try_recv() {
        text += &piece;
    }
    assert_eq!((ended.idx, ended.outcome.expect("a text").tokens), (0, expected.tokens));
    assert_eq!(text, expected.text);
}

#[tokio::test]
async fn what_generations_have_drawn_is_paid_for_until_it_is_taken() {
    const N_DRAWN: u32 = 30;
    let mut guest = guest();
    let account = guest.state.owner.account.clone();
    let used = || account.used(Metered::HostBytes);
    let sampler = guest.sampler(5, 1.0);
    let context = guest.context("Once upon a time").await;
    let before = used();
    let request = guest.request(&context, &sampler);
    let all = HostGenerations::start(&mut guest.state, vec![request]).await.expect("begun");
    let given = used() - before;
    let ended = HostGenerations::reach(&mut guest.state, again(&all), N_DRAWN).await.expect("no fault");
    assert!(ended.is_empty(), "more may be drawn");
    let with_drawn = used();
    let cancelled = HostGenerations::cancel(&mut guest.state, again(&all), 0).await.expect("under way");
    assert_eq!(used(), with_drawn, "its guest takes it over");
    guest.state.let_go_of_answer();
    // The context still has all tokens.
    let of_generation = with_drawn - used();
    let of_token = (size_of::<u32>() + size_of::<f32>()) as u64;
    let drawn = u64::from(N_DRAWN) * of_token + cancelled.text.len() as u64;
    assert!(of_generation >= given + drawn, "{of_generation} bytes for {given} and {drawn}");
    HostGenerations::drop(&mut guest.state, all).await.expect("there");
    HostContext::drop(&mut guest.state, context).expect("there");
    assert_eq!(used(), 0);
}

#[tokio::test]
async fn a_generation_that_has_no_room_for_what_it_draws_is_refused_and_its_context_as_it_was() {
    let mut guest = guest();
    let account = guest.state.owner.account.clone();
    let used = || account.used(Metered::HostBytes);
    let sampler = guest.sampler(5, 1.0);
    let context = guest.context("Once upon a time").await;
    let tokens = guest.tokens(&context);
    let request = guest.request(&context, &sampler);
    let all = HostGenerations::start(&mut guest.state, vec![request]).await.expect("begun");
    let rest = account.limit(Metered::HostBytes) - used() - 500;
    let _rest = HostCharge::new(&account, rest).expect("there is more");
    let ended = HostGenerations::next(&mut guest.state, again(&all)).await.expect("no fault");
    let error = ended.expect("one was begun").outcome.expect_err("40 tokens take more");
    let ApiError::BudgetExceeded(limit) = error else { panic!("{error:?}") };
    assert_eq!(limit.limit, account.limit(Metered::HostBytes));
    assert_eq!(guest.tokens(&context), tokens);
    assert!(HostGenerations::next(&mut guest.state, again(&all)).await.expect("no fault").is_none());
}
