//! Opening devices again after one has failed, with the models that were on them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use trellis_engine::ModelHandle;
use trellis_engine::model::Model;

use super::{Loader, OpenDevice, Tenant, fill, is_evictable, open_device, watches};
use crate::config::{Config, Device};
use crate::daemon::{DaemonError, open_model};
use crate::device;
use crate::tasks::blocking;

/// What is to be on a device again.
struct Lost {
    device: Device,
    /// The models, and how each was asked for.
    models: Vec<(String, ModelHandle)>,
}

impl Loader {
    /// Lets go of all devices and opens them again, with all models that were on them and are not on their way out. One
    /// that is sent off meanwhile goes as soon as it is loaded, and those of the catalog that are not pinned come back once somebody
    /// asks for them; so do those of the catalog whose files are not what they were. Waits at most so long for loads of the operator, and for others to be given up: nothing of a device may be
    /// held when it is opened again.
    ///
    /// # Errors
    /// A model or a device cannot be used any more, or another load takes too long.
    pub(crate) async fn reopen(self: &Arc<Self>, loading_for_max: Duration) -> Result<(), DaemonError> {
        // Guests that ask for one model after the other hold up nobody.
        let _paused = self.demand.pause();
        let mut devices = timeout(loading_for_max, self.devices_at_rest())
            .await
            .map_err(|_| DaemonError::Loading { waited: loading_for_max })?;
        let lost = std::mem::take(&mut *devices);
        let loader = self.clone();
        for tenant in lost.iter().flat_map(|open| &open.tenants) {
            self.totals.close(&tenant.handle, None);
        }
        let (opened, renewed) = blocking(move || {
            let plans: Vec<Lost> = lost.iter().map(|open| Lost::of(open, &loader.config)).collect();
            // Nothing can be had of a device again as long as anything of it is held.
            drop(lost);
            let (mut opened, mut renewed) = (Vec::new(), Vec::new());
            for Lost { device, models: lost } in plans {
                device::reset(device)?;
                let models = loader.open_again(&lost)?;
                let mut open = open_device(device, &loader.config, &loader.cache_dir, &loader.fittings)?;
                fill(&mut open, models, &loader.config, &loader.fittings, &|_| {})?;
                for (_, lost) in lost {
                    let is_it = |tenant: &&Tenant| tenant.handle.model().name == lost.model().name;
                    let again = open.tenants.iter().find(is_it).map(|tenant| tenant.handle.clone());
                    renewed.extend(again.map(|again| (lost, again)));
                }
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

    /// Opens the files of models that are to be there again. One of the catalog whose files are no model any more fails alone: it is
    /// tried again when a guest asks for it.
    fn open_again(&self, lost: &[(String, ModelHandle)]) -> Result<Vec<(String, Model)>, DaemonError> {
        let mut models = Vec::new();
        for (choice, handle) in lost {
            let name = &handle.model().name;
            match open_model(choice, &self.config) {
                Ok(model) => models.push((choice.clone(), model)),
                Err(error) if self.config.catalog.contains_key(name) => {
                    tracing::error!(model = name, %error, "a model is not there again, the others of its device are");
                    self.news.note_failure(format!("{name} was not loaded again: {error}"));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(models)
    }
}

impl Lost {
    fn of(open: &OpenDevice, config: &Config) -> Self {
        let comes_back = |tenant: &&Tenant| {
            !tenant.handle.is_closed() && !is_evictable(&tenant.handle.model().name, config)
        };
        let staying = open.tenants.iter().filter(comes_back);
        let models = staying.map(|tenant| (tenant.choice.clone(), tenant.handle.clone())).collect();
        Self { device: open.device, models }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::{Mutex, mpsc};

    use trellis_engine::account::{ActorId, GuestId};

    use super::*;
    use crate::config::CatalogModel;
    use crate::daemon::{BackendWrap, Seams};
    use crate::loader::Fittings;
    use crate::models::names;
    use crate::on_demand::{Again, Asker, LoadListener};

    fn asker() -> Asker {
        Asker { guest: GuestId(1), user: ActorId(1), loads: LoadListener::default() }
    }

    /// A copy of `draft`, below this folder.
    fn copy_below(folder: &Path) -> PathBuf {
        let copy = folder.join("copy");
        std::fs::create_dir(&copy).expect("made");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/models/draft");
        for file in std::fs::read_dir(source).expect("it is there") {
            let file = file.expect("it can be read").path();
            std::fs::copy(&file, copy.join(file.file_name().expect("a name"))).expect("copied");
        }
        copy
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_pinned_model_whose_files_are_gone_fails_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = copy_below(folder.path());
        let path = copy.to_str().expect("UTF-8").to_owned();
        let pinned = |path| CatalogModel { path, is_pinned: true, ..CatalogModel::default() };
        let catalog = [("a", pinned(path)), ("b", pinned("draft".to_owned()))];
        let config = Config {
            models: vec!["a".to_owned(), "tiny".to_owned(), "b".to_owned()],
            catalog: catalog.map(|(name, model)| (name.to_owned(), model)).into(),
            device: Device::Cpu,
            ..Config::default()
        };
        let loader = Loader::start(config, folder.path().to_owned(), Fittings::default(), &|_| {});
        let loader = Arc::new(loader.expect("it loads"));
        loader.open_catalog();
        std::fs::remove_dir_all(&copy).expect("removed");
        loader.reopen(Duration::from_secs(120)).await.expect("the device is opened again");
        let there = loader.models().now();
        assert_eq!(names(&there), ["tiny", "b"]);
        for model in there {
            assert!(model.stats().await.is_ok(), "{}", model.model().name);
        }
        let failure = loader.news().last_failure().expect("it is said");
        assert!(failure.message.starts_with("a was not loaded again: "), "{failure:?}");
        let opener = loader.models().opener().expect("there is one").clone();
        let gone = opener.open("a", asker()).await.expect_err("its files are gone");
        assert_eq!(gone.again, Again::Never, "{gone:?}");
        // What failed last stands, until the files are others.
        copy_below(folder.path());
        drop(opener.open("a", asker()).await.expect("its files are there"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn models_on_demand_hold_up_nothing_and_come_back_when_they_are_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = copy_below(folder.path());
        let of = |path: &str| CatalogModel { path: path.to_owned(), ..CatalogModel::default() };
        let catalog = [("a", of(copy.to_str().expect("UTF-8"))), ("b", of("draft"))];
        let config = Config {
            models: vec!["tiny".to_owned()],
            catalog: catalog.map(|(name, model)| (name.to_owned(), model)).into(),
            device: Device::Cpu,
            ..Config::default()
        };
        // `b` is not there before it is let go.
        let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let wrap: BackendWrap = Arc::new(move |name, backend| {
            if name == "b" {
                let _ = begun.send(());
                let _ = wait.lock().expect("no panic").recv();
            }
            backend
        });
        let fittings =
            Fittings { seams: Seams { wrap: Some(wrap), ..Seams::default() }, ..Fittings::default() };
        let loader = Loader::start(config, folder.path().to_owned(), fittings, &|_| {});
        let loader = Arc::new(loader.expect("it loads"));
        loader.open_catalog();
        let opener = loader.models().opener().expect("there is one").clone();
        drop(opener.open("a", asker()).await.expect("it is loaded"));
        std::fs::remove_dir_all(&copy).expect("removed");
        let waiting = tokio::spawn(opener.open("b", asker()));
        has_begun.recv().await.expect("it is read");
        let reopens = loader.clone();
        let reopening = tokio::spawn(async move { reopens.reopen(Duration::from_secs(120)).await });
        while !loader.demand.is_paused() {
            tokio::task::yield_now().await;
        }
        drop(go);
        reopening.await.expect("no panic").expect("it is opened again");
        assert!(names(&loader.models().now()).iter().all(|name| name != "a"), "nobody has asked for it");
        let opened = waiting.await.expect("no panic").expect("it is loaded all the same");
        assert!(opened.model.stats().await.is_ok(), "it is on the device that was opened again");
        let gone = opener.open("a", asker()).await.expect_err("its files are gone");
        assert_eq!(gone.again, Again::Never, "{gone:?}");
    }

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
