//! The sockets of a daemon that starts: those that it is handed over, or else those that its settings name.

use std::net::SocketAddr;
use std::path::PathBuf;

use trellis_client::socket::default_socket;

use super::error::CliError;
use super::manager::Lent;
use super::served::{OPEN_MODE, directory_mode};
use crate::config::Config;
use crate::http::{HandedHttp, HttpSocket};
use crate::ipc::Listener;
use crate::metrics::Endpoint;
use crate::upgrade::{Inherited, InheritedMetrics};

/// Where clients come, and where metrics are asked for.
pub(super) struct Sockets {
    pub(super) listener: Listener,
    pub(super) endpoint: Option<(Endpoint, SocketAddr)>,
    /// A service manager has made the second one.
    pub(super) metrics_are_lent: bool,
    /// Where HTTP requests come, and that place in words.
    pub(super) http: Option<(HttpSocket, String)>,
    /// The program before has left them.
    pub(super) are_inherited: bool,
}

impl Sockets {
    /// Those that are handed over, or else those that the settings name.
    pub(super) async fn of(lent: Lent, config: &Config) -> Result<Self, CliError> {
        let told = config.socket.clone();
        let Lent { clients, metrics, inherited } = lent;
        let are_inherited = inherited.is_some();
        let (metrics, kept, http) = match inherited {
            Some(Inherited { clients, metrics, http }) => (metrics, Some(clients), http),
            None => (metrics.map(|socket| InheritedMetrics { socket, is_lent: true }), None, None),
        };
        let listener = match (kept, clients) {
            (Some(kept), _) => {
                let listener = Listener::inherit(kept, directory_mode)?;
                note_told(
                    told,
                    &listener,
                    "the socket of the program before is used, and the one that is told waits for a restart",
                );
                listener
            }
            (None, Some(lent)) => {
                let listener = Listener::adopt(lent, OPEN_MODE)?;
                note_told(
                    told,
                    &listener,
                    "the socket that the service manager hands over is used, and the one that is told passed over",
                );
                listener
            }
            (None, None) => {
                let socket = told.or_else(default_socket).ok_or(CliError::NoSocketPlace)?;
                let socket = std::path::absolute(&socket).map_err(CliError::io("find the current folder"))?;
                Listener::bind(&socket, directory_mode(&socket))?
            }
        };
        // One that the settings do not name any more is closed before another takes its port.
        let metrics = metrics.filter(|metrics| metrics.is_lent || is_told(metrics, config.metrics_listen));
        let metrics_are_lent = metrics.as_ref().is_some_and(|metrics| metrics.is_lent);
        let endpoint = match (metrics, config.metrics_listen) {
            (Some(metrics), _) => Some(adopt_for_metrics(metrics.socket)?),
            (None, Some(address)) => Some(listen_for_metrics(address).await?),
            (None, None) => None,
        };
        let http = match listen_for_http(http, config).await {
            // Those who are served already are not to suffer for it.
            Err(error) if are_inherited => {
                tracing::warn!(%error, "no HTTP requests are answered");
                None
            }
            http => http?,
        };
        Ok(Self { listener, endpoint, metrics_are_lent, http, are_inherited })
    }
}

/// Before the models are loaded: a place that is taken is heard of at once.
async fn listen_for_http(
    handed: Option<HandedHttp>,
    config: &Config,
) -> Result<Option<(HttpSocket, String)>, CliError> {
    let inherited = handed.and_then(|handed| {
        HttpSocket::inherit(handed)
            .inspect_err(|error| tracing::warn!(%error, "the socket for HTTP requests is made anew"))
            .ok()
    });
    // One that the settings do not name any more is closed.
    let inherited = inherited.filter(|http| config.http.listen.as_ref().is_some_and(|told| http.is_at(told)));
    let Some(listen) = &config.http.listen else { return Ok(None) };
    let bound = match inherited {
        Some(http) => Ok(http),
        None => HttpSocket::bind(listen).await,
    };
    let bound = bound.and_then(|socket| Ok((socket.place()?, socket)));
    let (place, socket) = bound.map_err(CliError::io(format!("listen for HTTP requests on {listen}")))?;
    Ok(Some((socket, place)))
}

/// Says why another socket is listened on than the settings name, where that is so.
fn note_told(told: Option<PathBuf>, listener: &Listener, why: &str) {
    if let Some(told) = told.filter(|told| told != listener.path()) {
        tracing::warn!(told = %told.display(), path = %listener.path().display(), "{why}");
    }
}

/// Whether a socket is where the settings want one. Port 0 is any.
fn is_told(metrics: &InheritedMetrics, told: Option<SocketAddr>) -> bool {
    let address = metrics.socket.local_addr();
    told.zip(address.ok())
        .is_some_and(|(told, address)| told == address || told.port() == 0 && told.ip() == address.ip())
}

/// Before the models are loaded: a port that is taken is heard of at once.
async fn listen_for_metrics(address: SocketAddr) -> Result<(Endpoint, SocketAddr), CliError> {
    let endpoint = Endpoint::bind(address).await.map_err(|error| {
        // What a process is told that may have no sockets of this kind.
        let is_shut_in = error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error());
        let why = match is_shut_in {
            true => ": this service may make no such socket, and takes one from trellis-metrics.socket in place of metrics_listen; \
                     `trellis metrics` works as it is",
            false => "",
        };
        CliError::io(format!("listen for metrics on {address}{why}"))(error)
    })?;
    let address = endpoint.address().map_err(CliError::io("listen for metrics"))?;
    Ok((endpoint, address))
}

/// The socket for metrics that the service manager hands over, in place of what the configuration says.
fn adopt_for_metrics(lent: std::net::TcpListener) -> Result<(Endpoint, SocketAddr), CliError> {
    let endpoint = Endpoint::adopt(lent).map_err(CliError::io("take the socket for metrics of systemd"))?;
    let address = endpoint.address().map_err(CliError::io("take the socket for metrics of systemd"))?;
    Ok((endpoint, address))
}
