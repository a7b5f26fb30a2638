//! What components of 0.1 are answered where today's functions have another shape.

use super::*;
use crate::guest::bindings::trellis::host::decoding::Host as _;
use crate::guest::host::taped::Taped;
use crate::guest::host::v0_1::bindings::trellis::host as old;

/// The error as a component of 0.1 gets it.
#[track_caller]
fn refused_then<T: std::fmt::Debug>(
    taped: &mut Taped<'_>,
    result: Result<T, HostError>,
) -> old::types::Error {
    old::types::Host::convert_error(taped, result.expect_err("refused")).expect("not a fault")
}

#[tokio::test]
async fn what_was_asked_of_one_context_is_asked_of_many() {
    let mut guest = guest();
    let context = guest.context("Once upon a time").await;
    let tokens = vec![5, 6, 7];
    let row = guest.state.full(vec![again(&context)]).await.expect("a row");
    let hidden = guest.state.embedding(vec![again(&context)]).await.expect("a state");
    let request = LogprobsRequest { context: again(&context), tokens: tokens.clone() };
    let logprobs = guest.state.logprobs(vec![request]).await.expect("three");

    let mut taped = Taped(&mut guest.state);
    let full = old::decoding::Host::full(&mut taped, again(&context)).await;
    assert_eq!(full.expect("a row"), row[0]);
    let embedding = old::decoding::Host::embedding(&mut taped, again(&context)).await;
    assert_eq!(embedding.expect("a state"), hidden[0]);
    let then = old::decoding::Host::logprobs(&mut taped, again(&context), tokens).await;
    assert_eq!(then.expect("three"), logprobs[0]);
}

#[tokio::test]
async fn a_generation_has_one_log_probability_and_one_stop() {
    let mut guest = guest();
    let sampler = guest.sampler(3, 1.0);
    let free = guest.context("Once upon a time").await;
    let request = guest.request(&free, &sampler);
    let all = guest.state.generate(vec![request]).await.expect("a text").remove(0);
    let stop_tokens = vec![all.tokens[9]];
    let n_tokens = all.tokens.iter().position(|token| *token == stop_tokens[0]).expect("it is there") + 1;

    let context = guest.context("Once upon a time").await;
    let n_before = guest.tokens(&context).len();
    let request = old::streams::GenerateRequest {
        context: again(&context),
        sampler: again(&sampler),
        max_tokens: Some(40),
        stop_tokens,
        stop_strings: vec!["\u{7}".to_owned()],
        emit: old::streams::Emit::Nothing,
    };
    let then = old::streams::Host::generate(&mut Taped(&mut guest.state), vec![request]).await;
    let then = then.expect("a text").remove(0);
    assert!(matches!(then.finish, old::streams::FinishReason::Stop));
    assert_eq!(then.tokens, all.tokens[..n_tokens]);
    let sum: f64 = all.logprobs[..n_tokens].iter().map(|&logprob| f64::from(logprob)).sum();
    assert_eq!(then.logprob, sum as f32);
    assert_eq!(guest.tokens(&context)[n_before..], then.tokens, "the context keeps all of them");
}

#[tokio::test]
async fn errors_without_a_case_become_the_nearest_one() {
    let mut guest = guest();
    let handles: Vec<_> = guest._engines.iter().map(|engine| engine.handle().clone()).collect();
    let models = Models::new(handles.clone(), Vec::new());
    guest.state.models = Arc::new(GuestModels::new(models.clone(), None));
    let draft = guest.model("draft");
    models.send_off("draft").expect("it is loaded");
    handles[1].close();

    let is_leaving = |error| match error {
        ApiError::ModelLeaving(unknown) => {
            (unknown.name, unknown.known) == ("draft".into(), vec!["tiny".into()])
        }
        _ => false,
    };
    assert!(is_leaving(refused(HostModel::open(&mut guest.state, Some("draft".to_owned())).await)));
    assert!(is_leaving(refused(guest.state.create(again(&draft)).await)));
    let opened = HostContext::open(&mut guest.state, again(&draft), "kept".to_owned()).await;
    assert!(is_leaving(refused(opened)));

    let mut taped = Taped(&mut guest.state);
    let opened = old::models::HostModel::open(&mut taped, Some("draft".to_owned())).await;
    let error = refused_then(&mut taped, opened);
    assert!(
        matches!(&error, old::types::Error::UnknownModel(unknown) if unknown.known == ["tiny"]),
        "{error:?}"
    );
    let created = old::contexts::HostContext::create(&mut taped, again(&draft)).await;
    let error = refused_then(&mut taped, created);
    assert!(
        matches!(&error, old::types::Error::EngineFailed(reason) if reason == "the model was unloaded"),
        "{error:?}"
    );
    let error = refused_then::<()>(&mut taped, Err(ApiError::NotANumber("a NaN".to_owned()).into()));
    assert!(matches!(&error, old::types::Error::NoToken(reason) if reason == "a NaN"), "{error:?}");
}
