//! A response as events: <https://platform.openai.com/docs/api-reference/responses-streaming>.

use serde::Serialize;
use serde_json::{Value, json};

use super::super::super::exchange::{Reason, Reply, Token};
use super::super::super::failure::Failure;
use super::super::super::sse::{Events, Frame};
use super::super::{new_id, to_json};
use super::{Ending, Form, N_TREES, Shown, items};

pub(super) struct ResponseEvents {
    form: Form,
    model: String,
    n_events: u64,
    /// Items that are over.
    output: Vec<Value>,
    /// The message that is under way.
    open: Option<Open>,
    reason: Option<Reason>,
}

struct Open {
    id: String,
    text: String,
    tokens: Vec<Token>,
}

impl ResponseEvents {
    pub(super) fn new(form: Form) -> Self {
        let (model, output, open, reason) = (String::new(), Vec::new(), None, None);
        Self { form, model, n_events: 0, output, open, reason }
    }

    fn frame(&mut self, kind: &'static str, mut data: Value) -> Frame {
        self.frame_of(kind, &mut data)
    }

    /// An event of data that is used again.
    fn frame_of(&mut self, kind: &'static str, data: &mut Value) -> Frame {
        data["type"] = kind.into();
        data["sequence_number"] = self.n_events.into();
        self.n_events += 1;
        Frame { event: Some(kind), data: data.to_string() }
    }

    /// An event of the response, as far as it is.
    fn response(&mut self, kind: &'static str, ending: &Ending) -> Frame {
        #[derive(Serialize)]
        struct Data<'a> {
            response: Shown<'a>,
            #[serde(rename = "type")]
            kind: &'static str,
            sequence_number: u64,
        }
        let response = self.form.response(&self.model, &self.output, ending);
        let data = to_json(&Data { response, kind, sequence_number: self.n_events });
        self.n_events += 1;
        Frame { event: Some(kind), data }
    }

    /// An event of a value at a place of the output, and the value.
    fn frame_with(&mut self, kind: &'static str, place: &Value, name: &str, value: Value) -> (Frame, Value) {
        let mut data = place.clone();
        data[name] = value;
        let frame = self.frame_of(kind, &mut data);
        (frame, data[name].take())
    }

    /// An item that comes at once.
    fn item(&mut self, item: Value) -> [Frame; 2] {
        let place = json!({ "output_index": self.output.len() });
        let (added, item) = self.frame_with("response.output_item.added", &place, "item", item);
        let (done, item) = self.frame_with("response.output_item.done", &place, "item", item);
        self.output.push(item);
        [added, done]
    }

    /// Begins the message, unless it is under way.
    fn open(&mut self) -> Vec<Frame> {
        if self.open.is_some() {
            return Vec::new();
        }
        let (id, idx) = (new_id("msg_"), self.output.len());
        let item = items::message(&id, "in_progress", Vec::new());
        let part = items::text_part("", None);
        let added = self.frame("response.output_item.added", json!({ "output_index": idx, "item": item }));
        let data = json!({ "item_id": id, "output_index": idx, "content_index": 0, "part": part });
        self.open = Some(Open { id, text: String::new(), tokens: Vec::new() });
        vec![added, self.frame("response.content_part.added", data)]
    }

    /// Ends the message that is under way.
    fn close(&mut self) -> Vec<Frame> {
        let Some(Open { id, text, tokens }) = self.open.take() else { return Vec::new() };
        let idx = self.output.len();
        let mut part = items::text_part(&text, self.form.has_logprobs.then_some(&tokens[..]));
        let place = json!({ "item_id": id, "output_index": idx, "content_index": 0 });
        let mut of_text = place.clone();
        of_text["text"] = text.into();
        let logprobs = part["logprobs"].take();
        let (text, logprobs) = self.frame_with("response.output_text.done", &of_text, "logprobs", logprobs);
        part["logprobs"] = logprobs;
        let (whole_part, part) = self.frame_with("response.content_part.done", &place, "part", part);
        let item = items::message(&id, "completed", vec![part]);
        let place = json!({ "output_index": idx });
        let (whole_item, item) = self.frame_with("response.output_item.done", &place, "item", item);
        self.output.push(item);
        vec![text, whole_part, whole_item]
    }

    fn piece(&mut self, text: &str, tokens: Vec<Token>) -> Vec<Frame> {
        let mut frames = self.open();
        let idx = self.output.len();
        let open = self.open.as_mut().expect("it was opened");
        open.text.push_str(text);
        let logprobs = items::logprobs_of(&tokens);
        open.tokens.extend(tokens);
        let data = json!({
            "item_id": open.id, "output_index": idx, "content_index": 0, "delta": text, "logprobs": logprobs,
        });
        frames.push(self.frame("response.output_text.delta", data));
        frames
    }

    fn call(&mut self, name: &str, arguments: &str) -> Vec<Frame> {
        let mut frames = self.close();
        let (id, idx) = (new_id("fc_"), self.output.len());
        let item = items::call(&id, &new_id("call_"), name, arguments);
        let mut begun = item.clone();
        begun["arguments"] = "".into();
        begun["status"] = "in_progress".into();
        let place = json!({ "item_id": id, "output_index": idx });
        let with = |name: &str, value: &str| {
            let mut data = place.clone();
            data[name] = value.into();
            data
        };
        frames.push(self.frame("response.output_item.added", json!({ "output_index": idx, "item": begun })));
        frames.push(self.frame("response.function_call_arguments.delta", with("delta", arguments)));
        let mut done = with("arguments", arguments);
        done["name"] = name.into();
        frames.push(self.frame("response.function_call_arguments.done", done));
        let place = json!({ "output_index": idx });
        let (whole, item) = self.frame_with("response.output_item.done", &place, "item", item);
        frames.push(whole);
        self.output.push(item);
        frames
    }
}

