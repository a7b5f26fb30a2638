//! What a guest sends, on the terminal or as JSON lines.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use trellis_client::{Event, GuestUsage, LogLevel};

use super::error::{CliError, ErrorObject};
use super::output::{Format, for_stream, remark, to_json};
use super::progress::ProgressDisplay;

/// Shows the events of one guest: its output on standard output, everything about it on standard error.
#[derive(Debug)]
pub(crate) struct Screen {
    format: Format,
    progress: ProgressDisplay,
    is_at_line_start: bool,
}

/// The last line of a guest's events in JSON.
#[derive(Serialize)]
#[serde(tag = "type", rename = "end")]
struct End<'a> {
    /// Whether all went well; of a replay, whether all was as recorded.
    ok: bool,
    /// How the run ended that was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<Recorded>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<&'a GuestUsage>,
}

/// The end of a recorded run.
#[derive(Serialize)]
struct Recorded {
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorObject>,
    /// Whether the recording lacks what the guest did and sent last.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    cut: bool,
}

/// What a recording has of its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Whole,
    /// Not what the guest did and sent last.
    Cut,
}

impl Screen {
    pub(crate) fn new(format: Format) -> Self {
        Self { format, progress: ProgressDisplay::new(format), is_at_line_start: true }
    }

    /// Waits until a progress bar is due, and draws it.
    pub(crate) async fn progress_due(&self) {
        self.progress.due().await;
    }

    /// Shows one event.
    ///
    /// # Errors
    /// The reader of the output is gone.
    pub(crate) fn show(&mut self, event: &Event) -> Result<(), CliError> {
        if self.format == Format::Json {
            return write(|out| writeln!(out, "{}", to_json(event)));
        }
        match event {
            // In the middle of a line of the guest there is no place for a bar.
            Event::Progress { .. } if !self.is_at_line_start => {}
            Event::Progress { stage, name, done, total } => {
                self.progress.stage(stage, name.as_deref(), *done, *total);
            }
            Event::Started { .. } | Event::Attached { .. } => self.progress.finish(),
            Event::Text { text } => {
                self.progress.finish();
                self.is_at_line_start = text.chars().next_back().map_or(self.is_at_line_start, |c| c == '\n');
                write(|out| out.write_all(for_stream(text, &io::stdout()).as_bytes()))?;
            }
            Event::Tokens { tokens } => {
                let tokens: Vec<String> = tokens.iter().map(u32::to_string).collect();
                self.line(&tokens.join(" "))?;
            }
            Event::Json { json } => self.line(json)?,
            Event::Log { level, line } => {
                self.progress.finish();
                self.break_line_if_shared();
                remark(&logged(level, line));
            }
            Event::Wanted | Event::Recorded { .. } | Event::Profiled { .. } | Event::Unknown => {}
        }
        Ok(())
    }

    /// Writes a line of its own.
    fn line(&mut self, line: &str) -> Result<(), CliError> {
        self.progress.finish();
        let start = if self.is_at_line_start { "" } else { "\n" };
        self.is_at_line_start = true;
        write(|out| writeln!(out, "{start}{}", for_stream(line, &io::stdout())))
    }

    /// Output and errors often meet on one terminal; neither should end in the middle of the other's line.
    fn break_line_if_shared(&mut self) {
        if !self.is_at_line_start && io::stdout().is_terminal() && io::stderr().is_terminal() {
            remark("");
            self.is_at_line_start = true;
        }
    }

    /// What the guest has sent so far is a text of its own: what comes next begins in a new line.
    ///
    /// # Errors
    /// The reader of the output is gone.
    pub(crate) fn end_text(&mut self) -> Result<(), CliError> {
        if !std::mem::replace(&mut self.is_at_line_start, true) {
            write(|out| out.write_all(b"\n"))?;
        }
        Ok(())
    }

    /// Says something about the guest, to people only.
    pub(crate) fn note(&mut self, line: &str) {
        self.break_line_if_shared();
        super::output::note(self.format, line);
    }

    /// The guest has ended.
    ///
    /// # Errors
    /// The reader of the output is gone.
    pub(crate) fn end(
        &mut self,
        error: Option<ErrorObject>,
        usage: Option<&GuestUsage>,
    ) -> Result<(), CliError> {
        self.close(&End { ok: error.is_none(), recorded: None, error, usage })
    }

    /// A replayed guest did all as it was recorded, up to this end of the recorded run.
    ///
    /// # Errors
    /// The reader of the output is gone.
    pub(crate) fn end_as_recorded(
        &mut self,
        error: Option<ErrorObject>,
        extent: Extent,
    ) -> Result<(), CliError> {
        let (ok, cut) = (error.is_none(), extent == Extent::Cut);
        let recorded = Some(Recorded { ok, error, cut });
        self.close(&End { ok: true, recorded, error: None, usage: None })
    }

    fn close(&mut self, end: &End<'_>) -> Result<(), CliError> {
        self.progress.finish();
        match self.format {
            Format::Json => write(|out| writeln!(out, "{}", to_json(end))),
            Format::Text => {
                self.break_line_if_shared();
                Ok(())
            }
        }
    }
}

fn write(write: impl FnOnce(&mut io::StdoutLock<'static>) -> io::Result<()>) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    write(&mut out).and_then(|()| out.flush()).map_err(CliError::from_output)
}

/// A line of a guest's log, which must not look like an error of this program.
fn logged(level: &LogLevel, line: &str) -> String {
    let level = match level {
        LogLevel::Warn => "warning",
        level => level.as_str(),
    };
    format!("guest log, {level}: {line}")
}

#[cfg(test)]
mod tests {
    use trellis_client::{ErrorBody, ErrorCode};

    use super::*;

    #[test]
    fn the_end_is_one_json_line() {
        let end = End { ok: true, recorded: None, error: None, usage: None };
        assert_eq!(to_json(&end), r#"{"type":"end","ok":true}"#);
        let error = ErrorBody::new(ErrorCode::GuestTrapped, "unreachable");
        let end = End { ok: false, recorded: None, error: Some(error.clone().into()), usage: None };
        let expected = r#"{"type":"end","ok":false,"error":{"code":"guest_trapped","message":"unreachable","retryable":false}}"#;
        assert_eq!(to_json(&end), expected);
        let recorded = Some(Recorded { ok: false, error: Some(error.clone().into()), cut: false });
        let end = End { ok: true, recorded, error: None, usage: None };
        let expected = r#"{"type":"end","ok":true,"recorded":{"ok":false,"error":{"code":"guest_trapped","message":"unreachable","retryable":false}}}"#;
        assert_eq!(to_json(&end), expected);
    }

    #[test]
    fn a_log_line_is_plainly_the_guests() {
        let shown = [LogLevel::Error, LogLevel::Warn].map(|level| logged(&level, "error: no disk"));
        assert_eq!(shown, ["guest log, error: error: no disk", "guest log, warning: error: no disk"]);
    }
}
