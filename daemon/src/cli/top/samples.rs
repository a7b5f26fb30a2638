//! Asks the daemon again and again, and comes back to it when it was gone.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use trellis_client::{Client, DaemonInfo, Error, GuestInfo};

use crate::cli::connect::SocketArgs;

/// How long an answer is waited for before it is said that none comes.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Time between two attempts to find a daemon that was gone.
const PAUSE: Duration = Duration::from_millis(500);

/// What the daemon says of itself at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) daemon: DaemonInfo,
    pub(super) guests: Vec<GuestInfo>,
}

/// What there is to show.
#[derive(Debug)]
pub(super) enum News {
    Sample(Box<Sample>),
    /// The daemon has not answered in time, and is asked again.
    Silent,
    /// The daemon is gone, for this reason, and looked for.
    Gone(String),
    /// How something went that the user wanted.
    Told(String),
}

impl Sample {
    /// Asks a daemon.
    ///
    /// # Errors
    /// It refused, or is gone.
    pub(super) async fn take(client: &Client) -> Result<Self, Error> {
        let (daemon, guests) = tokio::try_join!(client.info(), client.ps())?;
        Ok(Self { daemon, guests })
    }
}

/// Asks the current daemon once in so much time, until nobody hears it any more.
pub(super) async fn watch(
    socket: SocketArgs,
    time: Duration,
    news: mpsc::Sender<News>,
    current: watch::Sender<Client>,
) {
    let mut ticks = interval(time);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let client = current.borrow().clone();
        let heard = match timeout(PATIENCE, Sample::take(&client)).await {
            Ok(Ok(sample)) => News::Sample(Box::new(sample)),
            Ok(Err(error)) => News::Gone(error.to_string()),
            Err(_) => News::Silent,
        };
        let is_gone = matches!(heard, News::Gone(_));
        if news.send(heard).await.is_err() {
            return;
        }
        if is_gone {
            drop(client);
            current.send_replace(find(&socket).await);
        }
    }
}

/// Waits until a daemon is there.
async fn find(socket: &SocketArgs) -> Client {
    loop {
        sleep(PAUSE).await;
        if let Ok(Ok(client)) = timeout(PATIENCE, socket.connect_silently()).await {
            return client;
        }
    }
}
