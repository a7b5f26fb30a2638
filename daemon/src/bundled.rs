//! Models that ship inside the binary.

use trellis_engine::model::ModelSource;

macro_rules! model {
    ($name:literal) => {
        ModelSource::Embedded(&[
            model!($name, "config.json"),
            model!($name, "generation_config.json"),
            model!($name, "model.safetensors"),
            model!($name, "tokenizer.json"),
            model!($name, "tokenizer_config.json"),
        ])
    };
    ($name:literal, $file:literal) => {
        ($file, include_bytes!(concat!("../models/", $name, "/", $file)))
    };
}

/// Names of the bundled models, the default first.
pub const NAMES: [&str; 2] = ["tiny", "draft"];

/// The files of the bundled model of this name.
#[must_use]
pub fn source(name: &str) -> Option<ModelSource> {
    match name {
        "tiny" => Some(model!("tiny")),
        "draft" => Some(model!("draft")),
        _ => None,
    }
}

/// The tokenizer of the bundled models, for models that have none of their own.
pub(crate) fn tokenizer_json() -> &'static [u8] {
    include_bytes!("../models/tiny/tokenizer.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_its_files() {
        for name in NAMES {
            let source = source(name).expect("listed");
            let model = trellis_engine::model::Model::open(name, &source).expect("a whole model");
            assert_eq!(model.config.vocab_size, 4096);
        }
        assert!(source("llama").is_none());
    }
}
