//! `trellis top`: the daemon, its devices and the user's guests, as they change.
//!
//! - Comes in: answers of the daemon, one after the other (`samples`), and keys.
//! - Goes out: frames of a terminal (`terminal`), or one as text; stops of guests, once they were confirmed.
//! - Between them: what changes in a second (`rates`), what a guest has left of its limits (`budget`), its columns and their order
//!   (`guests`), what is selected and asked (`app`), and where all that stands on the screen (`view`), which read no clock and
//!   write nothing.
//! - Must not happen: a wait for the daemon that keeps keys waiting; a terminal that is left as it was made; text of others on it
//!   unescaped; a stop without a question.

mod app;
mod budget;
mod guests;
mod rates;
mod samples;
mod terminal;
#[cfg(test)]
mod tests;
mod view;

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use crossterm::event::{Event, EventStream};
use futures_util::StreamExt as _;
use serde::Serialize;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use trellis_client::{Client, DaemonInfo, GuestInfo};

use self::app::{App, Wish};
use self::samples::{News, PATIENCE, Sample};
use self::terminal::Screen;
use super::connect::SocketArgs;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::ps::name_of;
use super::seconds::seconds;
use super::width::screen_width;

const EXAMPLES: &str = "\
Examples:
  trellis top
  trellis top --interval 0.5
  trellis top --once                      one frame as text, after one interval
  trellis top --once --json | jq .guests

Keys: t, p, c and i sort guests by tokens/s, pages, processor time and number; arrows, PgUp, PgDn, Home and End select one; s or
k stops it, after a question; q, Esc or Ctrl-C leave.

Of a device: MEMORY is what models use of it, their weights and the KV pages that something holds, of what they may; BUSY how
long it computed; ROWS and STEP are the rows and the time of a step, over those since the last frame; QUEUE are contexts that
its last steps had no room for; the rest is the tokens that it computed in a second, and its models.

Of guests: TOK/S are tokens computed for it in a second, those of prompts and those in vain included; STATE tells how much of
its prompts is computed; CPU the part of a processor that its own code takes; GUESSES the part of guessed tokens that were
right; LEFT what is left of the limit that it is nearest to, by the name that `trellis limits` has. You see your own guests,
root sees all; devices are everybody's. A narrow terminal shows fewer columns, and NO_COLOR is heeded.";

/// Show devices and guests as they change
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    /// Time between two frames
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Print one frame as text instead; this needs no terminal
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// The bounds of the time between two frames: what people can read, and what they wait for.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);

fn interval(text: &str) -> Result<Duration, String> {
    let time = seconds(text)?;
    match INTERVALS.contains(&time) {
        true => Ok(time),
        false => Err(format!("{text} is not from 0.1 to 3600 seconds")),
    }
}

pub(crate) async fn top(args: TopArgs, format: Format) -> Result<(), CliError> {
    if args.once {
        return once(&args, format).await;
    }
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if format == Format::Json || !is_terminal {
        return Err(CliError::NoTerminal);
    }
    let client = args.socket.connect(format).await?;
    let interrupts = Interrupts::watch()?;
    live(args, client, &interrupts).await
}

/// What a frame is made of, for programs.
#[derive(Serialize)]
struct Shown<'a> {
    daemon: &'a DaemonInfo,
    guests: &'a [GuestInfo],
}

async fn once(args: &TopArgs, format: Format) -> Result<(), CliError> {
    let client = args.socket.connect(format).await?;
    let first = Sample::take(&client).await?;
    if format == Format::Json {
        return output::print_line(&output::to_json(&Shown { daemon: &first.daemon, guests: &first.guests }));
    }
    tokio::time::sleep(args.interval).await;
    let second = Sample::take(&client).await?;
    let mut app = App::new(name_of);
    app.hear(News::Sample(Box::new(first)));
    app.hear(News::Sample(Box::new(second)));
    output::print_line(view::text(&mut app, screen_width()).trim_end())
}

/// Answers that wait for the screen: the watcher is not ahead of it.
const N_NEWS_MAX: usize = 2;

async fn live(args: TopArgs, client: Client, interrupts: &Interrupts) -> Result<(), CliError> {
    let (sender, mut news) = mpsc::channel(N_NEWS_MAX);
    let current = watch::Sender::new(client);
    let clients = current.subscribe();
    let watching = samples::watch(args.socket, args.interval, sender.clone(), current);
    let _watching = AbortOnDropHandle::new(tokio::spawn(watching));
    let mut app = App::new(name_of);
    let mut screen = Screen::open()?;
    let mut events = EventStream::new();
    loop {
        screen.draw(&mut app)?;
        let wish = tokio::select! {
            biased;
            () = interrupts.first() => return Err(CliError::Interrupted),
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) => app.press(key),
                // The next frame has the new size.
                Some(Ok(_)) => Wish::Nothing,
                Some(Err(source)) => return Err(CliError::io("read the terminal")(source)),
                None => Wish::Leave,
            },
            Some(news) = news.recv() => {
                app.hear(news);
                Wish::Nothing
            }
        };
        match wish {
            Wish::Nothing => {}
            Wish::Leave => return Ok(()),
            Wish::Stop(guest_id) => {
                let client = clients.borrow().clone();
                tokio::spawn(stop(client, guest_id, sender.clone()));
            }
        }
    }
}

/// Stops a guest, and says how that went.
async fn stop(client: Client, guest_id: u64, news: mpsc::Sender<News>) {
    let said = match timeout(PATIENCE, client.stop(guest_id)).await {
        Ok(Ok(())) => format!("guest {guest_id} was told to stop"),
        Ok(Err(error)) => format!("guest {guest_id} was not stopped: {error}"),
        Err(_) => format!("guest {guest_id}: the daemon has not answered"),
    };
    // Nobody looks any more.
    let _ = news.send(News::Told(said)).await;
}
