//! Opening devices again after one has failed, with the models that were on them.

use std::sync::Arc;

use super::{Loader, OpenDevice, blocking, fill, open_device, open_models, watches};
use crate::config::Device;
use crate::daemon::DaemonError;
use crate::device;
use trellis_engine::ModelHandle;

/// What is to be on a device again.
struct Lost {
    device: Device,
    /// How each model was asked for.
    choices: Vec<String>,
    handles: Vec<ModelHandle>,
}

impl Loader {
    /// Lets go of all devices and opens them again, with all models that were on them and are not on their way out. One
    /// that is sent off meanwhile goes as soon as it is loaded.
    ///
    /// # Errors
    /// A model or a device cannot be used any more.
    pub(crate) async fn reopen(self: &Arc<Self>) -> Result<(), DaemonError> {
        let mut devices = self.devices.lock().await;
        let lost = std::mem::take(&mut *devices);
        let loader = self.clone();
        let (opened, renewed) = blocking(move || {
            let plans: Vec<Lost> = lost.iter().map(Lost::of).collect();
            // Nothing can be had of a device again as long as anything of it is held.
            drop(lost);
            let (mut opened, mut renewed) = (Vec::new(), Vec::new());
            for Lost { device, choices, handles } in plans {
                device::reset(device)?;
                let models = open_models(&choices, &loader.config)?;
                let mut open = open_device(device, &loader.config, &loader.cache_dir, &loader.seams)?;
                fill(&mut open, models, &loader.config, &loader.seams, &|_| {})?;
                let again = open.tenants.iter().map(|tenant| tenant.handle.clone());
                renewed.extend(handles.into_iter().zip(again));
                opened.push(open);
            }
            Ok::<_, DaemonError>((opened, renewed))
        })
        .await?;
        *devices = opened;
        for unwanted in self.models.renew(renewed, watches(&devices)) {
            self.clear(&mut devices, &unwanted).await?;
        }
        Ok(())
    }
}

impl Lost {
    fn of(open: &OpenDevice) -> Self {
        let staying = || open.tenants.iter().filter(|tenant| !tenant.handle.is_closed());
        Self {
            device: open.device,
            choices: staying().map(|tenant| tenant.choice.clone()).collect(),
            handles: staying().map(|tenant| tenant.handle.clone()).collect(),
        }
    }
}
