//! Answers one request of an HTTP API: what the daemon's HTTP front has it run, whichever API the request came by. It follows no
//! paper: that an API is a guest like any other is what it shows. A copy of it with another sampler is a decoding policy of one's own, which
//! a request names (`"trellis": {"guest": "NAME"}`).
//!
//! The request is JSON, all messages joined up to the end of messages; `request` has its form:
//!
//! ```text
//! {"chat": {"messages": [{"role": "user", "content": "What is 37 + 48?"}], "settings": {"temperature": 0.0}}}
//! ```
//!
//! What is sent is JSON too (`reply`): `{"begun": …}` once the request is found to be in order, then what there is of each choice
//! (`thought`, `piece`, `call`, `finished`), and `{"ended": …}` with what it took. A mistake of whoever asks is `{"refused": …}`, with the
//! part of the request that it is about.
//!
//! ```text
//! trellis run http-chat      then type the line above, and end with Ctrl-D
//! ```

mod answer;
mod choice;
mod complete;
mod embed;
mod prompt;
mod reply;
mod request;
mod sampling;
mod stops;
mod tools;

use trellis_guest::{Args, Model, Result, messages};

use crate::reply::{Refusal, Reply};
use crate::request::Request;

trellis_guest::main!(run);

fn run() -> Result {
    Args::of_session("http-chat").optional_text()?;
    let text = messages().collect::<Result<String>>()?;
    let outcome = match serde_json::from_str(&text) {
        Ok(request) => serve(request),
        Err(error) => Err(Refusal::invalid("request", error.to_string())),
    };
    match outcome {
        Ok(()) => Ok(()),
        Err(refusal) => Reply::Refused(refusal).send(),
    }
}

fn serve(request: Request) -> Result<(), Refusal> {
    // Opening a model may load it.
    let model = Model::open_default;
    match request {
        Request::Chat(chat) => answer::chat(&model()?, &chat),
        Request::Complete(complete) => complete::complete(&model()?, &complete),
        Request::Embed(embed) => embed::embed(&model()?, &embed),
        Request::Count(chat) => prompt::count(&model()?, &chat),
        // It is about what is on disk alone.
        Request::Forget(name) => prompt::forget(&name),
    }
}
