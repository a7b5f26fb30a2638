//! `trellis models explain`: what a model's files say, what it would need, and why it cannot be used where it cannot. No daemon is
//! asked, and no weight is read.

use clap::Args;
use serde::Serialize;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::model::{Model, ModelError, ModelFacts, ModelSource};

use crate::cli::connect::DtypeArg;
use crate::cli::error::CliError;
use crate::cli::output::{self, Format, escaped_line};
use crate::config::{Config, Device, DtypeChoice};
use crate::daemon::DaemonError;
use crate::device;
use crate::model_path::source_of;

const EXAMPLES: &str = "\
Examples:
  trellis models explain ./Llama-3.2-1B-Instruct-Q4_K_M.gguf
  trellis models explain ./Llama-3.2-1B --device cpu
  trellis models explain tiny --json | jq .memory_bytes

Weights are counted in the type that they are loaded in: f32 on the CPU; on a GPU that of the files, or bf16 where they are quantised.
On a GPU the memory of steps comes to that. `trellis load --fit` asks a daemon whether there is room beside what it has.

Exit status: 0 it can be loaded, 1 it cannot, and the last line says why, 2 there is nothing to explain.";

/// Say what a model's files hold and what it would need, before it is loaded
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExplainArgs {
    /// A GGUF file, a folder, also one of the Hugging Face cache, or a bundled model (tiny, draft)
    #[arg(value_name = "PATH|NAME")]
    model: String,
    /// For this device: auto, cpu, cuda, or cuda:N for one GPU of several
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Computing in this type
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
}

/// What there is to say of a model.
#[derive(Debug, Serialize)]
struct Explained {
    /// The name that it would have.
    name: String,
    /// Absent for a bundled one.
    path: Option<String>,
    format: &'static str,
    file_bytes: u64,
    architecture: Option<String>,
    n_parameters: u64,
    types: Vec<OfType>,
    tokenizer: Option<String>,
    n_tokens: Option<usize>,
    n_positions: Option<u64>,
    has_chat_template: bool,
    /// What it would be loaded on.
    device: String,
    /// Absent where it cannot be loaded.
    needs: Option<OfMemory>,
    is_usable: bool,
    /// Why it cannot be loaded.
    reason: Option<String>,
}

/// Tensors that are stored alike.
#[derive(Debug, Serialize)]
struct OfType {
    name: String,
    n_tensors: usize,
    n_elements: u64,
}

/// What a model takes of a device.
#[derive(Debug, Serialize)]
struct OfMemory {
    dtype: &'static str,
    weight_bytes: u64,
    /// Keys and values of one token in all layers.
    token_kv_bytes: u64,
    /// Those of the longest context.
    context_kv_bytes: u64,
    /// Weights and one longest context.
    memory_bytes: u64,
    /// All that models could take of the device; absent for a GPU, which is not opened.
    capacity_bytes: Option<u64>,
}

pub(super) fn explain(args: &ExplainArgs, format: Format) -> Result<(), CliError> {
    let defaults = Config::default();
    let config = Config {
        device: args.device.unwrap_or(defaults.device),
        dtype: args.dtype.map_or(defaults.dtype, DtypeChoice::from),
        ..defaults
    };
    let explained = explained(&args.model, &config).map_err(Box::new)?;
    output::print(format, &explained, text)?;
    if explained.is_usable { Ok(()) } else { Err(CliError::NoRoom) }
}

/// # Errors
/// There is no such model, or nothing that could be told about.
fn explained(choice: &str, config: &Config) -> Result<Explained, DaemonError> {
    let (name, source) = source_of(choice)?;
    let (facts, opened) = ModelFacts::of(&name, &source)
        .map_err(|source| DaemonError::Model { name: name.clone(), source: Box::new(source) })?;
    let (device, needs, reason) = match needs(opened, config) {
        Ok((device, needs)) => {
            let reason = too_large(&needs);
            (device, Some(needs), reason)
        }
        Err(reason) => (String::from(config.device), None, Some(reason)),
    };
    let path = match &source {
        ModelSource::Folder(path) | ModelSource::Gguf(path) => Some(path),
        ModelSource::Embedded(_) => None,
    };
    Ok(Explained {
        name,
        path: path.map(|path| path.display().to_string()),
        format: facts.format,
        file_bytes: facts.n_bytes,
        architecture: facts.architecture,
        n_parameters: facts.n_parameters,
        types: facts
            .types
            .into_iter()
            .map(|of| OfType { name: of.name, n_tensors: of.n_tensors, n_elements: of.n_elements })
            .collect(),
        tokenizer: facts.tokenizer,
        n_tokens: facts.n_tokens,
        n_positions: facts.n_positions,
        has_chat_template: facts.has_chat_template,
        device,
        needs,
        is_usable: reason.is_none(),
        reason,
    })
}

