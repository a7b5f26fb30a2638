//! Generations that are handed over as they end, where the client is slow.

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
