//! What the host refuses, with value and limit.

use super::*;

#[tokio::test]
async fn mistakes_are_typed_errors_with_value_and_limit() {
    let mut guest = guest();
    let error = refused(HostModel::open(&mut guest.state, Some("llama".to_owned())).await);
    let ApiError::UnknownModel(unknown) = error else { panic!("{error:?}") };
    assert_eq!(
        (unknown.name.as_str(), unknown.known),
        ("llama", vec!["tiny".to_owned(), "draft".to_owned()])
    );

    let sampler = guest.sampler(1, 1.0);
    for error in [
        refused(guest.state.set_temperature(again(&sampler), f32::NAN)),
        refused(guest.state.set_top_p(again(&sampler), Some(0.0))),
        refused(guest.state.set_min_p(again(&sampler), Some(1.5))),
        refused(guest.state.set_top_k(again(&sampler), Some(0))),
        refused(guest.state.set_repetition_penalty(again(&sampler), -1.0)),
        refused(guest.state.set_frequency_penalty(again(&sampler), f32::INFINITY)),
        refused(guest.state.set_bias(again(&sampler), vec![(1, f32::NAN)])),
    ] {
        let ApiError::InvalidArgument(argument) = error else { panic!("{error:?}") };
        assert!(!argument.value.is_empty() && !argument.expected.is_empty(), "{argument:?}");
    }
    assert_eq!(guest.state.table.get(&sampler).expect("there").settings.temperature, 1.0, "nothing changed");

    let context = guest.context("Once").await;
    let vocab_size = 4096;
    let error = refused(guest.state.append(again(&context), vec![vocab_size]).await);
    let ApiError::TokenOutOfRange(range) = error else { panic!("{error:?}") };
    assert_eq!((range.token, range.vocab_size), (vocab_size, vocab_size));
    guest.state.set_bias(again(&sampler), vec![(vocab_size, 1.0)]).expect("checked when it is used");
    let request = StepRequest { context: again(&context), sampler: again(&sampler), others: Vec::new() };
    assert!(matches!(refused(guest.state.step(vec![request]).await), ApiError::TokenOutOfRange(_)));

    let capacity = guest.state.capacity(again(&context)).expect("a context");
    let error = refused(guest.state.append(again(&context), vec![1; capacity as usize]).await);
    let ApiError::ContextFull(limit) = error else { panic!("{error:?}") };
    assert_eq!(limit.n_positions, capacity);
    assert!(limit.n_tokens > capacity);
    assert!(matches!(
        refused(guest.state.truncate(again(&context), 1_000).await),
        ApiError::InvalidArgument(argument) if argument.value == "1000"
    ));

    let twice = vec![again(&context), again(&context)];
    assert!(matches!(
        refused(DecodingHost::top(&mut guest.state, twice, 3).await),
        ApiError::InvalidArgument(_)
    ));
    assert!(matches!(
        refused(DecodingHost::top(&mut guest.state, vec![again(&context)], 0).await),
        ApiError::InvalidArgument(_)
    ));
    let empty = vec![ScoreRequest { context: again(&context), continuation: Vec::new() }];
    assert!(matches!(refused(guest.state.score(empty).await), ApiError::InvalidArgument(_)));

    let asked = |n| vec![LogprobsRequest { context: again(&context), tokens: vec![1; n] }];
    let error = refused(guest.state.logprobs(asked(1025)).await);
    assert!(
        matches!(&error, ApiError::InvalidArgument(argument)
            if argument.value.starts_with("1025") && argument.expected.contains("1024")),
        "{error:?}"
    );
    let logprobs = guest.state.logprobs(asked(1024)).await.expect("as many as may be");
    assert_eq!(logprobs[0].len(), 1024);

    let tiny = guest.model("tiny");
    let bare = guest.state.create(tiny).await.expect("a context");
    assert!(matches!(refused(guest.state.embedding(vec![again(&bare)]).await), ApiError::EmptyContext));

    let draft = guest.model("draft");
    let mask = HostTokenMask::allow(&mut guest.state, again(&draft), vec![1]).expect("a mask");
    let masked = guest.sampler(1, 1.0);
    guest.state.set_mask(again(&masked), Some(mask)).expect("set");
    let request = StepRequest { context: again(&context), sampler: masked, others: Vec::new() };
    assert!(matches!(refused(guest.state.step(vec![request]).await), ApiError::ModelMismatch(_)));

    let missing = refused(HostContext::open(&mut guest.state, again(&draft), "nothing".to_owned()).await);
    assert!(matches!(missing, ApiError::NotFound(name) if name == "nothing"));
    assert!(matches!(refused(guest.state.forget("nothing".to_owned()).await), ApiError::NotFound(_)));
    assert!(matches!(refused(guest.state.forget(String::new()).await), ApiError::InvalidArgument(_)));

    let message = ChatMessage { role: "wizard".to_owned(), content: "hi".to_owned() };
    let error = refused(guest.state.encode_chat(draft, vec![message], ChatEnd::Assistant).await);
    assert!(!matches!(error, ApiError::ChatTemplate(_)), "the role is wrong, not the template: {error:?}");
    assert!(matches!(refused(guest.state.emit_json("{".to_owned()).await), ApiError::InvalidArgument(_)));
}

