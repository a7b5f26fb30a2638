//! Whether the models of a configuration could be loaded at a start, before any device is opened for them.

use trellis_engine::model::Model;

use super::capacity::Capacity;
use super::{Candidate, by_device, open_models};
use crate::config::Config;
use crate::daemon::DaemonError;
use crate::device;

/// Opens the models of the configuration as a start does, and compares them with what their devices may have for models: `model_bytes`,
/// and on the CPU the machine's memory. How much is free when the daemon starts, and what a GPU needs for steps, the start alone
/// finds out.
///
/// # Errors
/// A model cannot be opened, a GPU is asked for and cannot be used, or the models do not fit.
pub(crate) fn check_models(config: &Config) -> Result<Vec<Model>, DaemonError> {
    let models = open_models(&config.models, config)?;
    let config = Config { device: device::check(config.device)?, ..config.clone() };
    let mut opened = Vec::new();
    for (device, models) in by_device(models, &config) {
        let device = device::check(device)?;
        let n_bytes = device::total_bytes(device).min(config.model_bytes.unwrap_or(u64::MAX));
        let capacity = Capacity { device, n_bytes, taken: Vec::new() };
        let mut coming = Vec::new();
        for (choice, model) in models {
            let needs = device::least_needs(device, &model, &config)?;
            coming.push(Candidate { choice, model, needs });
        }
        capacity.shares(&mut coming, &config)?;
        opened.extend(coming.into_iter().map(|candidate| candidate.model));
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<Vec<String>, String> {
        let models = check_models(&Config::parse(text).expect("valid"));
        models
            .map(|models| models.into_iter().map(|model| model.name).collect())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn models_are_compared_with_what_they_may_have_in_the_words_of_a_load() {
        let text = "device = 'cpu'\nmodels = ['draft', 'tiny']";
        assert_eq!(checked(text).expect("they fit"), ["draft", "tiny"]);
        let all: u64 = ["draft", "tiny"]
            .map(|name| crate::daemon::open_model(name, &Config::default()).expect("bundled"))
            .map(|model| device::least_needs(crate::config::Device::Cpu, &model, &Config::default()))
            .map(|needs| needs.expect("it runs"))
            .map(|needs| needs.fixed_bytes + needs.kv_bytes_min())
            .iter()
            .sum();
        checked(&format!("{text}\nmodel_bytes = {all}")).expect("just enough");
        let error = checked(&format!("{text}\nmodel_bytes = {}", all - 1)).expect_err("too little");
        assert!(
            error.starts_with("model \"tiny\" needs ") && error.contains("free or can be freed"),
            "{error}"
        );
        let error = checked("device = 'cpu'\nmodel_bytes = 1").expect_err("too little");
        assert!(error.contains("of the 1 that the device has for models"), "{error}");
        let error = checked("device = 'cpu'\nkv_bytes = 4096").expect_err("too little");
        assert!(error.contains("kv_bytes allows"), "{error}");
        let error = checked("device = 'cpu'\nmodels = ['tiny', 'tiny']").expect_err("twice");
        assert_eq!(error, "model \"tiny\" is given twice");
        let error = checked("device = 'cpu'\ndtype = 'bf16'").expect_err("the CPU does not compute in it");
        assert!(error.starts_with("dtype bf16 needs a GPU"), "{error}");
    }

    #[test]
    fn models_of_the_catalog_are_looked_at_where_they_are_loaded_at_the_start() {
        let broken = "[catalog.broken]\npath = '/no/such/model'\n[catalog.small]\npath = 'draft'";
        assert_eq!(
            checked(&format!("device = 'cpu'\nmodels = ['small']\n{broken}")).expect("well"),
            ["small"]
        );
        let error =
            checked(&format!("device = 'cpu'\nmodels = ['broken']\n{broken}")).expect_err("it is not there");
        assert!(error.contains("/no/such/model"), "{error}");
    }
}
