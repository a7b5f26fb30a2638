//! `trellis models`: the models that the daemon has loaded.

use clap::Args;
use trellis_client::ModelInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use super::table::{Align, Table};

const EXAMPLES: &str = "\
Examples:
  trellis models
  trellis models --json | jq '.[].name'";

/// List the loaded models
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
            match &model.failure {
                Some(failure) => format!("FAILED: {failure}"),
                None if model.is_default => "default".to_owned(),
                None if model.state == "loaded" => String::new(),
                None => model.state.clone(),
            },
        ]);
    }
    table.render()
}
