//! What a simulation asks of a loader.

use super::{Loader, OpenDevice};

impl Loader {
    /// Names of the models on devices, once none is coming or going, and how many loads wait for room.
    pub(crate) async fn at_rest(&self) -> (Vec<String>, usize) {
        let devices = self.devices_at_rest().await;
        let tenants = |open: &OpenDevice| -> Vec<String> {
            open.tenants.iter().map(|tenant| tenant.handle.model().name.clone()).collect()
        };
        (devices.iter().flat_map(tenants).collect(), self.queue.n_waiting())
    }
}
