//! What clients are told of models that are loaded on demand, and of whether there is room for one.

use std::sync::Arc;

use trellis_engine::ModelHandle;
use trellis_wire::{ErrorBody, ErrorCode, FitInfo, ModelInfo};

use super::{errors, whole_ms};
use crate::config::Device;
use crate::live::Live;
use crate::loader::{Fit, Loader, Verdict, is_evictable};
use crate::permissions::{Permission, Permissions};
use crate::session::{Actor, LoadRequest};

/// The models of the catalog, as they are loaded.
pub(super) struct Catalog {
    loader: Arc<Loader>,
    permissions: Arc<Live<Permissions>>,
}

/// The device that a client has named.
pub(super) fn device(name: Option<String>) -> Result<Option<Device>, ErrorBody> {
    let parsed = name.map(|name| name.parse::<Device>()).transpose();
    parsed.map_err(|error| ErrorBody::new(ErrorCode::InvalidArgument, error.to_string()).about("device"))
}

impl Catalog {
    pub(super) fn new(loader: Arc<Loader>, permissions: Arc<Live<Permissions>>) -> Self {
        Self { loader, permissions }
    }

    /// The name of the model that goes by this one; the same for one that is not of the catalog.
    pub(super) fn name_of(&self, name: String) -> String {
        let known = self.loader.models().declared().resolve(&name).map(str::to_owned);
        known.unwrap_or(name)
    }

    /// What the catalog says of a model, beside what is known of it where it is loaded.
    pub(super) fn about(&self, info: ModelInfo, loaded: Option<&ModelHandle>) -> ModelInfo {
        let declared = self.loader.config().catalog.get(&info.name);
        let unused = loaded.and_then(|model| self.loader.unused_for(model));
        ModelInfo {
            is_on_demand: declared.is_some(),
            is_pinned: !is_evictable(&info.name, self.loader.config()),
            aliases: declared.map(|model| model.aliases.clone()).unwrap_or_default(),
            unused_ms: unused.map(whole_ms),
            ..info
        }
    }

    /// Those that are not among these.
    pub(super) fn not_loaded(&self, there: &[ModelInfo]) -> Vec<ModelInfo> {
        let config = self.loader.config();
        let is_there = |name: &String| there.iter().any(|model| model.name == *name);
        let others = config.catalog.iter().filter(|(name, _)| !is_there(name));
        let others = others.map(|(name, model)| {
            let loading_bytes = self.loader.progress_of(name);
            let info = ModelInfo {
                name: name.clone(),
                device: String::from(model.device.unwrap_or(config.device)),
                state: if loading_bytes.is_some() { "loading" } else { "unloaded" }.to_owned(),
                loading_bytes,
                ..ModelInfo::default()
            };
            self.about(info, None)
        });
        others.collect()
    }

    /// Whether there is room for a model.
    ///
    /// # Errors
    /// The model is not of the catalog, and the actor may not load others; or it cannot be used.
    pub(super) async fn fit(&self, actor: Actor, request: LoadRequest) -> Result<FitInfo, ErrorBody> {
        let (choice, device) = (self.name_of(request.model), device(request.device)?);
        let is_declared = self.loader.config().catalog.contains_key(&choice);
        if !is_declared || device.is_some() {
            self.permissions.get().check(actor, Permission::Load).await?;
        }
        let may_load = self.permissions.get().has(actor, Permission::Load).await;
        let fit = self.loader.fit(choice, device).await.map_err(|error| match may_load {
            true => errors::not_loaded(&error),
            // Where files are, and what is wrong with them, is for who may load any.
            false => {
                let code = errors::not_loaded(&error).code;
                ErrorBody::new(code, "the model cannot be loaded; the operator may ask why").about("model")
            }
        })?;
        Ok(info(fit))
    }
}

fn info(fit: Fit) -> FitInfo {
    let Fit { name, device, needs, capacity_bytes, free_bytes, verdict, n_positions } = fit;
    let info = FitInfo {
        model: name,
        device,
        needed_bytes: needs.fixed_bytes + needs.kv_bytes_min(),
        weight_bytes: needs.weight_bytes,
        step_bytes: needs.fixed_bytes - needs.weight_bytes,
        kv_bytes: needs.kv_bytes_min(),
        n_positions: n_positions as u64,
        free_bytes,
        capacity_bytes,
        ..FitInfo::default()
    };
    match verdict {
        Verdict::Loaded => FitInfo { fits: true, is_loaded: true, ..info },
        Verdict::Fits => FitInfo { fits: true, ..info },
        Verdict::Evicts(evicts) => FitInfo { fits: true, evicts, ..info },
        Verdict::Waits(used) => FitInfo { fits_later: true, used, ..info },
        Verdict::No => info,
    }
}