impl Events for ResponseEvents {
    const N_KEPT: u64 = N_TREES;

    fn begin(&mut self, model: &str, _: u32) -> Vec<Frame> {
        model.clone_into(&mut self.model);
        let begun = Ending { status: "in_progress", usage: None };
        ["response.created", "response.in_progress"].map(|kind| self.response(kind, &begun)).into()
    }

    fn take(&mut self, reply: Reply) -> Vec<Frame> {
        match reply {
            Reply::Thought { text, .. } => self.item(items::reasoning(&new_id("rs_"), &text)).into(),
            Reply::Piece { text, tokens, .. } => self.piece(&text, tokens),
            Reply::Call { name, arguments, .. } => self.call(&name, &arguments),
            Reply::Finished { reason, .. } => {
                self.reason = Some(reason);
                let mut frames = Vec::new();
                if reason != Reason::Calls {
                    // An empty answer is a message too.
                    frames = self.open();
                }
                frames.extend(self.close());
                frames
            }
            Reply::Ended(usage) => {
                let ending = Ending::of(self.reason, usage);
                let kind = match ending.status {
                    "incomplete" => "response.incomplete",
                    _ => "response.completed",
                };
                vec![self.response(kind, &ending)]
            }
            Reply::Begun { .. } | Reply::Embedding { .. } | Reply::Refused(_) => Vec::new(),
        }
    }

    fn fail(&mut self, failure: &Failure) -> Vec<Frame> {
        let data = json!({ "code": failure.code, "message": failure.message, "param": failure.param });
        vec![self.frame("error", data)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::exchange::Usage;
    use super::super::super::super::fields::Fields;
    use super::*;

    fn events() -> ResponseEvents {
        let body = json!({ "model": "tiny", "input": "Hello", "stream": true });
        let (_, form) = super::super::read(Fields::of(body, "").expect("an object")).expect("in order");
        ResponseEvents::new(form)
    }

    fn read(frames: &[Frame]) -> Vec<(String, Value)> {
        let read = |frame: &Frame| {
            let data: Value = serde_json::from_str(&frame.data).expect("JSON");
            assert_eq!(data["type"], frame.event.expect("a name"));
            (frame.event.expect("a name").to_owned(), data)
        };
        frames.iter().map(read).collect()
    }

    #[test]
    fn a_text_comes_in_deltas_inside_its_message() {
        let mut events = events();
        let mut frames = events.begin("tiny", 3);
        for text in ["8", "5"] {
            frames.extend(events.take(Reply::Piece { choice: 0, text: text.to_owned(), tokens: Vec::new() }));
        }
        frames.extend(events.take(Reply::Finished { choice: 0, reason: Reason::Stop, stop: None }));
        frames.extend(events.take(Reply::Ended(Usage::default())));
        let all = read(&frames);
        let kinds: Vec<&str> = all.iter().map(|(kind, _)| kind.trim_start_matches("response.")).collect();
        let expected = [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ];
        assert_eq!(kinds, expected);
        assert!(all.iter().enumerate().all(|(idx, (_, data))| data["sequence_number"] == idx));
        assert_eq!(all[9].1["response"]["output"][0]["content"][0]["text"], "85");
        assert_eq!(all[6].1["text"], "85");
    }

    #[test]
    fn a_call_is_an_item_of_its_own() {
        let mut events = events();
        events.begin("tiny", 3);
        let call = Reply::Call { choice: 0, name: "f".to_owned(), arguments: "{}".to_owned() };
        let mut frames = events.take(call);
        frames.extend(events.take(Reply::Finished { choice: 0, reason: Reason::Calls, stop: None }));
        frames.extend(events.take(Reply::Ended(Usage::default())));
        let all = read(&frames);
        let kinds: Vec<&str> = all.iter().map(|(kind, _)| kind.trim_start_matches("response.")).collect();
        let expected = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ];
        assert_eq!(kinds, expected);
        assert_eq!(all[4].1["response"]["output"][0]["type"], "function_call");
    }
}
