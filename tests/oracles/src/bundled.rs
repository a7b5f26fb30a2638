//! The bundled models, from their folders.

use std::path::Path;
use std::sync::Arc;

use trellis_engine::model::{Model, ModelSource};

/// One of them, opened.
pub(crate) fn model(name: &str) -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../daemon/models").join(name);
    Arc::new(Model::open(name, &ModelSource::Folder(folder)).expect("a bundled model opens"))
}
