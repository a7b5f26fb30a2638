//! The bundled models, from their folders: in the checkout of the build, or, where that is gone, in the one around the current
//! folder.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trellis_engine::model::{Model, ModelSource};

/// One of them, opened.
pub(crate) fn model(name: &str) -> Arc<Model> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let here = env::current_dir().unwrap_or_default();
    let of_checkout = |checkout: &Path| checkout.join("daemon/models").join(name);
    let checkouts = std::iter::once(built.as_path()).chain(here.ancestors());
    let found: Option<PathBuf> = checkouts.map(of_checkout).find(|folder| folder.is_dir());
    let folder = found.unwrap_or_else(|| of_checkout(&built));
    Arc::new(Model::open(name, &ModelSource::Folder(folder)).expect("a bundled model opens"))
}
