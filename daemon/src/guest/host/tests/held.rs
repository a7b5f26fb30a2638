//! What holds a model, and until when.

use futures_util::FutureExt as _;
use trellis_engine::ModelHandle;

use super::*;
use crate::guest::bindings::trellis::host::models::HostTextDecoder;
use crate::guest::error::GuestEnd;

/// Whether unloading the model would have to wait for a guest.
fn is_waited_for(model: &ModelHandle) -> bool {
    model.idle().now_or_never().is_none()
}

#[tokio::test]
async fn a_model_is_held_as_long_as_anything_of_it() {
    let mut guest = guest();
    let draft = guest._engines[1].handle().clone();
    assert!(!is_waited_for(&draft));
    let handle = guest.model("draft");
    assert!(is_waited_for(&draft));
    let second = guest.model("draft");
    HostModel::drop(&mut guest.state, second).expect("a handle");
    assert!(is_waited_for(&draft), "the first handle is there");

    // Each thing alone, once the handle is gone.
    let decoder = HostTextDecoder::new(&mut guest.state, again(&handle)).expect("room");
    let mask = guest.state.allow(again(&handle), vec![1, 2]).expect("in range");
    let context = guest.state.create(again(&handle)).await.expect("a context");
    guest.state.append(again(&context), vec![1]).await.expect("appended");
    HostModel::drop(&mut guest.state, handle).expect("a handle");
    HostContext::drop(&mut guest.state, context).expect("a handle");
    HostTokenMask::drop(&mut guest.state, mask).expect("a handle");
    assert!(is_waited_for(&draft), "a decoder");
    HostTextDecoder::drop(&mut guest.state, decoder).expect("a handle");
    assert!(!is_waited_for(&draft));

    let handle = guest.model("draft");
    let mask = guest.state.allow(again(&handle), vec![1, 2]).expect("in range");
    HostModel::drop(&mut guest.state, handle).expect("a handle");
    let sampler = guest.sampler(1, 1.0);
    guest.state.set_mask(again(&sampler), Some(again(&mask))).expect("a mask");
    let copy = guest.state.with_seed(again(&sampler), 2).expect("room");
    HostTokenMask::drop(&mut guest.state, mask).expect("a handle");
    HostSampler::drop(&mut guest.state, sampler).expect("a handle");
    assert!(is_waited_for(&draft), "a sampler with a mask");
    guest.state.set_mask(again(&copy), None).expect("a sampler");
    assert!(!is_waited_for(&draft));

    let handle = guest.model("draft");
    let context = guest.state.create(again(&handle)).await.expect("a context");
    guest.state.append(again(&context), vec![1]).await.expect("appended");
    HostModel::drop(&mut guest.state, handle).expect("a handle");
    let fork = guest.state.fork(again(&context)).await.expect("room");
    HostContext::drop(&mut guest.state, context).expect("a handle");
    assert_eq!(guest.state.models.names_held(), ["draft"], "a fork");
    let stream = guest.stream(&fork, &copy, None);
    HostContext::drop(&mut guest.state, fork).expect("a handle");
    assert_eq!(guest.state.models.names_held(), ["draft"], "a stream");
    HostStream::drop(&mut guest.state, stream).expect("a handle");
    assert!(guest.state.models.names_held().is_empty() && !is_waited_for(&draft));
}

#[tokio::test]
async fn a_guest_loses_what_it_holds_and_nothing_else() {
    let mut guest = guest();
    let [tiny, draft] = [0, 1].map(|idx| guest._engines[idx].handle().clone());
    let models = guest.state.models.clone();
    let failed = || GuestEnd::Failed { message: "its own error".to_owned() };
    let handle = guest.model("draft");
    HostModel::drop(&mut guest.state, handle).expect("a handle");
    let of_tiny = guest.model("tiny");
    let mut lost = Box::pin(models.wait_for_loss());
    assert!((&mut lost).now_or_never().is_none());
    draft.end();
    assert!((&mut lost).now_or_never().is_none(), "it was let go before");
    assert_eq!(models.cause_of(failed()), failed());
    tiny.end();
    lost.await;
    // As a guest does that returns the error that it got.
    HostModel::drop(&mut guest.state, of_tiny).expect("a handle");
    models.wait_for_loss().await;
    let unloaded = GuestEnd::ModelUnloaded { model: "tiny".to_owned() };
    for end in [failed(), GuestEnd::Stopped, GuestEnd::ClientGone] {
        assert_eq!(models.cause_of(end), unloaded);
    }
    assert_eq!(models.cause_of(GuestEnd::Finished), GuestEnd::Finished);
}

#[tokio::test]
async fn masks_are_paid_for_by_bytes_as_long_as_anything_draws_under_them() {
    let mut guest = guest();
    let model = guest.model("tiny");
    let n_bytes = guest._engines[0].handle().limits().vocab_size.div_ceil(8) as u64;
    let account = guest.state.owner.account.clone();
    let used = || account.used(Metered::HostBytes);
    let mask = guest.state.allow(again(&model), vec![1, 2]).expect("in range");
    let other = guest.state.forbid(again(&model), vec![1]).expect("in range");
    assert_eq!(used(), 2 * n_bytes);
    HostTokenMask::drop(&mut guest.state, other).expect("a handle");
    assert_eq!(used(), n_bytes);
    let sampler = guest.sampler(1, 1.0);
    guest.state.set_mask(again(&sampler), Some(again(&mask))).expect("a mask");
    HostTokenMask::drop(&mut guest.state, mask).expect("a handle");
    let context = guest.context("Once").await;
    let of_context = used() - n_bytes;
    let stream = guest.stream(&context, &sampler, None);
    HostSampler::drop(&mut guest.state, sampler).expect("a handle");
    assert_eq!(used(), n_bytes + of_context, "the stream draws under it");
    HostStream::drop(&mut guest.state, stream).expect("a handle");
    assert_eq!(used(), of_context);

    let mut poor = guest_with(GuestLimits { host_bytes: 3 * n_bytes, ..GuestLimits::default() });
    let model = poor.model("tiny");
    let mut masks = Vec::new();
    for _ in 0..3 {
        masks.push(poor.state.allow(again(&model), vec![1]).expect("there is room"));
    }
    let error = refused(poor.state.allow(again(&model), vec![1]));
    let ApiError::BudgetExceeded(limit) = error else { panic!("{error:?}") };
    assert_eq!((limit.used, limit.requested, limit.limit), (3 * n_bytes, n_bytes, 3 * n_bytes));
    HostTokenMask::drop(&mut poor.state, masks.remove(0)).expect("a handle");
    poor.state.allow(again(&model), vec![1]).expect("there is room again");
}
