//! Output without end, and input that is not taken.

use std::io::Write;

use trellis_guest::bindings::trellis::host::session as raw;
use trellis_guest::{LogLevel, Model, Sampler, emit, emit_json, log, receive, try_receive};

use super::{number, without_end};
use crate::Outcome;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Option<Outcome> {
    Some(match mode {
        "log-lines" => number(rest, 0).and_then(log_lines),
        "log-long" => number(rest, 0).and_then(log_long),
        "stdout" => number(rest, 0).and_then(stdout),
        "stdout-lines" => number(rest, 0).and_then(stdout_lines),
        "stdout-bytes" => stdout_bytes(),
        "emit-empty" => without_end(|| emit("")),
        "emit-of" => number(rest, 0).and_then(emit_of),
        "emit-json" => without_end(|| emit_json(&1)),
        "emit-no-tokens" => without_end(|| raw::emit_tokens(&[]).map_err(trellis_guest::Error::from)),
        "generate-and-emit" => generate_and_emit(),
        "poll" => without_end(|| try_receive().map(drop)),
        "receive-and-sleep" => receive_and_sleep(),
        "answer-late" => answer_late(),
        "late-work" => late_work(),
        _ => return None,
    })
}

/// `log-lines N_BYTES`: line feeds, so many in a call.
fn log_lines(n_bytes: usize) -> Outcome {
    let text = "\n".repeat(n_bytes);
    loop {
        log(LogLevel::Info, &text);
    }
}

/// `log-long N_BYTES`: one line, so long.
fn log_long(n_bytes: usize) -> Outcome {
    let text = "x".repeat(n_bytes);
    loop {
        log(LogLevel::Info, &text);
    }
}

fn stdout(n_bytes: usize) -> Outcome {
    let text = "x".repeat(n_bytes);
    without_end(|| std::io::stdout().write_all(text.as_bytes()))
}

fn stdout_lines(n_bytes: usize) -> Outcome {
    let text = "\n".repeat(n_bytes);
    without_end(|| std::io::stdout().write_all(text.as_bytes()))
}

/// A byte a call.
fn stdout_bytes() -> Outcome {
    let mut out = std::io::stdout();
    without_end(|| out.write_all(b"x").and_then(|()| out.flush()))
}

fn emit_of(n_bytes: usize) -> Outcome {
    let text = "x".repeat(n_bytes);
    without_end(|| emit(&text))
}

fn generate_and_emit() -> Outcome {
    let root = Model::open_default()?.context()?;
    root.append_markup("<|begin_of_text|>Once upon a time")?;
    let sampler = Sampler::greedy();
    without_end(|| root.fork()?.generate(&sampler).stop_tokens(&[]).max_tokens(200).emit().run().map(drop))
}

/// Takes one message, then none.
fn receive_and_sleep() -> Outcome {
    receive()?;
    loop {
        std::thread::sleep(std::time::Duration::from_secs(1 << 20));
    }
}

/// Sends more than it was asked, for each message.
fn answer_late() -> Outcome {
    while let Some(message) = receive()? {
        for _ in 0..100 {
            emit(&message)?;
        }
    }
    Ok(())
}

/// What spins when it is dropped.
struct Late;

impl Drop for Late {
    fn drop(&mut self) {
        loop {
            std::hint::black_box(());
        }
    }
}

/// Goes on after its client has left, in a `drop`.
fn late_work() -> Outcome {
    let _late = Late;
    without_end(|| emit("x"))
}
