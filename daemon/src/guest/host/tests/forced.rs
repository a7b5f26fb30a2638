//! Tokens that a constraint forces, as guests see them.

use super::*;
use crate::guest::bindings::trellis::host::constraints::{Beginning, Grammar, HostConstraint};

/// Letters of which the vocabulary has no word: each is a token.
const ODD: &str = r"(~\^@){40}";

async fn forced(guest: &mut Guest) -> Resource<GuestSampler> {
    let model = guest.model("tiny");
    let grammar = Grammar::Regex(ODD.to_owned());
    let constraint = HostConstraint::compile(&mut guest.state, model, grammar).await.expect("a grammar");
    let sampler = guest.sampler(4, 1.0);
    guest.state.constrain(&sampler, Some(constraint), Beginning::FirstDraw).expect("put on");
    sampler
}

impl Guest {
    fn n_forced(&mut self) -> u64 {
        self.state.get_usage().expect("usage").tokens_forced
    }
}

#[tokio::test]
async fn what_ends_or_drops_a_text_within_what_is_forced_leaves_nothing_of_it() {
    let mut guest = guest();
    let sampler = forced(&mut guest).await;
    let stepped = guest.context("Once upon a time").await;
    let mut expected = Vec::new();
    for _ in 0..40 {
        expected.push(guest.step(&stepped, &sampler).await);
    }
    assert_eq!(guest.n_forced(), 0, "steps draw one token each");
    // Masks that are worked out no faster than steps are made leave nothing to spare.
    while guest.n_forced() == 0 {
        // Up to a text within.
        let context = guest.context("Once upon a time").await;
        let n_before = guest.tokens(&context).len();
        let request =
            GenerateRequest { stop_texts: vec!["@~^@".to_owned()], ..guest.request(&context, &sampler) };
        let text = guest.text(request).await;
        assert_eq!((text.finish, text.text.as_str()), (FinishReason::StopText(0), "~^"));
        let kept = guest.tokens(&context).split_off(n_before);
        assert!(expected.starts_with(&kept) && kept == text.tokens, "{kept:?}");
        assert_eq!(guest.step(&context, &sampler).await, expected[kept.len()]);
        // So many tokens.
        for n_max in [1, 7, 33] {
            let context = guest.context("Once upon a time").await;
            let request = GenerateRequest { max_tokens: Some(n_max), ..guest.request(&context, &sampler) };
            let text = guest.text(request).await;
            assert_eq!(
                (text.finish, &text.tokens[..]),
                (FinishReason::MaxTokens, &expected[..n_max as usize])
            );
            assert_eq!(guest.step(&context, &sampler).await, expected[n_max as usize]);
        }
        // A stream that is dropped.
        for n_pulled in [1, 2, 17] {
            let context = guest.context("Once upon a time").await;
            let stream = guest.stream(&context, &sampler, None);
            for token in &expected[..n_pulled] {
                assert_eq!(guest.next(&stream).await, Some(*token));
            }
            HostStream::drop(&mut guest.state, stream).expect("there");
            assert_eq!(guest.step(&context, &sampler).await, expected[n_pulled]);
            HostContext::drop(&mut guest.state, context).expect("there");
        }
    }
}
