//! An answer as events: the blocks of the message one after the other, each in pieces.

use serde_json::{Value, json};

use super::{errors, shape};
use crate::http::exchange::{Reason, Reply, Usage};
use crate::http::failure::Failure;
use crate::http::sse::{Events, Frame};

/// The events of one message.
#[derive(Debug)]
pub(super) struct MessageEvents {
    answer: shape::Answer,
    /// The index of the block that is under way, or of the next.
    idx: usize,
    /// Whether a block of text is under way.
    is_open: bool,
    reason: Option<Reason>,
    stop: Option<String>,
}

impl MessageEvents {
    pub(super) fn of(answer: shape::Answer) -> Self {
        Self { answer, idx: 0, is_open: false, reason: None, stop: None }
    }

    fn start(&self, block: &Value) -> Frame {
        let data = json!({ "type": "content_block_start", "index": self.idx, "content_block": block });
        frame("content_block_start", &data)
    }

    fn delta(&self, delta: &Value) -> Frame {
        let data = json!({ "type": "content_block_delta", "index": self.idx, "delta": delta });
        frame("content_block_delta", &data)
    }

    fn stop(&mut self) -> Frame {
        let data = json!({ "type": "content_block_stop", "index": self.idx });
        self.idx += 1;
        frame("content_block_stop", &data)
    }

    /// The end of the text that is under way, if one is.
    fn close(&mut self) -> Option<Frame> {
        std::mem::take(&mut self.is_open).then(|| self.stop())
    }

    fn thought(&mut self, thought: &str) -> Vec<Frame> {
        let mut frames = Vec::from_iter(self.close());
        frames.push(self.start(&json!({ "type": "thinking", "thinking": "", "signature": "" })));
        frames.push(self.delta(&json!({ "type": "thinking_delta", "thinking": thought })));
        let signature = shape::signature(thought);
        frames.push(self.delta(&json!({ "type": "signature_delta", "signature": signature })));
        frames.push(self.stop());
        frames
    }

    fn text(&mut self, text: &str) -> Vec<Frame> {
        let mut frames = Vec::new();
        if text.is_empty() {
            return frames;
        }
        if !std::mem::replace(&mut self.is_open, true) {
            frames.push(self.start(&shape::text("")));
        }
        frames.push(self.delta(&json!({ "type": "text_delta", "text": text })));
        frames
    }

    fn call(&mut self, name: &str, arguments: &str) -> Vec<Frame> {
        let mut frames = Vec::from_iter(self.close());
        frames.push(self.start(&shape::tool_use(name, json!({}))));
        frames.push(self.delta(&json!({ "type": "input_json_delta", "partial_json": arguments })));
        frames.push(self.stop());
        frames
    }

    fn end(&self, usage: &Usage) -> Vec<Frame> {
        let end = self.answer.end(self.reason, self.stop.as_deref(), usage);
        let data = json!({ "type": "message_delta", "delta": end, "usage": shape::usage(usage) });
        vec![frame("message_delta", &data), frame("message_stop", &json!({ "type": "message_stop" }))]
    }
}

impl Events for MessageEvents {
    fn begin(&mut self, model: &str, prompt_tokens: u32) -> Vec<Frame> {
        let usage = Usage { prompt_tokens, ..Usage::default() };
        let end = self.answer.end(None, None, &usage);
        let message = self.answer.message(model, Vec::new(), end, shape::usage(&usage));
        let start = json!({ "type": "message_start", "message": message });
        vec![frame("message_start", &start), frame("ping", &json!({ "type": "ping" }))]
    }

    fn take(&mut self, reply: Reply) -> Vec<Frame> {
        match reply {
            Reply::Thought { text, .. } => self.thought(&text),
            Reply::Piece { text, .. } => self.text(&text),
            Reply::Call { name, arguments, .. } => self.call(&name, &arguments),
            Reply::Finished { reason, stop, .. } => {
                (self.reason, self.stop) = (Some(reason), stop);
                Vec::from_iter(self.close())
            }
            Reply::Ended(usage) => self.end(&usage),
            // There is one message, which has begun, and a refusal is a failure by now.
            Reply::Begun { .. } | Reply::Embedding { .. } | Reply::Refused(_) => Vec::new(),
        }
    }

    fn fail(&mut self, failure: &Failure) -> Vec<Frame> {
        vec![frame("error", &errors::body(failure, None))]
    }
}

fn frame(event: &'static str, data: &Value) -> Frame {
    Frame { event: Some(event), data: data.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(replies: Vec<Reply>) -> Vec<(&'static str, Value)> {
        let mut events = MessageEvents::of(shape::Answer::new(64));
        let mut frames = events.begin("tiny", 17);
        frames.extend(replies.into_iter().flat_map(|reply| events.take(reply)));
        let read = |frame: Frame| {
            let data: Value = serde_json::from_str(&frame.data).expect("JSON");
            let event = frame.event.expect("each has a name");
            assert_eq!(data["type"], event);
            (event, data)
        };
        frames.into_iter().map(read).collect()
    }

    fn piece(text: &str) -> Reply {
        Reply::Piece { choice: 0, text: text.to_owned(), tokens: Vec::new() }
    }

    #[test]
    fn blocks_come_one_after_the_other() {
        let told = told(vec![
            Reply::Thought { choice: 0, text: "Hm.".to_owned() },
            piece("Let me"),
            piece(""),
            piece(" see."),
            Reply::Call { choice: 0, name: "look".to_owned(), arguments: r#"{"at":1}"#.to_owned() },
            Reply::Finished { choice: 0, reason: Reason::Calls, stop: None },
            Reply::Ended(Usage { prompt_tokens: 17, completion_tokens: 9, ..Usage::default() }),
        ]);
        let kinds: Vec<&str> = told.iter().map(|(event, _)| *event).collect();
        let block = |n| {
            [&["content_block_start"][..], &["content_block_delta"; 2][..n], &["content_block_stop"]].concat()
        };
        let blocks = [block(2), block(2), block(1)].concat();
        assert_eq!(
            kinds,
            [vec!["message_start", "ping"], blocks, vec!["message_delta", "message_stop"]].concat()
        );
        assert_eq!(told[0].1["message"]["usage"]["input_tokens"], 17);
        let pieces: Vec<&Value> = told.iter().map(|(_, data)| &data["delta"]).collect();
        assert_eq!(pieces[3]["thinking"], "Hm.");
        assert_eq!((&pieces[7]["text"], &pieces[8]["text"]), (&json!("Let me"), &json!(" see.")));
        assert_eq!(pieces[11]["partial_json"], r#"{"at":1}"#);
        assert_eq!((&told[10].1["index"], &told[10].1["content_block"]["name"]), (&json!(2), &json!("look")));
        assert_eq!(told[13].1["delta"], json!({ "stop_reason": "tool_use", "stop_sequence": null }));
        assert_eq!(told[13].1["usage"]["output_tokens"], 9);
    }

    #[test]
    fn a_failure_in_the_middle_is_an_event() {
        let mut events = MessageEvents::of(shape::Answer::new(64));
        let frames = events.fail(&Failure::invalid("messages", "too long"));
        let expected =
            r#"{"error":{"message":"messages: too long","type":"invalid_request_error"},"type":"error"}"#;
        let data: Value = serde_json::from_str(expected).expect("JSON");
        assert_eq!((frames.len(), frames[0].event), (1, Some("error")));
        assert_eq!(serde_json::from_str::<Value>(&frames[0].data).expect("JSON"), data);
    }
}
