//! `trellis attach`: shows what a detached guest sends.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::sync::Mutex;
use tokio_util::task::AbortOnDropHandle;
use trellis_client::{Error, Resumed};

use super::connect::SocketArgs;
use super::error::{CliError, ErrorObject};
use super::input::{self, Sent};
use super::interrupt::Interrupts;
use super::output::Format;
use super::patience::Patience;
use super::screen::Screen;
use super::seconds::seconds;

const EXAMPLES: &str = "\
Examples:
  trellis run --detach ./my-guest \"Hello\"   says the guest's number, 12 for one
  trellis attach 12                         what it has sent and sends, to its end
  trellis attach 12 --from 40               from its event 40 on, counted from 0
  trellis attach 12 --messages < more.txt   each line becomes a message to it
  trellis attach 12 --json | jq             its events, one JSON object a line

Ctrl-C detaches: the guest goes on. `trellis stop 12` ends it. The daemon keeps what a guest sends until it was shown
here, and the last of that for who attaches again. A guest that is ahead by sessions.detached_bytes waits, as part of its
limits.deadline_ms; one that nobody is attached to for sessions.detached_idle_ms is ended (`trellis limits detached`). A
connection that is lost is made again, and a daemon that starts or is replaced waited for; with --messages it ends the reading, as lines that were on their way are lost too.
Whoever attaches last reads the guest; this command ends then.

The output and the exit status are those of `trellis run`.";

/// Show what a detached guest of yours sends
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AttachArgs {
    /// The guest's number, as `trellis run --detach` and `trellis ps` say it
    guest_id: u64,
    /// Begin with this event of the guest, counted from 0; otherwise with the oldest that is kept
    #[arg(long, value_name = "N")]
    from: Option<u64>,
    /// Send the lines of standard input to the guest as messages; after the last one no more will come for it
    #[arg(long)]
    messages: bool,
    /// Wait so long without a sign of it for a daemon that starts or is replaced; otherwise 120
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    wait: Option<Duration>,
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn attach(args: AttachArgs, format: Format) -> Result<(), CliError> {
    let AttachArgs { guest_id, from, messages, wait, socket } = args;
    let interrupts = Interrupts::watch()?;
    let screen = &mut Screen::new(format);
    let mut patience = Patience::new(wait, format);
    let mut first = Some(interrupts.stop(patience.connect(&socket)).await?);
    let patience = Arc::new(Mutex::new(patience));
    let connect = || {
        let (first, socket, patience) = (first.take(), socket.clone(), patience.clone());
        async move {
            match first {
                Some(client) => Ok(client),
                None => patience.lock().await.connect_again(&socket).await,
            }
        }
    };
    let mut guest = Resumed::new(guest_id, from, connect);
    if messages {
        // Lines that are on their way when a connection is lost are lost with it, and the user is to hear of that.
        guest = guest.with_patience(Duration::ZERO);
    }
    // What is refused before anything is read is no end of a guest.
    interrupts.stop(async { Ok(guest.attached().await?) }).await?;
    // A guest may say nothing before it is told something.
    let sender = if messages { guest.sender() } else { None };
    let mut sending = sender.map(|sender| AbortOnDropHandle::new(tokio::spawn(input::send_lines(sender))));
    let (mut has_messages, mut sent) = (sending.is_some(), Sent::All);
    let (error, usage) = loop {
        tokio::select! {
            biased;
            () = interrupts.first() => {
                let next = guest.next_number().map(|next| format!(" --from {next}")).unwrap_or_default();
                screen.note(&format!("detached; `trellis attach {guest_id}{next}` goes on, `trellis stop {guest_id}` ends the guest"));
                return Err(CliError::Interrupted);
            }
            event = guest.next() => match event {
                Some(Ok(event)) => screen.show(&event)?,
                Some(Err(error)) => break (Some(error), guest.usage()),
                None => break (None, guest.usage()),
            },
            () = screen.progress_due() => {}
            outcome = ended(&mut sending), if has_messages => {
                (sent, has_messages) = (outcome, false);
            }
        }
    };
    screen.end(error.as_ref().map(ErrorObject::from), usage)?;
    match error {
        None if sent == Sent::NotAll => Err(CliError::InputCutShort),
        None => Ok(()),
        Some(Error::Daemon(body)) => Err(CliError::Guest(body)),
        Some(error) => Err(error.into()),
    }
}

/// How far standard input was sent, once no more is.
async fn ended(sending: &mut Option<AbortOnDropHandle<Sent>>) -> Sent {
    match sending {
        Some(sending) => sending.await.unwrap_or(Sent::NotAll),
        None => std::future::pending().await,
    }
}
