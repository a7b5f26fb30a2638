//! `trellis models`: the models that the daemon has loaded, and what there is to say of one before it is.

use std::time::Duration;

use clap::{Args, Subcommand};
use indicatif::HumanDuration;
use trellis_client::ModelInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use super::table::{Align, Table};
use super::width::WidthArgs;

mod explain;

const EXAMPLES: &str = "\
Examples:
  trellis models
  trellis models explain ./model.gguf      what it is and what it would need, without a daemon
  trellis models --wide
  trellis models --json | jq '.[].name'

Lines fit the terminal, or 80 columns where there is none: what has no room is left out, or cut with a sign (\u{2026}). --wide shows all,
with architecture, parameters and vocabulary.

WEIGHTS  their bytes
KV       bytes of KV cache that it has now, of which FREE are free
CONTEXT  tokens of the longest context";

/// List the loaded models, and those that are loaded on demand
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct ModelsArgs {
    #[command(subcommand)]
    command: Option<ModelsCommand>,
    #[command(flatten)]
    width: WidthArgs,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, Subcommand)]
enum ModelsCommand {
    Explain(explain::ExplainArgs),
}

pub(crate) async fn models(args: ModelsArgs, format: Format) -> Result<(), CliError> {
    if let Some(ModelsCommand::Explain(args)) = &args.command {
        return explain::explain(args, format);
    }
    let models = args.socket.connect(format).await?.models().await?;
    output::print(format, &models, |models| match args.width.is_wide() {
        true => table(models),
        false => narrow(models, args.width.n_cells()),
    })
}

/// What is said of a model beside its numbers has no head.
const REMARKS: &str = "";

/// What is of most use, in lines of so many cells.
fn narrow(models: &[ModelInfo], n_cells: usize) -> String {
    let mut table = Table::new([
        ("NAME", Align::Left),
        ("WEIGHTS", Align::Right),
        ("DTYPE", Align::Left),
        ("KV", Align::Right),
        ("FREE", Align::Right),
        ("CONTEXT", Align::Right),
        ("DEVICE", Align::Left),
        (REMARKS, Align::Left),
    ]);
    for (name, n_cells_min) in [("NAME", 12), ("DEVICE", 6), (REMARKS, 22)] {
        table.squeeze(name, n_cells_min);
    }
    table.spare(&["CONTEXT", "DTYPE", "FREE", "WEIGHTS", "KV", "DEVICE"]);
    for model in models {
        table.push([
            model.name.clone(),
            output::bytes(model.weight_bytes),
            model.dtype.clone(),
            output::bytes(model.n_pages * model.page_bytes),
            output::bytes(model.n_pages_free * model.page_bytes),
            model.n_positions.to_string(),
            model.device.clone(),
            remarks(model).join(", "),
        ]);
    }
    table.render_in(n_cells)
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
        (REMARKS, Align::Left),
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
    use unicode_width::UnicodeWidthStr;

    use super::*;

    #[test]
    fn lines_fit_the_screen_and_say_how_a_model_is() {
        let model = |name: &str, state: &str| ModelInfo {
            name: name.to_owned(),
            state: state.to_owned(),
            architecture: "LlamaForCausalLM".to_owned(),
            weight_bytes: 16_060_522_496,
            dtype: "bf16".to_owned(),
            n_pages: 65_536,
            n_pages_free: 65_000,
            page_bytes: 2 << 20,
            n_positions: 131_072,
            device: "cuda:0 (NVIDIA H200)".to_owned(),
            aliases: vec!["small".to_owned()],
            ..ModelInfo::default()
        };
        let models =
            [model("tiny", "loaded"), model("models--meta-llama--Llama-3.1-8B-Instruct", "unloaded")];
        for n_cells in [20, 40, 80, 200] {
            let shown = narrow(&models, n_cells);
            assert!(shown.lines().all(|line| line.width() <= n_cells), "{n_cells}: {shown}");
            assert!(shown.contains("tiny"), "{shown}");
        }
        let shown = narrow(&models, 80);
        assert!(shown.contains("unloaded, alias small") && shown.contains("16.1 GB"), "{shown}");
        assert!(table(&models).contains("models--meta-llama--Llama-3.1-8B-Instruct  LlamaForCausalLM"));
    }

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
