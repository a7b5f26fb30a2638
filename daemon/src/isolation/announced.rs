//! What a process of guests was told of models and engines.

use std::collections::BTreeMap;

use trellis_engine::remote::ModelFacts;
use trellis_engine::{EngineWatch, ModelHandle, ModelLease};

use super::message::{EngineNumber, ModelNumber, NotUnderstood, ToGuests};
use super::outgoing::Outgoing;
use crate::models::{DeviceWatch, Listing};

/// Models and engines by the numbers under which a process knows them. Of those that are gone nothing is kept but that their numbers
/// were given, however often a model is loaded again.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    n_engines: u32,
    engines: BTreeMap<EngineNumber, DeviceWatch>,
    n_models: u32,
    models: BTreeMap<ModelNumber, AnnouncedModel>,
    /// Of the last model at each place of an engine, which may be gone.
    facts: Vec<(EngineNumber, ModelFacts)>,
}

#[derive(Debug)]
struct AnnouncedModel {
    handle: ModelHandle,
    /// While guests of the process have something of it.
    lease: Option<ModelLease>,
}

/// What was not announced before.
#[derive(Debug, Default)]
pub(crate) struct News {
    pub(crate) engines: Vec<(EngineNumber, EngineWatch)>,
    pub(crate) models: Vec<(ModelNumber, ModelHandle)>,
}

impl Announced {
    /// Tells the process what is loaded where.
    pub(crate) fn announce(&mut self, listing: &Listing, outgoing: &Outgoing) -> News {
        let mut news = News::default();
        let engines: Vec<EngineNumber> =
            listing.devices().iter().map(|device| self.engine_of(device, outgoing, &mut news)).collect();
        let mut number = |handles: &[ModelHandle], this: &mut Self| -> Vec<ModelNumber> {
            handles.iter().filter_map(|handle| this.model_of(handle, outgoing, &mut news)).collect()
        };
        let (loaded, leaving) = (number(listing.in_order(), self), number(listing.leaving(), self));
        self.models.retain(|number, _| loaded.contains(number) || leaving.contains(number));
        for (engine, gone) in self.engines.extract_if(.., |engine, _| !engines.contains(engine)) {
            // The process lets go of it, and is to know before that how it went.
            outgoing.put(ToGuests::EngineEnded { engine, failure: gone.engine.failure() });
        }
        self.facts.retain(|(engine, _)| engines.contains(engine));
        outgoing.put(ToGuests::Listing { loaded, leaving, engines });
        news
    }

    fn engine_of(&mut self, device: &DeviceWatch, outgoing: &Outgoing, news: &mut News) -> EngineNumber {
        // One that was opened again is another.
        if let Some((number, _)) = self.engines.iter().find(|(_, known)| known.engine.is_same(&device.engine))
        {
            return *number;
        }
        let engine = EngineNumber(self.n_engines);
        self.n_engines += 1;
        self.engines.insert(engine, device.clone());
        outgoing.put(ToGuests::Engine { engine, device: device.device.clone() });
        news.engines.push((engine, device.engine.clone()));
        engine
    }

    fn model_of(
        &mut self,
        handle: &ModelHandle,
        outgoing: &Outgoing,
        news: &mut News,
    ) -> Option<ModelNumber> {
        if let Some(known) = self.number_of(handle) {
            return Some(known);
        }
        // The device may have been lost meanwhile: another listing will say so.
        let (&engine, _) = self.engines.iter().find(|(_, device)| device.engine.is_of(handle))?;
        let model = ModelNumber(self.n_models);
        self.n_models += 1;
        self.models.insert(model, AnnouncedModel { handle: handle.clone(), lease: None });
        let facts = handle.facts();
        self.facts.retain(|(other, known)| *other != engine || !facts.replaces(known));
        self.facts.push((engine, facts.clone()));
        outgoing.put(ToGuests::Model {
            model,
            engine,
            facts: Box::new(facts),
            card: Box::new(handle.model().card()),
        });
        news.models.push((model, handle.clone()));
        Some(model)
    }