/// On which device, and what there; or why not.
fn needs(opened: Result<Model, ModelError>, config: &Config) -> Result<(String, OfMemory), String> {
    let model = opened.map_err(|error| error.to_string())?;
    let device = device::check(config.device).map_err(|error| error.to_string())?;
    let least = device::least_needs(device, &model, config).map_err(|error| error.to_string())?;
    let dtype = match device.is_cpu() {
        true => "f32",
        false => config.dtype.chosen().unwrap_or(model.dtype).name(),
    };
    let weight_bytes = least.weight_bytes;
    let context_kv_bytes = least.n_pages_min as u64 * least.page_bytes;
    let needs = OfMemory {
        dtype,
        weight_bytes,
        token_kv_bytes: least.page_bytes / PAGE_LEN as u64,
        context_kv_bytes,
        memory_bytes: least.fixed_bytes.saturating_add(context_kv_bytes),
        capacity_bytes: Some(device::total_bytes(device)).filter(|bytes| *bytes < u64::MAX),
    };
    Ok((String::from(device), needs))
}

fn too_large(needs: &OfMemory) -> Option<String> {
    let capacity = needs.capacity_bytes.filter(|capacity| needs.memory_bytes > *capacity)?;
    Some(format!(
        "it needs {} with one context of full length, of {} that there are",
        output::bytes(needs.memory_bytes),
        output::bytes(capacity)
    ))
}

fn text(explained: &Explained) -> String {
    let bytes = output::bytes;
    let named =
        |text: &Option<String>| text.as_deref().map_or_else(|| "not said".into(), escaped_line).into_owned();
    let mut lines = vec![("model", escaped_line(&explained.name).into_owned())];
    if let Some(path) = &explained.path {
        lines.push(("path", escaped_line(path).into_owned()));
    }
    lines.push(("format", format!("{}, {}", explained.format, bytes(explained.file_bytes))));
    lines.push(("architecture", named(&explained.architecture)));
    if explained.n_parameters > 0 {
        let of_type = |of: &OfType| {
            let tensors = if of.n_tensors == 1 { "tensor" } else { "tensors" };
            format!(
                "{} in {} {tensors} of {}",
                output::count(of.n_elements),
                of.n_tensors,
                escaped_line(&of.name)
            )
        };
        let types: Vec<String> = explained.types.iter().map(of_type).collect();
        lines
            .push(("parameters", format!("{}: {}", output::count(explained.n_parameters), types.join(", "))));
    }
    let tokens = explained.n_tokens.map(|n| format!(", {n} tokens")).unwrap_or_default();
    lines.push(("tokenizer", format!("{}{tokens}", named(&explained.tokenizer))));
    let chat = if explained.has_chat_template { "there is one" } else { "none" };
    lines.push(("chat template", chat.to_owned()));
    if let Some(n_positions) = explained.n_positions {
        lines.push(("context", format!("{n_positions} tokens")));
    }
    if let Some(needs) = &explained.needs {
        let context = bytes(needs.context_kv_bytes);
        lines.push((
            "weights",
            format!("{} in {} on {}", bytes(needs.weight_bytes), needs.dtype, explained.device),
        ));
        lines.push((
            "KV cache",
            format!("{} a token, {context} for the longest context", bytes(needs.token_kv_bytes)),
        ));
    }
    let verdict = match &explained.reason {
        None => "yes".to_owned(),
        Some(reason) => format!("no: {}", escaped_line(reason)),
    };
    lines.push(("can be loaded", verdict));
    let width = lines.iter().map(|(head, _)| head.len()).max().unwrap_or(0);
    lines.iter().map(|(head, said)| format!("{head:width$}  {said}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of(choice: &str) -> Explained {
        let config = Config { device: Device::Cpu, ..Config::default() };
        explained(choice, &config).expect("there is something to tell")
    }

    #[test]
    fn a_model_is_told_with_what_it_needs() {
        let explained = of("tiny");
        assert!(explained.is_usable && explained.path.is_none());
        let needs = explained.needs.as_ref().expect("it can be loaded");
        // Two heads of 64 keys and values in eight layers, in f32.
        assert_eq!((needs.token_kv_bytes, needs.dtype), (8 * 2 * 2 * 64 * 4, "f32"));
        assert_eq!(needs.context_kv_bytes, 1024 * needs.token_kv_bytes);
        assert!(needs.weight_bytes >= 4 * explained.n_parameters, "{needs:?}");
        let text = text(&explained);
        for said in
            ["LlamaForCausalLM", "BPE, 4096 tokens", "1024 tokens", "in f32 on cpu", "can be loaded  yes"]
        {
            assert!(text.contains(said), "{said}: {text}");
        }
    }

    #[test]
    fn a_model_that_cannot_be_used_is_told_with_the_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = r#"{"architectures": ["MambaForCausalLM"], "max_position_embeddings": 77}"#;
        fs::write(folder.path().join("config.json"), config).expect("written");
        let explained = of(folder.path().to_str().expect("UTF-8"));
        assert!(!explained.is_usable && explained.needs.is_none());
        let text = text(&explained);
        assert!(text.contains("MambaForCausalLM") && text.contains("77 tokens"), "{text}");
        assert!(
            text.lines().last().is_some_and(|line| line.contains("no: ") && line.contains("architectures")),
            "{text}"
        );
        let file = folder.path().join("x.gguf");
        fs::write(&file, "no such thing").expect("written");
        let error =
            super::explained(file.to_str().expect("UTF-8"), &Config::default()).expect_err("no header");
        assert!(error.to_string().contains("it does not begin with GGUF"), "{error}");
    }
}
