//! Messages, and the end of the daemon, as a guest waits for them.

use trellis_engine::account::HostCharge;

use super::*;
use crate::guest::bindings::trellis::host::session::{Event, Host as SessionHost, Inbox};

const LONG: Duration = Duration::from_secs(100);

/// A guest whose client has sent a message.
async fn told(text: &str) -> (Guest, crate::guest::InboxSender) {
    let mut guest = guest();
    let (sender, receiver) = inbox(4, 1 << 10);
    guest.state.input = receiver;
    sender.send(text.to_owned(), HostCharge::none(&guest.state.owner.account)).await.expect("it is there");
    (guest, sender)
}

fn is_leaving(event: &Event) -> bool {
    matches!(event, Event::Leaving(left_ms) if (1..=LONG.as_millis() as u64).contains(left_ms))
}

#[tokio::test]
async fn events_are_messages_until_the_daemon_leaves() {
    let (mut guest, sender) = told("one").await;
    let state = &mut guest.state;
    assert_eq!(state.leaving_ms().expect("it has no error"), None);
    let event = state.next_event(None).await.expect("it is there");
    assert!(matches!(&event, Event::Message(text) if text == "one"), "{event:?}");
    for wait_ms in [0, 20] {
        let event = state.next_event(Some(wait_ms)).await.expect("it waits");
        assert!(matches!(event, Event::NothingYet), "{event:?}");
    }
    drop(sender);
    let event = state.next_event(None).await.expect("it is there");
    assert!(matches!(event, Event::Closed), "{event:?}");
}

#[tokio::test]
async fn the_daemons_end_comes_before_messages_and_takes_none() {
    let (mut guest, _sender) = told("one").await;
    guest.drain.begin(Instant::now() + LONG);
    for wait_ms in [None, Some(0), Some(20)] {
        let event = guest.state.next_event(wait_ms).await.expect("it is there");
        assert!(is_leaving(&event), "{event:?}");
    }
    let left_ms = guest.state.leaving_ms().expect("it has no error").expect("it leaves");
    assert!((1..=LONG.as_millis() as u64).contains(&left_ms), "{left_ms}");
    let received = guest.state.receive(Some(0)).await.expect("it is there");
    assert!(matches!(&received, Inbox::Message(text) if text == "one"), "{received:?}");
}

#[tokio::test]
async fn who_waits_hears_of_the_daemons_end_at_once() {
    let (mut guest, _sender) = told("one").await;
    let _ = guest.state.receive(Some(0)).await.expect("it is there");
    let Guest { state, drain, .. } = &mut guest;
    {
        let mut waiting = Box::pin(state.next_event(None));
        assert!((&mut waiting).now_or_never().is_none(), "it stays");
        drain.begin(Instant::now() + LONG);
        let event = (&mut waiting).now_or_never().expect("it is told").expect("it has no error");
        assert!(is_leaving(&event), "{event:?}");
    }
    // The time of the wait is no longer counted as one.
    let (_, idle) = state.deadline.spent();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(state.deadline.spent().1, idle);
}
