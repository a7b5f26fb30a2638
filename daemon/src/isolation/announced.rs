//! What a process of guests was told of models and engines.

use trellis_engine::remote::ModelFacts;
use trellis_engine::{EngineWatch, ModelHandle, ModelLease};

use super::message::{EngineNumber, ModelNumber, NotUnderstood, ToGuests};
use super::outgoing::Outgoing;
use crate::models::{DeviceWatch, Listing};

/// Models and engines by the numbers under which a process knows them.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    engines: Vec<DeviceWatch>,
    models: Vec<Option<AnnouncedModel>>,
    /// Of all models, also those that are gone.
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
        let engines =
            listing.devices().iter().map(|device| self.engine_of(device, outgoing, &mut news)).collect();
        let mut number = |handles: &[ModelHandle], this: &mut Self| -> Vec<ModelNumber> {
            handles.iter().filter_map(|handle| this.model_of(handle, outgoing, &mut news)).collect()
        };
        let (loaded, leaving) = (number(listing.in_order(), self), number(listing.leaving(), self));
        for (idx, model) in self.models.iter_mut().enumerate() {
            let number = ModelNumber(idx as u32);
            if !loaded.contains(&number) && !leaving.contains(&number) {
                *model = None;
            }
        }
        outgoing.put(ToGuests::Listing { loaded, leaving, engines });
        news
    }

    fn engine_of(&mut self, device: &DeviceWatch, outgoing: &Outgoing, news: &mut News) -> EngineNumber {
        // One that was opened again is another.
        if let Some(idx) = self.engines.iter().position(|known| known.engine.is_same(&device.engine)) {
            return EngineNumber(idx as u32);
        }
        let engine = EngineNumber(self.engines.len() as u32);
        self.engines.push(device.clone());
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
        let engine = self.engines.iter().position(|device| device.engine.is_of(handle))?;
        let model = ModelNumber(self.models.len() as u32);
        self.models.push(Some(AnnouncedModel { handle: handle.clone(), lease: None }));
        let (engine, facts) = (EngineNumber(engine as u32), handle.facts());
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
        let is_it =
            |model: &Option<AnnouncedModel>| model.as_ref().is_some_and(|model| model.handle.is_same(handle));
        self.models.iter().position(is_it).map(|idx| ModelNumber(idx as u32))
    }

    /// The models of an engine, also those that are gone.
    pub(crate) fn facts_of(&self, engine: EngineNumber) -> Vec<ModelFacts> {
        let of_it = self.facts.iter().filter(|(other, _)| *other == engine);
        of_it.map(|(_, facts)| facts.clone()).collect()
    }

    /// The engine of this number.
    pub(crate) fn engine(&self, engine: EngineNumber) -> Result<&EngineWatch, NotUnderstood> {
        let device = self.engines.get(engine.0 as usize);
        let not_there = NotUnderstood::NotThere { what: "engine", number: engine.0.into() };
        device.map(|device| &device.engine).ok_or(not_there)
    }

    /// The names of the models that the process may have something of.
    pub(crate) fn names(&self) -> Vec<String> {
        self.models.iter().flatten().map(|model| model.handle.model().name.clone()).collect()
    }

    /// Guests of the process have something of a model from now on, or nothing.
    pub(crate) fn note_held(&mut self, model: ModelNumber, is_held: bool) -> Result<(), NotUnderstood> {
        let not_there = NotUnderstood::NotThere { what: "model", number: model.0.into() };
        let known = self.models.get_mut(model.0 as usize).ok_or(not_there)?;
        // One that is gone is held by nobody.
        if let Some(known) = known {
            known.lease = is_held.then(|| known.handle.lease());
        }
        Ok(())
    }

    /// The process is gone.
    pub(crate) fn clear(&mut self) {
        self.models.clear();
        self.engines.clear();
    }
}