#[tokio::test]
async fn budgets_say_their_numbers() {
    let mut guest = guest_with(GuestLimits { n_contexts: 2, ..GuestLimits::default() });
    guest.state.table.set_max_capacity(6);
    let context = guest.context("Once").await;
    let _fork = guest.state.fork(again(&context)).await.expect("a second");
    let error = refused(guest.state.fork(again(&context)).await);
    let ApiError::BudgetExceeded(budget) = error else { panic!("{error:?}") };
    assert_eq!(
        (budget.what.as_str(), budget.used, budget.requested, budget.limit),
        ("contexts of the guest", 2, 1, 2)
    );

    let used = guest.state.get_usage().expect("usage").tokens.used;
    let row = guest.state.full(vec![again(&context)]).await.expect("a row").remove(0);
    assert_eq!(row.len(), 4096);
    let sum: f32 = row.iter().map(|logprob| logprob.exp()).sum();
    assert!((sum - 1.0).abs() <= 1e-3, "{sum}");
    let metered = guest.state.get_usage().expect("usage").tokens.used - used;
    let n_computed = guest.tokens(&context).len() as u64;
    assert!(
        (4..=4 + n_computed).contains(&metered),
        "4096 entries are 4 tokens, on top of the context's: {metered}"
    );

    while guest.state.table.push(()).is_ok() {}
    let error = refused(HostModel::open(&mut guest.state, None).await);
    assert!(matches!(error, ApiError::BudgetExceeded(budget) if budget.what.contains("host objects")));
}

#[tokio::test]
async fn a_slow_client_holds_up_its_guest_and_a_lost_one_cancels() {
    let mut guest = guest_with(GuestLimits {
        output_bytes_in_flight: 64 + OUTPUT_OVERHEAD_BYTES,
        ..GuestLimits::default()
    });
    let text = "é".repeat(100);
    let waited = tokio::time::timeout(Duration::from_millis(50), guest.state.emit_text(text.clone())).await;
    assert!(waited.is_err(), "200 bytes do not fit in 64, whatever they cost beside");
    let error = refused(guest.state.emit_json(format!("\"{text}\"")).await);
    assert!(
        matches!(error, ApiError::BudgetExceeded(budget) if budget.limit == 64 && budget.requested == 202)
    );
    let Guest { mut state, client, _engines, .. } = guest;
    let (sent, ()) = tokio::join!(state.emit_tokens(vec![1; 100]), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(client);
    });
    assert!(matches!(refused(sent), ApiError::Cancelled));
}
