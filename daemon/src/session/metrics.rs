//! What is told to monitoring, whoever asks: a client, or a scrape over HTTP.

use trellis_wire::ErrorBody;

use super::service::Service;
use super::sessions::Sessions;
use crate::metrics::Exposition;

impl<S: Service> Sessions<S> {
    /// The daemon's metrics at this moment.
    ///
    /// # Errors
    /// The service has none.
    pub async fn metrics(&self) -> Result<Exposition, ErrorBody> {
        self.service.metrics(&self.counts).await
    }
}
