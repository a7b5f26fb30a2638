//! Long work in parts ends with its guest, and with its guest's processor time.

use super::*;
use crate::guest::error::GuestFault;

/// What a guest that is stopped may still take of processors.
const ENDS_WITHIN: Duration = Duration::from_millis(20);

const N_BYTES: usize = 1 << 20;

fn words() -> String {
    "one two three ".repeat(N_BYTES / 14)
}

fn one_word() -> String {
    "a".repeat(N_BYTES)
}

fn long_json() -> String {
    format!("[{}0]", "{\"a\": [1, 2, 3]}, ".repeat(N_BYTES / 4))
}

fn chat(content: &str, n_messages: usize) -> Vec<ChatMessage> {
    (0..n_messages).map(|_| ChatMessage { role: "user".to_owned(), content: content.to_owned() }).collect()
}

/// Gives a call up once it is under way; what its work takes then.
async fn time_after<T>(guest: &mut Guest, call: impl AsyncFnOnce(&mut GuestState) -> T) -> Duration {
    let (cpu, beside) = (guest.state.cpu.clone(), guest.state.beside.clone());
    let begun = cpu.used();
    {
        let mut call = std::pin::pin!(call(&mut guest.state));
        while cpu.used() == begun {
            assert!((&mut call).now_or_never().is_none(), "it is over before it is given up");
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
    }
    let given_up = cpu.used();
    while beside.is_busy() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    cpu.used() - given_up
}

#[tokio::test]
async fn work_for_a_guest_that_is_gone_ends_within_milliseconds() {
    let mut guest = guest();
    let model = guest.model("tiny");
    let model = &model;
    for text in [words(), one_word()] {
        let encode = async move |state: &mut GuestState| {
            HostModel::encode(state, again(model), text, SpecialTokens::Parse).await
        };
        let after = time_after(&mut guest, encode).await;
        assert!(after < ENDS_WITHIN, "a text: {after:?}");
    }
    for messages in [chat(&words(), 1), chat("", 20_000)] {
        let encode = async move |state: &mut GuestState| {
            HostModel::encode_chat(state, again(model), messages, ChatEnd::Assistant).await
        };
        let after = time_after(&mut guest, encode).await;
        assert!(after < ENDS_WITHIN, "a chat: {after:?}");
    }
    let after =
        time_after(&mut guest, async |state: &mut GuestState| state.emit_json(long_json()).await).await;
    assert!(after < ENDS_WITHIN, "JSON: {after:?}");
}

#[tokio::test]
async fn work_in_parts_ends_its_guest_when_that_has_had_its_processor_time() {
    let mut guest = guest_with(GuestLimits { cpu_ms: 2, ..GuestLimits::default() });
    let model = guest.model("tiny");
    let is_over = |fault: HostError| {
        let HostError::Fault(fault) = fault else { panic!("{fault:?}") };
        assert!(matches!(fault.downcast_ref(), Some(GuestFault::Cpu { .. })), "{fault}");
    };
    is_over(
        HostModel::encode(&mut guest.state, again(&model), words(), SpecialTokens::Parse)
            .await
            .expect_err("long"),
    );
    let messages = chat(&words(), 1);
    let chat = HostModel::encode_chat(&mut guest.state, again(&model), messages, ChatEnd::Assistant).await;
    is_over(chat.expect_err("long"));
    is_over(guest.state.emit_json(long_json()).await.expect_err("long"));
}

#[tokio::test]
async fn long_json_is_checked_as_short_is() {
    let mut guest = guest();
    let ApiError::InvalidArgument(refused) = refused(guest.state.emit_json(long_json() + ",").await) else {
        panic!("it is refused otherwise")
    };
    assert_eq!(refused.name, "json");
}
