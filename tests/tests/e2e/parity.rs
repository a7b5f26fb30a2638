//! Models that `cuda/gpu/hf_parity.py` has made, against what Hugging Face transformers computes with them.

use std::fs;
use std::path::PathBuf;

use trellis_engine::model::{Model, ModelSource};
use trellis_tests::engines::{Sizes, backend, start};
use trellis_tests::goldens as data;

use crate::goldens;

/// Names the folder with a model folder and a golden file for each of them.
const FOLDER: &str = "TRELLIS_TEST_PARITY";

#[test]
#[ignore = "cuda/gpu/hf_parity.py makes the models and runs it"]
fn architectures_are_what_hugging_face_computes() {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).expect("the script names its folder");
    let mut n_models = 0;
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        if path.extension().is_none_or(|ending| ending != "json") {
            continue;
        }
        let expected = data::read(&path);
        let source = ModelSource::Folder(path.with_extension(""));
        let model = Model::open(expected.model.clone(), &source).expect("the model opens");
        // Steps of a few tokens, so that prompts are cut; the window of a sliding one is shorter than the prompts.
        let sizes = Sizes { n_step_rows: 8, n_step_tokens: 24, ..Sizes::default() };
        let backend = backend(&model, sizes);
        let engine = start(model, backend, sizes);
        goldens::compare(engine.handle(), &expected);
        n_models += 1;
    }
    assert!(n_models >= 4, "{n_models} architectures");
}
