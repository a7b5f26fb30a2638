//! `trellis models`: the models that the daemon has loaded.

use std::time::Duration;

use clap::Args;
use indicatif::HumanDuration;
use trellis_client::ModelInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use super::table::{Align, Table};

const EXAMPLES: &str = "\
Examples:
  trellis models
  trellis models --json | jq '.[].name'";

/// List the loaded models, and those that are loaded on demand
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ModelsArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn models(args: ModelsArgs, format: Format) -> Result<(), CliError> {
    let models = args.socket.connect().await?.models().await?;
    output::print(format, &models, |models| table(models))
}

fn table(models: &[ModelInfo]) -> String {
    let mut table = Table::new([
        ("NAME", Align::Left),
        ("ARCHITECTURE", Align::Left),
        ("PARAMETERS", Align::Right),
        ("WEIGHTS", Align::Right),
        ("DTYPE", Align::Left),
        ("KV", Align::Right),
        ("FREE", Align::Right),
        ("CONTEXT", Align::Right),
        ("VOCABULARY", Align::Right),
        ("DEVICE", Align::Left),
        ("", Align::Left),
    ]);
    for model in models {
        table.push([
            model.name.clone(),
            model.architecture.clone(),
            output::count(model.n_parameters),
            output::bytes(model.weight_bytes),
            model.dtype.clone(),
            output::bytes(model.n_pages * model.page_bytes),
            output::bytes(model.n_pages_free * model.page_bytes),
            model.n_positions.to_string(),
            model.n_vocab.to_string(),
            model.device.clone(),
            remarks(model).join(", "),
        ]);
    }
    table.render()
}

/// What there is to say of a model beside its numbers.
fn remarks(model: &ModelInfo) -> Vec<String> {
    if let Some(failure) = &model.failure {
        return vec![format!("FAILED: {failure}")];
    }
    let mut remarks = Vec::new();
    if model.is_default {
        remarks.push("default".to_owned());
    }
    match (model.state.as_str(), model.loading_bytes) {
        ("loaded", _) => {}
        (state, Some((done, total))) if total > 0 => {
            remarks.push(format!("{state} {} %", (100 * u128::from(done) / u128::from(total)).min(100)));
        }
        (state, _) => remarks.push(state.to_owned()),
    }
    if model.is_on_demand && model.is_pinned {
        remarks.push("pinned".to_owned());
    }
    if let Some(unused_ms) = model.unused_ms.filter(|&ms| ms >= 1000) {
        remarks.push(format!("unused for {}", HumanDuration(Duration::from_millis(unused_ms))));
    }
    if !model.aliases.is_empty() {
        remarks.push(format!("alias {}", model.aliases.join(", ")));
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_on_demand_says_how_far_it_is_and_since_when_nobody_uses_it() {
        let of = |model: ModelInfo| remarks(&ModelInfo { is_on_demand: true, ..model }).join(", ");
        let state = |state: &str| ModelInfo { state: state.to_owned(), ..ModelInfo::default() };
        assert_eq!(of(ModelInfo { is_default: true, ..state("loaded") }), "default");
        assert_eq!(of(ModelInfo { loading_bytes: Some((43, 100)), ..state("loading") }), "loading 43 %");
        assert_eq!(of(ModelInfo { loading_bytes: Some((0, 0)), ..state("loading") }), "loading");
        let unused = ModelInfo {
            is_pinned: true,
            unused_ms: Some(61_000),
            aliases: vec!["s".into()],
            ..state("loaded")
        };
        assert_eq!(of(unused), "pinned, unused for 61 seconds, alias s");
        assert_eq!(remarks(&ModelInfo { is_pinned: true, ..state("loaded") }), Vec::<String>::new());
    }
}