    /// The number of a model that the process knows.
    pub(crate) fn number_of(&self, handle: &ModelHandle) -> Option<ModelNumber> {
        let mut models = self.models.iter();
        models.find(|(_, model)| model.handle.is_same(handle)).map(|(number, _)| *number)
    }

    /// The last model at each place of an engine, which may be gone.
    pub(crate) fn facts_of(&self, engine: EngineNumber) -> Vec<ModelFacts> {
        let of_it = self.facts.iter().filter(|(other, _)| *other == engine);
        of_it.map(|(_, facts)| facts.clone()).collect()
    }

    /// The engine of this number, if it is not gone.
    pub(crate) fn engine(&self, engine: EngineNumber) -> Result<Option<&EngineWatch>, NotUnderstood> {
        if engine.0 >= self.n_engines {
            return Err(NotUnderstood::NotThere { what: "engine", number: engine.0.into() });
        }
        Ok(self.engines.get(&engine).map(|device| &device.engine))
    }

    /// The names of the models that the process may have something of.
    pub(crate) fn names(&self) -> Vec<String> {
        self.models.values().map(|model| model.handle.model().name.clone()).collect()
    }

    /// Guests of the process have something of a model from now on, or nothing.
    pub(crate) fn note_held(&mut self, model: ModelNumber, is_held: bool) -> Result<(), NotUnderstood> {
        if model.0 >= self.n_models {
            return Err(NotUnderstood::NotThere { what: "model", number: model.0.into() });
        }
        // One that is gone is held by nobody.
        if let Some(known) = self.models.get_mut(&model) {
            known.lease = is_held.then(|| known.handle.lease());
        }
        Ok(())
    }

    /// The process is gone.
    pub(crate) fn clear(&mut self) {
        self.models.clear();
        self.engines.clear();
        self.facts.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::config::{Config, Device};
    use crate::loader::{Fittings, Loader};

    #[tokio::test(flavor = "multi_thread")]
    async fn nothing_is_left_of_models_that_come_and_go() {
        const N_TIMES: u32 = 20;
        let folder = tempfile::tempdir().expect("a folder");
        let config = Config { models: Vec::new(), device: Device::Cpu, ..Config::default() };
        let loader = Loader::start(config, folder.path().to_owned(), Fittings::default(), &|_| {});
        let loader = Arc::new(loader.expect("it starts"));
        let (mut announced, outgoing) = (Announced::default(), Outgoing::new());
        for n in 0..N_TIMES {
            let draft = loader.load("draft".to_owned(), None, |_, _| {}).await.expect("it loads");
            let news = announced.announce(&loader.models().listing(), &outgoing);
            assert_eq!(news.models.len(), 1);
            assert_eq!(announced.number_of(&draft), Some(ModelNumber(n)));
            announced.note_held(ModelNumber(n), true).expect("it was told");
            announced.note_held(ModelNumber(n), false).expect("it was told");
            loader.unload("draft", Duration::ZERO).await.expect("it goes");
            announced.announce(&loader.models().listing(), &outgoing);
            announced.note_held(ModelNumber(n), true).expect("the process has not heard of its end");
            announced.note_held(ModelNumber(n + 1), true).expect_err("it was not told");
        }
        assert_eq!((announced.models.len(), announced.engines.len()), (0, 1));
        assert_eq!(announced.facts_of(EngineNumber(0)).len(), 1, "what its guests still say is checked");
        assert!(announced.engine(EngineNumber(0)).expect("it was told").is_some());

        // A device that is opened again has another engine.
        loader.reopen(Duration::from_secs(60)).await.expect("it is opened again");
        let news = announced.announce(&loader.models().listing(), &outgoing);
        assert_eq!((news.engines.len(), announced.engines.len(), announced.facts.len()), (1, 1, 0));
        assert!(announced.engine(EngineNumber(0)).expect("it was told").is_none(), "it is gone");
        announced.engine(EngineNumber(2)).expect_err("it was not told");
    }
}
