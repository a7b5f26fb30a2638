//! What is told to monitoring, whoever asks: a client, or a scrape over HTTP.

use trellis_wire::ErrorBody;

use super::Actor;
use super::service::Service;
use super::sessions::Sessions;
use crate::metrics::Exposition;

impl<S: Service> Sessions<S> {
    /// The daemon's metrics at this moment, for this actor, or for anybody.
    ///
    /// # Errors
    /// The service has none.
    pub async fn metrics(&self, actor: Option<Actor>) -> Result<Exposition, ErrorBody> {
        self.service.metrics(actor, &self.counts).await
    }
}
