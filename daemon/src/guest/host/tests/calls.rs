//! What a call holds while it is under way, and what its answer takes until the next one.

use futures_util::FutureExt as _;
use trellis_engine::account::HostCharge;

use super::*;
use crate::guest::bindings::trellis::host::session;
use crate::guest::error::GuestFault;
use crate::guest::host::Taped;
use crate::guest::tape::Tape;

#[tokio::test]
async fn a_text_that_waits_for_the_client_is_paid_for_as_long_as_it_waits() {
    const N_BYTES: usize = 100_000;
    let mut guest = guest_with(GuestLimits { output_bytes_in_flight: 600, ..GuestLimits::default() });
    let account = guest.state.owner.account.clone();
    let used = || account.used(Metered::HostBytes);
    {
        let mut waiting = Box::pin(guest.state.emit_text("x".repeat(N_BYTES)));
        assert!((&mut waiting).now_or_never().is_none(), "the client takes nothing");
        assert_eq!(used(), N_BYTES as u64);
    }
    assert_eq!(used(), 0, "it was given up");
    let _rest = HostCharge::new(&account, account.limit(Metered::HostBytes) - 50_000).expect("there is more");
    let error = refused(guest.state.emit_text("x".repeat(N_BYTES)).await);
    let ApiError::BudgetExceeded(limit) = error else { panic!("{error:?}") };
    assert_eq!(limit.requested, N_BYTES as u64);
}

#[tokio::test]
async fn a_long_answer_is_paid_for_until_the_next_call() {
    let mut guest = guest();
    let account = guest.state.owner.account.clone();
    let used = || account.used(Metered::HostBytes);
    let context = guest.context("Once").await;
    let n_bytes = 4 * guest._engines[0].handle().limits().vocab_size as u64;
    let before = used();
    let mut taped = Taped(&mut guest.state);
    let rows = DecodingHost::full(&mut taped, vec![again(&context)]).await.expect("a row");
    assert_eq!(size_of_val(&*rows[0]) as u64, n_bytes);
    assert_eq!(used(), before + n_bytes);
    HostContext::length(&mut taped, again(&context)).expect("a context");
    assert_eq!(used(), before);

    let rest = account.limit(Metered::HostBytes) - before - (n_bytes - 1);
    let _rest = HostCharge::new(&account, rest).expect("there is more");
    let n_tokens = account.used(Metered::Tokens);
    let error = refused(guest.state.full(vec![again(&context)]).await);
    let ApiError::BudgetExceeded(limit) = error else { panic!("{error:?}") };
    assert_eq!(limit.requested, n_bytes);
    assert_eq!(account.used(Metered::Tokens), n_tokens, "what is refused is not computed");
}

#[test]
fn what_a_call_answers_is_paid_for_until_the_guest_calls_again() {
    const N_BYTES: u64 = 100_000;
    let mut guest = guest();
    let account = guest.state.owner.account.clone();
    guest.state.arguments = vec!["x".repeat(N_BYTES as usize)];
    let before = account.used(Metered::HostBytes);
    let arguments = session::Host::arguments(&mut Taped(&mut guest.state)).expect("there is room");
    assert_eq!(arguments, guest.state.arguments);
    assert_eq!(account.used(Metered::HostBytes) - before, N_BYTES);
    session::Host::seed(&mut Taped(&mut guest.state)).expect("a number");
    assert_eq!(account.used(Metered::HostBytes), before);
    let rest = account.limit(Metered::HostBytes) - before - N_BYTES + 1;
    let _rest = HostCharge::new(&account, rest).expect("there is more");
    let fault = session::Host::arguments(&mut Taped(&mut guest.state)).expect_err("one byte too many");
    assert!(matches!(fault.downcast_ref(), Some(GuestFault::HostBytes(_))), "{fault}");
}

#[tokio::test]
async fn a_recorded_call_pays_for_the_copy_of_its_arguments() {
    const N_BYTES: u64 = 100_000;
    let mut guest = guest();
    let account = guest.state.owner.account.clone();
    guest.state.tape = Some(Tape::record(blake3::hash(b"a component"), &guest.state.limits, &account));
    let rest = account.limit(Metered::HostBytes) - account.used(Metered::HostBytes) - N_BYTES + 1;
    let _rest = HostCharge::new(&account, rest).expect("there is more");
    let text = || "x".repeat(N_BYTES as usize);
    let error = session::Host::emit_text(&mut Taped(&mut guest.state), text()).await;
    let ApiError::BudgetExceeded(limit) = refused(error) else { panic!("it is refused otherwise") };
    assert_eq!(limit.requested, N_BYTES);
}
