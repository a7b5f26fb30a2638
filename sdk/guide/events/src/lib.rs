//! Sends one event of each kind: what programs read from `trellis run --json`.

use serde::Serialize;
use trellis_guest::{LogLevel, Model, Result, emit, emit_json, emit_tokens, log, messages};

trellis_guest::main!(run);

#[derive(Serialize)]
struct Report {
    model: String,
    n_messages: usize,
}

fn run() -> Result {
    let model = Model::open_default()?;
    log(LogLevel::Info, "it begins");
    emit!("some text\n")?;
    emit_tokens(&model.encode("some text")?)?;
    let n_messages = messages().count();
    emit_json(&Report { model: model.info().name.clone(), n_messages })
}
