//! Opening devices again after one has failed, with the models that were on them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use trellis_engine::ModelHandle;

use super::{Loader, OpenDevice, fill, open_device, open_models, watches};
use crate::config::Device;
use crate::daemon::DaemonError;
use crate::device;
use crate::tasks::blocking;

/// What is to be on a device again.
struct Lost {
    device: Device,
    /// How each model was asked for.
    choices: Vec<String>,
    handles: Vec<ModelHandle>,
}

impl Loader {
    /// Lets go of all devices and opens them again, with all models that were on them and are not on their way out. One
    /// that is sent off meanwhile goes as soon as it is loaded. Waits at most so long for loads under way: nothing of a device
    /// may be held when it is opened again.
    ///
    /// # Errors
    /// A model or a device cannot be used any more, or another load takes too long.
    pub(crate) async fn reopen(self: &Arc<Self>, loading_for_max: Duration) -> Result<(), DaemonError> {
        let mut devices = timeout(loading_for_max, self.devices_at_rest())
            .await
            .map_err(|_| DaemonError::Loading { waited: loading_for_max })?;
        let lost = std::mem::take(&mut *devices);
        let loader = self.clone();
        for tenant in lost.iter().flat_map(|open| &open.tenants) {
            self.totals.close(&tenant.handle, None);
        }
        let (opened, renewed) = blocking(move || {
            let plans: Vec<Lost> = lost.iter().map(Lost::of).collect();
            // Nothing can be had of a device again as long as anything of it is held.
            drop(lost);
            let (mut opened, mut renewed) = (Vec::new(), Vec::new());
            for Lost { device, choices, handles } in plans {
                device::reset(device)?;
                let models = open_models(&choices, &loader.config)?;
                let mut open = open_device(device, &loader.config, &loader.cache_dir, &loader.fittings)?;
                fill(&mut open, models, &loader.config, &loader.fittings, &|_| {})?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::loader::Fittings;

    #[tokio::test]
    async fn a_load_that_does_not_end_keeps_no_failure_to_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = Config { models: vec!["tiny".to_owned()], device: Device::Cpu, ..Config::default() };
        let start = || Loader::start(config, folder.path().to_owned(), Fittings::default(), &|_| {});
        let loader = Arc::new(start().expect("it loads"));
        let before = loader.models().now();
        let turn = loader.devices.lock().await;
        let error = loader.reopen(Duration::ZERO).await.expect_err("it is not its turn");
        assert!(matches!(error, DaemonError::Loading { waited: Duration::ZERO }), "{error}");
        drop(turn);
        loader.reopen(Duration::ZERO).await.expect("it is opened again");
        let after = loader.models().now();
        assert_eq!(after.len(), 1);
        assert!(!after[0].is_same(&before[0]) && after[0].stats().await.is_ok());
        assert!(before[0].stats().await.is_err());
    }
}
